"""What all tests share: one Keras flavour a process, fixed seeds, and every kind of model.

The flavour is chosen as users choose it, by KERAS_BACKEND and TF_USE_LEGACY_KERAS; `tox` runs the suite once for each.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ["KERAS_SPEEDUP_CACHE"] = "off"  # what one test learns must not decide what another sees

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.flavor import FLAVOR, keras

#: The ways to write one and the same model.
KINDS = ("subclassed", "functional", "sequential")


def pytest_report_header():
    return f"keras_speedup: flavour {FLAVOR}, {keras.__name__} {keras.__version__}"


def pytest_configure(config):
    config.addinivalue_line("markers", "flavors(*names): run in these flavours only")


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("flavors")
        if marker is not None and FLAVOR not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {', '.join(marker.args)}, this is {FLAVOR}"))


@pytest.fixture(autouse=True)
def _same_start():
    """Seeds every generator before a test, and gives back float32 after it."""
    keras.utils.set_random_seed(0)
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def flavor():
    return FLAVOR


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def make_model():
    """`make_model(kind, layers, input_shape, plain=False)`: the model of that kind."""
    return _make_model


@pytest.fixture
def make_pair():
    """`make_pair(kind, layers, input_shape, **compile)`: plain Keras and ours from equal weights."""
    return _make_pair


@pytest.fixture
def samples():
    """203 rows of 12 numbers and their class of 4: six batches of 32 and an odd one."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(203, 12)).astype("float32"), rng.integers(0, 4, 203)


def dense_layers():
    return [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4, activation="softmax")]


def _make_model(kind="functional", layers=dense_layers, input_shape=(12,), plain=False):
    layers = layers()
    if kind == "sequential":
        return (keras.Sequential if plain else ks.SpeedupSequential)([keras.Input(input_shape), *layers])
    base = keras.Model if plain else ks.SpeedupModel
    if kind == "functional":
        inputs = outputs = keras.Input(input_shape)
        for layer in layers:
            outputs = layer(outputs)
        return base(inputs, outputs)
    model = _chain_class(base)(layers)
    model(np.zeros((1, *input_shape), "float32"))
    return model


def _chain_class(base):
    class Chain(base):
        """Runs its layers one after another."""

        def __init__(self, layers):
            super().__init__()
            self.steps = list(layers)

        def call(self, inputs, training=None):
            for layer in self.steps:
                inputs = layer(inputs, training=training) if _takes_training(layer) else layer(inputs)
            return inputs

    return Chain


def _takes_training(layer):
    return isinstance(layer, (keras.layers.Dropout, keras.layers.BatchNormalization, keras.layers.RNN))


def _make_pair(kind="functional", layers=dense_layers, input_shape=(12,), optimizer="sgd", **compile_args):
    compile_args.setdefault("loss", "sparse_categorical_crossentropy")
    plain = _make_model(kind, layers, input_shape, plain=True)
    fast = _make_model(kind, layers, input_shape)
    fast.set_weights(plain.get_weights())
    plain.compile(optimizer=optimizer() if callable(optimizer) else optimizer, **compile_args)
    fast.compile(optimizer=optimizer() if callable(optimizer) else optimizer, **compile_args)
    return plain, fast
