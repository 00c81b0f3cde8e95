"""How rows reach a program: blocks of whole batches, laid end to end, made ready by a thread.

A block holds K batches of one size as flat rows, so that one program can run K steps on it. A batch of another
size (the odd last one) always comes as a block of its own.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Leaves = list[Any]


def flatten(data: Any) -> tuple[Any, Leaves]:
    """Returns the structure of `data` with indices in place of its components, and the components; None stays."""
    leaves: Leaves = []

    def visit(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, dict):
            return {key: visit(value) for key, value in part.items()}
        if isinstance(part, (tuple, list)):
            return tuple(map(visit, part)) if isinstance(part, tuple) else list(map(visit, part))
        leaves.append(part)
        return len(leaves) - 1

    return visit(data), leaves


def leaves_of(data: Any) -> Leaves:
    """Returns the components of `data`; None is left out."""
    return flatten(data)[1]


def assemble(structure: Any, leaves: Sequence[Any]) -> Any:
    """Returns `structure` with each index replaced by its leaf."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {key: assemble(value, leaves) for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(assemble(value, leaves) for value in structure)
    if isinstance(structure, list):
        return [assemble(value, leaves) for value in structure]
    return leaves[structure]


@dataclass(frozen=True)
class Block:
    """`steps` batches of `batch_size` rows each.

    Attributes:
        leaves: One array for each component of the data, `steps * batch_size` rows long; as the source gave them
            where `steps` is 1.
        steps: Whole batches in the block.
        batch_size: Rows in each batch.
    """

    leaves: Leaves
    steps: int
    batch_size: int

    @property
    def samples(self) -> int:
        return self.steps * self.batch_size

    def split(self, steps: int) -> tuple[Block, Block | None]:
        """Returns the first `steps` batches, and the rest if there is any."""
        if steps >= self.steps:
            return self, None
        at = steps * self.batch_size
        head = Block([leaf[:at] for leaf in self.leaves], steps, self.batch_size)
        return head, Block([leaf[at:] for leaf in self.leaves], self.steps - steps, self.batch_size)


class Stream(Protocol):
    """One pass over the data."""

    def read(self, steps: int) -> list[Block]:
        """Returns the next batches, at most `steps` of them; an empty list at the end."""


class Feed(Protocol):
    """Data that can be passed over again and again.

    Attributes:
        structure: What one batch looks like, with the index of its leaf in place of each component, and None where
            a component is not there.
        num_batches: Batches in one pass; None where it is unknown or without end.
        specs: The leaves' TensorFlow specs, or None where the leaves are NumPy arrays.
        can_stack: Whether several batches can be laid end to end.
        reads_ahead: Whether the next pass may begin before the epoch is over.
    """

    structure: Any
    num_batches: int | None
    specs: list[Any] | None
    can_stack: bool
    reads_ahead: bool

    def stream(self) -> Stream:
        """Begins a pass over the data."""

    def end_epoch(self) -> None:
        """Tells the source that an epoch is over."""


