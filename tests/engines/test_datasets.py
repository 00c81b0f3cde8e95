"""Batches of tf.data, fetched several at a time."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from keras_speedup.engines.datasets import DatasetFeed
from keras_speedup.flavor import tensorflow

from .test_feed import read_all, rows_of

tf = tensorflow()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64])
@pytest.mark.parametrize("asked", [[1], [3], [1, 5], [100]])
def test_every_row_comes_once_and_in_order(rows, asked):
    data = tf.data.Dataset.range(rows).batch(4)
    for blocks in read_all(DatasetFeed(data, None), asked, passes=2):
        assert rows_of(blocks) == list(range(rows))
        assert {block.batch_size for block in blocks[:-1]} <= {4}


def test_batches_of_changing_size_stay_apart():
    data = tf.data.Dataset.range(12).batch(2).concatenate(tf.data.Dataset.range(12, 20).batch(3))
    (blocks,) = read_all(DatasetFeed(data, None), [1, 50])
    sizes = [size for block in blocks for size in [block.batch_size] * block.steps]
    assert rows_of(blocks) == list(range(20))
    assert sizes == [2] * 6 + [3, 3, 2]


def test_elements_of_changing_length_are_read_one_by_one():
    data = tf.data.Dataset.range(1, 6).map(lambda n: tf.ones([2, n])).batch(1).map(lambda x: x[0])
    feed = DatasetFeed(data, None)
    assert not feed.can_stack
    (blocks,) = read_all(feed, [4])
    assert [tuple(block.leaves[0].shape) for block in blocks] == [(2, n) for n in range(1, 6)]


def test_dicts_and_strings_are_kept():
    data = tf.data.Dataset.from_tensor_slices(({"a": np.arange(6), "b": [b"x"] * 6}, np.arange(6))).batch(2)
    feed = DatasetFeed(data, None)
    (blocks,) = read_all(feed, [2])
    assert set(feed.structure[0]) == {"a", "b"}
    assert [block.steps for block in blocks][0] >= 1
    assert sum(block.samples for block in blocks) == 6
