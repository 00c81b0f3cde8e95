"""The stages of a pipeline in the order that is always right, and the choice made at each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engines.feed import assemble, flatten, leaves_of
from ..engines.shadow import free_memory_bytes
from .arrays import ArraySource, map_leaves, remember_source
from .cache import cached, choose_cache

#: Bytes of rows that are gathered at once: a call of Python for each batch would take longer than the batch.
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Stage:
    """One stage: its name, and what was chosen and why."""

    name: str
    choice: str


@dataclass(frozen=True)
class Plan:
    """What a pipeline does with a source.

    Attributes:
        pipeline: The `DataPipeline`.
        before: Deterministic layers, computed once.
        after: Random layers and those behind them, computed anew for each batch.
        training: Whether random layers draw.
        shuffle: Whether every epoch has an order of its own.
        last_batch: "keep", "drop" or "pad".
    """

    pipeline: Any
    before: list[Any]
    after: list[Any]
    training: bool
    shuffle: bool
    last_batch: str


@dataclass
class Source:
    """Where elements come from: arrays, or a dataset of samples or batches.

    Attributes:
        name: What it is, for the summary.
        arrays: The arrays, or None.
        dataset: A dataset of samples, or None; it draws a new order at each pass where `shuffles` is true.
        count: Its samples, or None where unknown.
        shuffles: Whether the dataset shuffles itself (files by path).
        key: Identifies the data for a cache on disk, or None.
        map_batch: Applied to each batch in place of the layers before the cache (parsing), or None.
        batches: Whether the dataset's elements are batches that must stay as they are.
    """

    name: str
    arrays: Any = None
    dataset: Any = None
    count: int | None = None
    shuffles: bool = False
    key: str | None = None
    map_batch: Callable[..., Any] | None = None
    batches: bool = False


def build(tf: Any, source: Source, plan: Plan) -> tuple[Any, list[Stage]]:
    """Returns the dataset of batches, and its stages."""
    stages = [Stage("source", source.name)]
    rows = None
    if source.arrays is not None:
        dataset, rows = _from_arrays(tf, source, plan, stages)
    elif source.batches:
        dataset = source.dataset
        if plan.before:
            dataset = dataset.map(_on_x(plan.before), num_parallel_calls=tf.data.AUTOTUNE)
            stages.append(Stage("deterministic layers", _names(plan.before)))
    else:
        dataset = _from_samples(tf, source, plan, stages)
    if plan.after:
        dataset = dataset.map(_on_x(plan.after, training=plan.training), num_parallel_calls=tf.data.AUTOTUNE)
        stages.append(Stage("random layers", f"{_names(plan.after)}, on whole batches, anew at each"))
    if plan.last_batch == "pad":
        dataset = dataset.map(lambda *batch: _padded(tf, batch, plan.pipeline.batch_size))
        stages.append(Stage("pad", "the last batch repeats rows with sample_weight 0"))
    if plan.pipeline.service is not None:
        # Elements are handed out one by one to whichever consumer asks: each exactly once an epoch.
        dataset = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=tf.data.experimental.service.ShardingPolicy.OFF, service=plan.pipeline.service
            )
        )
        stages.append(Stage("service", str(plan.pipeline.service)))
    options = tf.data.Options()
    options.deterministic = plan.pipeline.deterministic
    options.threading.max_intra_op_parallelism = 1  # the threads are better spent on different batches
    dataset = dataset.with_options(options).prefetch(tf.data.AUTOTUNE)
    stages.append(Stage("prefetch", "as many batches as the runtime finds useful"))
    if rows is not None and not plan.after and plan.last_batch != "pad" and plan.pipeline.service is None:
        remember_source(dataset, rows)
    return dataset, stages


def _from_arrays(tf: Any, source: Source, plan: Plan, stages: list[Stage]) -> tuple[Any, ArraySource | None]:
    """Returns batches gathered by index, and the arrays they come from where nothing more is done to them.

    Layers before the cache are applied once, where the result fits into memory.
    """
    arrays = source.arrays
    before = list(plan.before)
    if before and plan.pipeline.cache != "disk" and plan.pipeline.cache is not None:
        size = _transformed_bytes(arrays, before)
        free = free_memory_bytes()
        if plan.pipeline.cache == "memory" or free is None or size < free // 4:
            arrays = _transformed(arrays, before)
            stages.append(Stage("deterministic layers", f"{_names(before)}, computed once"))
            stages.append(Stage("cache", f"memory: {size >> 20:,} MB"))
            before = []
    order = plan.pipeline.generator.permutation if plan.shuffle else None
    rows = ArraySource(arrays, plan.pipeline.batch_size, plan.last_batch, order)
    stages.append(Stage("shuffle", "the whole set, by index" if plan.shuffle else "none"))
    stages.append(Stage("batch", f"{plan.pipeline.batch_size} rows gathered at once; last batch: {plan.last_batch}"))
    dataset = _gathered(tf, rows)
    if before:
        dataset = dataset.map(_on_x(before), num_parallel_calls=tf.data.AUTOTUNE)
        stages.append(Stage("deterministic layers", f"{_names(before)}, on whole batches; too large to be kept"))
    return dataset, None if before else rows


def _gathered(tf: Any, rows: ArraySource) -> Any:
    """Returns a dataset that draws an order for each pass and gathers a batch at each step."""
    structure, leaves = flatten(rows.arrays)
    steps, size, count = rows.num_batches, rows.batch_size, rows.rows

    def draw() -> np.ndarray:
        order = rows.epoch_order()
        return np.arange(count, dtype=np.int64) if order is None else order.astype(np.int64)

    def gather(index: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(leaf[index]) for leaf in leaves]

    types = [tf.as_dtype(leaf.dtype) if leaf.dtype.kind not in "OUS" else tf.string for leaf in leaves]

    used, row_bytes = min(count, steps * size), sum(leaf.nbytes for leaf in leaves) // count + 1
    whole, chunk = used // size * size, size * max(1, min(64, CHUNK_BYTES // (size * row_bytes)))

    def gathered(index: Any, *shape: int) -> Any:
        parts = tf.numpy_function(gather, [index], types, stateful=False)
        pairs = zip(parts, leaves, strict=True)
        return assemble(structure, [tf.reshape(part, [*shape, *leaf.shape[1:]]) for part, leaf in pairs])

    def slices(*parts: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(parts if isinstance(structure, tuple) else parts[0])

    def epoch(_: Any) -> Any:
        order = tf.numpy_function(draw, [], tf.int64)
        indices = tf.data.Dataset.range(0, whole, chunk).map(lambda at: order[at : tf.minimum(at + chunk, whole)])
        # Two calls at once: Python's lock lets no more of them gain.
        batches = indices.map(lambda index: gathered(index, -1, size), num_parallel_calls=2).flat_map(slices)
        last = tf.data.Dataset.from_tensors(order[whole:used]).map(lambda index: gathered(index, used - whole))
        return batches.concatenate(last) if used > whole else batches

    dataset = tf.data.Dataset.range(1).flat_map(epoch)
    return dataset.apply(tf.data.experimental.assert_cardinality(steps))


def _from_samples(tf: Any, source: Source, plan: Plan, stages: list[Stage]) -> Any:
    dataset = source.dataset
    if source.map_batch is None and plan.before:
        dataset = dataset.map(_on_x(plan.before, single=True), num_parallel_calls=tf.data.AUTOTUNE)
        stages.append(Stage("deterministic layers", f"{_names(plan.before)}, computed once"))
    choice = choose_cache(tf, plan.pipeline.cache, dataset, source.count)
    dataset = cached(tf, dataset, choice, source.key, plan.before)
    stages.append(Stage("cache", str(choice)))
    if plan.shuffle and not (source.shuffles and not choice.kind):
        buffer = source.count or 10_000
        buffer = max(1, min(buffer, choice.rows_that_fit))
        dataset = dataset.shuffle(
            buffer, seed=int(plan.pipeline.generator.integers(2**31)), reshuffle_each_iteration=True
        )
        stages.append(Stage("shuffle", f"a buffer of {buffer:,} samples"))
    dataset = dataset.batch(plan.pipeline.batch_size, drop_remainder=False)
    stages.append(Stage("batch", f"{plan.pipeline.batch_size}; last batch: {plan.last_batch}"))
    if plan.last_batch == "drop":
        # drop_remainder would leave the cache unread to its end, and so throw it away every epoch.
        dataset = dataset.filter(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0] == plan.pipeline.batch_size)
        if source.count is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(source.count // plan.pipeline.batch_size))
    if source.map_batch is not None:
        dataset = dataset.map(source.map_batch, num_parallel_calls=tf.data.AUTOTUNE)
        if plan.before:
            dataset = dataset.map(_on_x(plan.before), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset


def _on_x(layers: list[Any], *, training: bool | None = None, single: bool = False) -> Callable[..., Any]:
    """Returns a function that applies layers to the first part of an element."""

    def apply(x: Any, *rest: Any) -> Any:
        if single:
            x = map_leaves(lambda leaf: leaf[None], x)
        for layer in layers:
            takes = training is not None and "training" in type(layer).call.__code__.co_varnames
            x = layer(x, training=training) if takes else layer(x)
        if single:
            x = map_leaves(lambda leaf: leaf[0], x)
        return (x, *rest) if rest else x

    return apply


def _padded(tf: Any, batch: tuple[Any, ...], size: int) -> Any:
    rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    index = tf.range(size) % rows
    x, y, weight = (*batch, None, None)[:3] if len(batch) < 3 else batch[:3]
    real = tf.cast(tf.range(size) < rows, "float32")
    if y is None:
        raise ValueError(
            'last_batch="pad" needs targets y, whose sample_weight marks the padding; use "keep" or "drop".'
        )

    def fill(leaf: Any) -> Any:
        return tf.ensure_shape(tf.gather(leaf, index), [size, *leaf.shape[1:]])

    x, y = map_leaves(fill, x), map_leaves(fill, y)
    if weight is None:
        weight = map_leaves(lambda _: real, y) if isinstance(y, (dict, tuple, list)) else real
    else:
        weight = map_leaves(lambda leaf: fill(leaf) * tf.cast(_like(tf, real, leaf), leaf.dtype), weight)
    return x, y, weight


def _like(tf: Any, real: Any, leaf: Any) -> Any:
    return tf.reshape(real, [-1, *[1] * (leaf.shape.rank - 1)])


def _transformed(arrays: Any, layers: list[Any]) -> Any:
    """Returns the arrays with the layers applied to `x`, a thousand rows at a time."""
    x, rest = (arrays[0], arrays[1:]) if isinstance(arrays, tuple) else (arrays, ())
    function = _on_x(layers)
    rows = len(leaves_of(x)[0])
    parts = [map_leaves(_numpy, function(_slice(x, at, at + 1000))) for at in range(0, rows, 1000)]
    columns = zip(*map(leaves_of, parts), strict=True)
    x = assemble(flatten(parts[0])[0], [np.concatenate(column) for column in columns])
    return (x, *rest) if rest else x


def _transformed_bytes(arrays: Any, layers: list[Any]) -> int:
    x = arrays[0] if isinstance(arrays, tuple) else arrays
    rows = len(leaves_of(x)[0])
    sample = _on_x(layers)(_slice(x, 0, 1))
    return rows * sum(_numpy(leaf).nbytes for leaf in leaves_of(sample))


def _slice(data: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], data)


def _numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def _names(layers: list[Any]) -> str:
    return ", ".join(layer.name for layer in layers)
