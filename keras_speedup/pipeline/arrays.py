"""Arrays as a source: shuffled over the whole set by index, gathered a batch at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..engines.feed import leaves_of


class ArraySource:
    """What a dataset made from arrays is, for a training loop that gathers several batches at once.

    Attributes:
        arrays: `x`, `(x, y)` or `(x, y, sample_weight)`; leaves of equal length that NumPy can index.
        batch_size: Rows in a batch.
        last_batch: "keep", "drop" or "pad".
        shuffle: Whether each epoch has an order of its own.
    """

    def __init__(self, arrays: Any, batch_size: int, last_batch: str, order: Callable[[int], np.ndarray] | None):
        self.arrays, self.batch_size, self.last_batch = arrays, batch_size, last_batch
        self._order = order
        self.rows = row_count(arrays)

    @property
    def shuffle(self) -> bool:
        return self._order is not None

    @property
    def num_batches(self) -> int:
        whole, rest = divmod(self.rows, self.batch_size)
        return whole + (1 if rest and self.last_batch != "drop" else 0)

    def epoch_order(self) -> np.ndarray | None:
        """Returns the order of rows of the next epoch; None for the order of the arrays."""
        return None if self._order is None else self._order(self.rows)


_sources: weakref.WeakKeyDictionary[Any, ArraySource] = weakref.WeakKeyDictionary()


def remember_source(dataset: Any, source: ArraySource) -> None:
    """Notes what a dataset was made from, for as long as the dataset lives."""
    _sources[dataset] = source


def array_source(dataset: Any) -> ArraySource | None:
    """Returns what a dataset of a `DataPipeline` was made from, None for any other."""
    try:
        return _sources.get(dataset)
    except TypeError:  # not hashable: an array
        return None


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns the structure with `function` applied to each array in it."""
    if data is None:
        return None
    if isinstance(data, dict):
        return {name: map_leaves(function, value) for name, value in data.items()}
    if isinstance(data, (tuple, list)):
        return tuple(map_leaves(function, value) for value in data)
    return function(data)


def row_count(data: Any) -> int:
    """Returns the common length of the arrays.

    Raises:
        ValueError: The lengths differ, or there are no rows.
    """
    lengths = [len(leaf) for leaf in leaves_of(data)]
    if len(set(lengths)) != 1:
        raise ValueError(f"x, y and sample_weight must have the same number of rows, got {lengths}.")
    if lengths[0] == 0:
        raise ValueError("The data is empty: expected at least one row, got 0.")
    return lengths[0]


def standardized(data: Any, floatx: str) -> Any:
    """Returns the structure with NumPy arrays for tensors, frames and lists of numbers; float64 becomes `floatx`."""

    def convert(leaf: Any) -> Any:
        if hasattr(leaf, "iloc"):  # a pandas frame or series
            leaf = leaf.to_numpy()
            if leaf.ndim == 1:
                leaf = leaf[:, None]
        elif not isinstance(leaf, np.ndarray):
            leaf = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
        if leaf.ndim == 0:
            raise ValueError(f"Arrays must have a first dimension of rows, got a single value {leaf!r}.")
        if leaf.dtype == np.float64:
            leaf = leaf.astype(floatx)
        return leaf

    if isinstance(data, list) and all(np.isscalar(value) for value in data):
        return convert(np.asarray(data))
    if isinstance(data, list):
        data = tuple(data)
    return map_leaves(convert, data)
