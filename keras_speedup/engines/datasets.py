"""Batches of a `tf.data.Dataset`, fetched several at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..flavor import tensorflow
from .feed import Block, Leaves, flatten, row_count

tf = tensorflow("training from a tf.data.Dataset")


class DatasetFeed:
    """Batches of a `tf.data.Dataset`, fetched K at a time by one graph call and laid end to end.

    Args:
        dataset: Yields batches.
        num_batches: See `feed.Feed`.
        begin: Called when a pass begins; None for a dataset that does not care.
        end: Called when an epoch is over; None likewise.
    """

    def __init__(
        self,
        dataset: Any,
        num_batches: int | None,
        begin: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
    ):
        self._dataset, self.num_batches, self._begin, self._end = dataset, num_batches, begin, end
        self.reads_ahead = begin is None and end is None
        # Keras marks a component that is not there, such as missing weights, by an Optional that is always empty.
        spec = tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, dataset.element_spec
        )
        self.structure, specs = flatten(spec)
        self.specs: list[Any] | None = specs
        self.can_stack = all(
            isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[1:].is_fully_defined() for leaf in specs
        )

    def stream(self) -> _DatasetStream:
        if self._begin is not None:
            self._begin()
        return _DatasetStream(iter(self._dataset), self)

    def end_epoch(self) -> None:
        if self._end is not None:
            self._end()


class _DatasetStream:
    def __init__(self, iterator: Any, feed: DatasetFeed):
        self._iterator, self._feed = iterator, feed
        self._ended = False

    def read(self, steps: int) -> list[Block]:
        if self._ended:
            return []
        if steps == 1 or not self._feed.can_stack:
            batch = next(self._iterator, None)
            if batch is None:
                return []
            leaves = _present(batch)
            if len({row_count([leaf]) for leaf in leaves}) > 1:
                self._feed.can_stack = False
            return [Block(leaves, 1, row_count(leaves))]
        sizes, leaves = _fetch(self._iterator, tf.constant(steps))
        sizes = sizes.numpy()
        self._ended = len(sizes) < steps
        return list(_runs(sizes, tf.nest.flatten(leaves))) if len(sizes) else []


def _present(batch: Any) -> Leaves:
    """Returns the components of a batch that are there."""
    return [leaf for leaf in flatten(batch)[1] if not isinstance(leaf, tf.experimental.Optional)]


def _runs(sizes: np.ndarray, leaves: Leaves) -> Any:
    """Yields runs of batches of one size as one block each."""
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1), len(sizes)]
    row = 0
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if stop == start:
            continue
        rows = int(sizes[start:stop].sum())
        whole = len(edges) == 2
        yield Block(
            leaves if whole else [leaf[row : row + rows] for leaf in leaves], int(stop - start), int(sizes[start])
        )
        row += rows


@tf.function(autograph=False)
def _fetch(iterator: Any, steps: Any) -> Any:
    """Returns the sizes of the next batches, at most `steps`, and their components laid end to end."""
    specs = [spec for spec in flatten(iterator.element_spec)[1] if not isinstance(spec, tf.OptionalSpec)]
    shapes = [[None, *spec.shape[1:]] for spec in specs]
    arrays = [
        tf.TensorArray(spec.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    sizes = tf.TensorArray(tf.int32, 0, dynamic_size=True, element_shape=[])

    def more(index: Any, batch: Any, *_: Any) -> Any:
        return tf.logical_and(index < steps, batch.has_value())

    def body(index: Any, batch: Any, sizes: Any, *arrays: Any) -> Any:
        leaves = _present(batch.get_value())
        sizes = sizes.write(index, tf.shape(leaves[0])[0])
        written = [array.write(index, leaf) for array, leaf in zip(arrays, leaves, strict=True)]
        batch = tf.cond(index + 1 < steps, iterator.get_next_as_optional, lambda: batch)
        return (index + 1, batch, sizes, *written)

    count, _, sizes, *arrays = tf.while_loop(
        more, body, (tf.constant(0), iterator.get_next_as_optional(), sizes, *arrays)
    )
    # A list without a single element has no shape to be laid end to end in.
    empty = [tf.zeros([0, *shape[1:]], spec.dtype) for spec, shape in zip(specs, shapes, strict=True)]
    rows = tf.cond(count > 0, lambda: [array.concat() for array in arrays], lambda: empty)
    return sizes.stack(), rows
