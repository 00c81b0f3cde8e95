"""lint names what is misordered, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras_speedup as ks
from keras_speedup.flavor import keras, tensorflow

tf = tensorflow()


def source():
    return tf.data.Dataset.from_tensor_slices((np.zeros((203, 4), "float32"), np.arange(203)))


def jitter(x, y):
    return x + tf.random.normal(tf.shape(x)), y


def in_python(x, y):
    return tf.py_function(lambda value: value, [x], tf.float32), y


WRONG = {
    "cache-after-shuffle": lambda d: d.shuffle(203).cache().batch(8),
    "cache-after-batch": lambda d: d.shuffle(203).batch(8).cache(),
    "cache-after-random-map": lambda d: d.map(jitter).cache().batch(8),
    "cache-after-prefetch": lambda d: d.batch(8).prefetch(2).cache(),
    "drop_remainder-above-cache": lambda d: d.cache().batch(32, drop_remainder=True),
    "prefetch-not-last": lambda d: d.prefetch(2).batch(8),
    "python-map": lambda d: d.map(in_python, num_parallel_calls=2).batch(8),
    "sequential-stateful-map": lambda d: d.map(jitter).batch(8),
    "small-shuffle-buffer": lambda d: d.shuffle(5).batch(8),
}

RIGHT = [
    lambda d: d.batch(8),
    lambda d: d.cache().shuffle(203).batch(8).prefetch(tf.data.AUTOTUNE),
    lambda d: d.map(lambda x, y: (x * 2, y), num_parallel_calls=2).cache().shuffle(203).batch(8).prefetch(2),
    lambda d: d.batch(32, drop_remainder=True).cache(),
]


@pytest.mark.parametrize("code", sorted(WRONG))
def test_each_fault_is_named_with_its_fix(code):
    findings = ks.lint(WRONG[code](source()))
    found = {finding.code: finding for finding in findings}
    assert code in found
    assert found[code].fix in str(found[code])


def test_order_of_tip_articles_is_found():
    codes = {finding.code for finding in ks.lint(source().shuffle(50).batch(8).prefetch(2).cache())}
    assert {"cache-after-shuffle", "cache-after-prefetch"} <= codes


@pytest.mark.parametrize("data", RIGHT)
def test_right_orders_are_left_in_peace(data):
    assert ks.lint(data(source())) == []


@pytest.mark.parametrize("layers", [[], [keras.layers.Rescaling(2.0)]])
@pytest.mark.parametrize("last_batch", ["keep", "drop", "pad"])
def test_own_datasets_are_clean(layers, last_batch):
    pipeline = ks.DataPipeline(layers, batch_size=8, last_batch=last_batch)
    assert ks.lint(pipeline.dataset(source())) == []
    assert ks.lint(pipeline.dataset(np.zeros((20, 4)), np.zeros(20))) == []


def test_lint_takes_datasets_alone():
    with pytest.raises(TypeError, match="got list"):
        ks.lint([1])
