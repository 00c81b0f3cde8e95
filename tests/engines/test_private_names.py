"""The private names of Keras and TensorFlow that engines and flavor use: these tests fail when one goes away."""

from __future__ import annotations

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup import flavor
from keras_speedup.flavor import FLAVOR, KERAS_MAJOR, keras


def model():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def test_functional_is_what_model_makes():
    inputs = keras.Input((4,))
    assert type(keras.Model(inputs, keras.layers.Dense(2)(inputs))) is flavor.Functional


def test_model_keeps_the_names_the_loop_asks_for():
    names = {
        3: ["_initial_epoch", "_should_eval", "_assert_compile_called", "_flatten_metrics_in_order"],
        2: ["_should_eval", "_assert_compile_was_called", "_train_counter", "_maybe_load_initial_counters_from_ckpt"],
    }[KERAS_MAJOR]
    assert [name for name in names if not hasattr(model(), name)] == []


@pytest.mark.flavors("jax", "torch", "tensorflow")
def test_dense_arrays_are_taken_from_keras_own_adapter():
    from keras_speedup.engines.feed import ArrayFeed
    from keras_speedup.engines.keras3 import Keras3

    feed = Keras3(model()).feed(np.zeros((5, 4)), np.zeros((5, 2)), batch_size=2)
    assert isinstance(feed, ArrayFeed)
    assert feed.leaves[0].dtype == np.float32


def test_layers_are_flattened_and_random_ones_told():
    assert len(flavor.flatten_layers(model())) >= 2
    assert flavor.is_random(keras.layers.Dropout(0.5))
    assert flavor.is_random(keras.layers.RandomFlip())
    assert not flavor.is_random(keras.layers.Dense(2))
    assert not flavor.is_random(keras.layers.Dropout(0.0)) or KERAS_MAJOR == 2


@pytest.mark.flavors("jax")
def test_variables_hold_their_array_in_value():
    variable = model().trainable_variables[0]
    assert variable._value is variable.value


@pytest.mark.flavors("tensorflow", "legacy")
def test_op_determinism_can_be_asked_for():
    from keras_speedup.engines import engine_for

    fast = ks.speedup(model())
    assert engine_for(fast).is_deterministic is False


def test_layer_policy_can_be_set_after_construction():
    layer = keras.layers.Dense(2)
    flavor.set_layer_policy(layer, "mixed_bfloat16")
    assert layer.compute_dtype == "bfloat16"
    assert FLAVOR