class Cursor:
    """A place in a feed, with the next blocks made ready by a thread, also those of the next pass.

    Args:
        feed: What to read.
        convert: Turns a block's leaves into what the program takes; called in the thread.
        passes: How often the feed will be passed over at the most.
        depth: Blocks made ready beforehand.
    """

    def __init__(self, feed: Feed, convert: Callable[[Block], Block], passes: int = 1, depth: int = 2):
        self._feed, self._convert = feed, convert
        self._steps = 1
        self._passes = passes if feed.reads_ahead else 1
        self._ready: queue.Queue[Block | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._rest: Block | None = None
        self._thread = threading.Thread(target=self._fill, name="keras_speedup-input", daemon=True)
        self._started = False

    @property
    def is_used_up(self) -> bool:
        """Whether the last pass has ended."""
        return self._passes <= 0

    def take(self, steps: int, ahead: int | None = None) -> Block | None:
        """Returns the next block, of at most `steps` batches; None at the end of each pass.

        Args:
            steps: The most batches wanted.
            ahead: Batches a block should hold from now on; `steps` where it is not given.
        """
        self._steps = ahead or steps
        if not self._started:
            self._started = True
            self._thread.start()
        block, self._rest = self._rest, None
        if block is None:
            if self.is_used_up:
                return None
            item = self._ready.get()
            if isinstance(item, BaseException):
                self._passes = 0
                raise item
            if item is None:
                self._passes -= 1
                return None
            block = item
        block, self._rest = block.split(steps)
        return block

    def close(self) -> None:
        """Ends the thread; what it had made ready is dropped."""
        self._closed.set()
        self._passes = 0
        while self._started and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _fill(self) -> None:
        try:
            for _ in range(self._passes):
                stream = self._feed.stream()
                while not self._closed.is_set() and (blocks := stream.read(self._steps)):
                    for block in blocks:
                        self._put(self._convert(block))
                self._put(None)
                if self._closed.is_set():
                    return
        except BaseException as error:  # handed to the thread that takes
            self._put(error)

    def _put(self, item: Block | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


class ArrayFeed:
    """Arrays in memory (or mapped into it), gathered K batches at once by index.

    Args:
        leaves: Arrays of equal length.
        structure: See `Feed`.
        batch_size: Rows in a batch.
        drop_last: Whether rows after the last whole batch are left out.
        order: Returns the row order of the next pass, or None for the order of the arrays.
    """

    can_stack = True
    reads_ahead = True
    specs: list[Any] | None = None

    def __init__(
        self,
        leaves: Leaves,
        structure: Any,
        batch_size: int,
        drop_last: bool = False,
        order: Callable[[], np.ndarray | None] = lambda: None,
    ):
        self.leaves, self.structure, self.batch_size, self.order = leaves, structure, batch_size, order
        rows = len(leaves[0])
        self.rows = rows // batch_size * batch_size if drop_last else rows
        self.num_batches: int | None = -(-self.rows // batch_size)

    def stream(self) -> _ArrayStream:
        return _ArrayStream(self, self.order())

    def end_epoch(self) -> None:
        pass


class _ArrayStream:
    def __init__(self, feed: ArrayFeed, order: np.ndarray | None):
        self._feed, self._order, self._at = feed, order, 0

    def read(self, steps: int) -> list[Block]:
        feed = self._feed
        left = feed.rows - self._at
        if left <= 0:
            return []
        steps, size = (min(steps, left // feed.batch_size), feed.batch_size) if left >= feed.batch_size else (1, left)
        stop = self._at + steps * size
        rows = slice(self._at, stop) if self._order is None else self._order[self._at : stop]
        self._at = stop
        return [Block([leaf[rows] for leaf in feed.leaves], steps, size)]


def shuffled(rows: int) -> Callable[[], np.ndarray]:
    """Returns a function that gives a new order of `rows` rows at each call, from Keras's seed where one is set."""
    # keras.utils.set_random_seed seeds Python's generator, from which Keras draws its own default seeds too.
    generator = np.random.default_rng(random.randrange(2**32))
    return lambda: generator.permutation(rows)


class IteratorFeed:
    """Batches that a Python iterator yields.

    Args:
        make: Returns a new iterator over the batches.
        num_batches: See `Feed`.
        end: Called when an epoch is over.
    """

    specs: list[Any] | None = None
    reads_ahead = False

    def __init__(
        self, make: Callable[[], Iterator[Any]], num_batches: int | None, end: Callable[[], None] = lambda: None
    ):
        self._make, self.num_batches, self._end = make, num_batches, end
        self.structure: Any = None  # known once the first batch is read
        self.can_stack = True

    def stream(self) -> _IteratorStream:
        return _IteratorStream(self._make(), self)

    def end_epoch(self) -> None:
        self._end()


class _IteratorStream:
    def __init__(self, iterator: Iterator[Any], feed: IteratorFeed):
        self._iterator, self._feed = iterator, feed

    def read(self, steps: int) -> list[Block]:
        batches = []
        for batch in self._iterator:
            self._feed.structure, leaves = flatten(batch)
            self._feed.can_stack = len({row_count([leaf]) for leaf in leaves}) == 1 and all(map(np.ndim, leaves))
            batches.append(Block(leaves, 1, row_count(leaves)))
            if len(batches) >= steps or not self._feed.can_stack:
                break
        return list(_stack(batches))


def row_count(leaves: Leaves) -> int:
    """Returns the rows of a batch: the length of its first component that has one."""
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return 1


def _stack(batches: list[Block]) -> Iterator[Block]:
    """Yields runs of batches of one shape as one block each."""
    run: list[Block] = []
    for batch in batches:
        if run and [np.shape(leaf) for leaf in batch.leaves] != [np.shape(leaf) for leaf in run[0].leaves]:
            yield _join(run)
            run = []
        run.append(batch)
    if run:
        yield _join(run)


def _join(run: list[Block]) -> Block:
    if len(run) == 1:
        return run[0]
    columns = zip(*(block.leaves for block in run), strict=True)
    return Block([np.concatenate(column) for column in columns], len(run), run[0].batch_size)
