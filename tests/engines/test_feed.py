"""Blocks of batches: every row once, in order, whatever is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_speedup.engines.feed import ArrayFeed, Block, Cursor, IteratorFeed, assemble, flatten


def read_all(feed, asked, passes=1):
    """Reads whole passes, asking for the numbers of batches in `asked` in turn; returns each pass's blocks."""
    cursor, found, turn = Cursor(feed, lambda block: block, passes), [], 0
    for _ in range(passes):
        blocks = []
        while (block := cursor.take(asked[turn % len(asked)])) is not None:
            assert block.steps <= asked[turn % len(asked)]
            blocks.append(block)
            turn += 1
        found.append(blocks)
    assert cursor.is_used_up
    cursor.close()
    return found


def rows_of(blocks):
    return np.concatenate([np.asarray(block.leaves[0]) for block in blocks]).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans())
def test_arrays_come_whole_in_order_and_in_batches_of_one_size(rows, size, asked, drop):
    feed = ArrayFeed([np.arange(rows)], 0, size, drop_last=drop)
    for blocks in read_all(feed, asked, passes=2):
        expected = rows // size * size if drop else rows
        assert (rows_of(blocks) if blocks else []) == list(range(expected))
        assert all(block.batch_size == size for block in blocks[:-1])
        assert sum(block.steps for block in blocks) == feed.num_batches


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_batches_of_changing_size_are_never_mixed(sizes, asked):
    edges = np.cumsum([0, *sizes])
    batches = [(np.arange(a, b),) for a, b in zip(edges, edges[1:], strict=False)]
    (blocks,) = read_all(IteratorFeed(lambda: iter(batches), None), asked)
    assert rows_of(blocks) == list(range(edges[-1]))
    assert [size for block in blocks for size in [block.batch_size] * block.steps] == sizes


def test_error_of_the_source_reaches_the_training():
    def broken():
        yield (np.zeros(2),)
        raise KeyError("the file is gone")

    cursor = Cursor(IteratorFeed(broken, None), lambda block: block)
    cursor.take(1)
    with pytest.raises(KeyError, match="the file is gone"):
        cursor.take(1)
    cursor.close()


def test_closing_ends_the_thread_of_an_endless_source():
    def endless():
        while True:
            yield (np.zeros(2),)

    cursor = Cursor(IteratorFeed(endless, None), lambda block: block)
    cursor.take(3)
    cursor.close()
    assert not cursor._thread.is_alive()


def test_block_is_split_between_batches():
    head, rest = Block([np.arange(12)], 4, 3).split(1)
    assert (head.leaves[0].tolist(), rest.steps, rest.leaves[0][0]) == ([0, 1, 2], 3, 3)


@pytest.mark.parametrize("data", [1, (1, 2), {"a": (1, None), "b": [2]}, ({"x": 1}, None, 2)])
def test_structure_comes_back(data):
    structure, leaves = flatten(data)
    assert assemble(structure, leaves) == data
