"""Plans of TensorFlow's engine on real steps: compiled in part where XLA cannot compile the whole."""

from __future__ import annotations

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.engines.feed import Cursor
from keras_speedup.engines.shadow import ShadowTrial
from keras_speedup.flavor import keras

pytestmark = pytest.mark.flavors("tensorflow", "legacy")


class Unique(keras.layers.Layer):
    """Its inputs, by way of an operation that XLA does not compile, and of one on the host."""

    def __init__(self, prints=False):
        super().__init__()
        self.prints = prints

    def call(self, inputs):
        import tensorflow as tf

        values, places = tf.unique(tf.reshape(inputs, [-1]))
        if self.prints:
            tf.print(tf.size(values))
        return tf.reshape(tf.gather(values, places), tf.shape(inputs))

    def compute_output_shape(self, input_shape):
        return input_shape


def engine_and_block(samples, layer):
    keras.utils.set_random_seed(0)
    model = ks.SpeedupSequential(
        [keras.Input((12,)), layer, keras.layers.Dense(8, "relu"), keras.layers.Dense(4, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    engine = model._speedup._ready()
    feed = model._speedup._feed(*samples, batch_size=32)
    return model, engine, feed, Cursor(feed, engine.convert, 1).take(6, ahead=6)


def test_what_xla_can_compile_of_a_step_gives_the_plain_graphs_numbers(samples):
    model, engine, feed, block = engine_and_block(samples, Unique())
    assert engine.compiled_plans("train", feed, block) == ("clusters",)
    before = [np.array(weight) for weight in model.get_weights()]
    start = engine.prepare_shadow("train", feed, block)
    program, found = engine.compile_on_shadow(ShadowTrial(("train", "clusters", 6, feed, block)), start, lambda: False)
    assert found.difference < 1e-5
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert np.isfinite(float(program.run(block)["loss"]))
    assert not np.array_equal(before[0], model.get_weights()[0])


def test_nothing_is_run_twice_that_acts_outside_the_model(samples):
    _, engine, feed, block = engine_and_block(samples, Unique(prints=True))
    assert engine.compiled_plans("train", feed, block) == ()


def test_attention_agrees_though_its_key_bias_has_no_gradient_but_rounding():
    """Adam divides the gradient by its own size, so the bias moves by another amount on every plan."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 6))
    attended = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    outputs = keras.layers.Dense(3, "softmax")(keras.layers.GlobalAveragePooling1D()(attended))
    model = ks.SpeedupModel(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(192, 8, 6)).astype("float32"), rng.integers(0, 3, 192)
    model.fit(x, y, batch_size=32, epochs=3, verbose=0)
    engine = model._speedup._ready()
    feed = model._speedup._feed(x, y, batch_size=32)
    block = Cursor(feed, engine.convert, 1).take(6, ahead=6)
    start = engine.prepare_shadow("train", feed, block)
    _, found = engine.compile_on_shadow(ShadowTrial(("train", "xla", 6, feed, block)), start, lambda: False)
    assert found.difference < 1e-4
