"""lint: what is misordered or missing in a tf.data pipeline, read from the dataset's own graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..flavor import dataset_graph, tensorflow


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: A short name, such as "cache-after-shuffle".
        place: The stages it is about, from the source on.
        harm: What it costs.
        fix: What to write instead.

    Example:

    >>> import keras_speedup as ks
    >>> print(ks.Finding("cache-after-shuffle", "shuffle, cache", "Every epoch is alike.", "Put cache() first."))
    cache-after-shuffle at shuffle, cache: Every epoch is alike. Put cache() first.
    """

    code: str
    place: str
    harm: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code} at {self.place}: {self.harm} {self.fix}"


@dataclass(frozen=True)
class _Stage:
    """A stage of the graph: its operation's type, and its attributes and constant inputs."""

    kind: str
    node: Any
    graph: Any

    def constant(self, index: int) -> Any:
        """Returns the constant that goes into an input, or None."""
        name = self.node.input[index].split(":")[0] if index < len(self.node.input) else ""
        return self.graph.constant(name)

    def function(self) -> Any:
        for attribute in ("f", "predicate"):
            name = self.node.attr[attribute].func.name
            if name:
                return self.graph.functions.get(name)
        return None


class _Graph:
    """A dataset's graph, as the list of its stages from the source to the end."""

    def __init__(self, tf: Any, dataset: Any):
        definition = dataset_graph(tf, dataset)
        self.functions = {function.signature.name: function for function in definition.library.function}
        nodes = {node.name: node for node in definition.node}
        self._constants = {name: node for name, node in nodes.items() if node.op == "Const"}
        self._tf = tf
        end = next(node for node in definition.node if node.op == "_Retval")
        self.stages: list[_Stage] = []
        name = end.input[0].split(":")[0]
        while name:
            node = nodes[name]
            if "Dataset" in node.op:
                kind = node.op.split("Dataset")[0]
                self.stages.insert(0, _Stage(kind, node, self))
            inputs = [part.split(":")[0] for part in node.input if "Dataset" in nodes[part.split(":")[0]].op]
            name = inputs[0] if inputs else ""

    def constant(self, name: str) -> Any:
        node = self._constants.get(name)
        return None if node is None else self._tf.make_ndarray(node.attr["value"].tensor)

    def is_random(self, stage: _Stage) -> bool:
        function = stage.function()
        return function is not None and any("Random" in op or "Shuffle" in op for op in self._operations(function))

    def is_python(self, stage: _Stage) -> bool:
        function = stage.function()
        return function is not None and any(op in ("PyFunc", "EagerPyFunc") for op in self._operations(function))

    def _operations(self, function: Any, depth: int = 0) -> Iterator[str]:
        for node in function.node_def:
            yield node.op
            for attribute in node.attr.values():
                inner = self.functions.get(attribute.func.name)
                if inner is not None and depth < 8:
                    yield from self._operations(inner, depth + 1)


Rule = Callable[[_Graph], Iterator[Finding]]


def lint(dataset: Any) -> list[Finding]:
    """Returns what is misordered or missing in a `tf.data` pipeline, each with the fix.

    Args:
        dataset: Any `tf.data.Dataset`.

    Raises:
        TypeError: It is no `tf.data.Dataset`.

    Example:

    >>> import tensorflow as tf, keras_speedup as ks
    >>> data = tf.data.Dataset.range(100).shuffle(100).batch(8).cache()
    >>> [finding.code for finding in ks.lint(data)]
    ['cache-after-shuffle', 'cache-after-batch']
    """
    tf = tensorflow("keras_speedup.lint")
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"lint takes a tf.data.Dataset, got {type(dataset).__name__}.")
    from .arrays import array_source

    if array_source(dataset) is not None:
        return []
    graph = _Graph(tf, dataset)
    return [finding for rule in _RULES for finding in rule(graph)]


def _pairs(graph: _Graph, first: tuple[str, ...], then: str) -> Iterator[tuple[_Stage, _Stage]]:
    """Yields the last stage of the kinds `first` before each stage of the kind `then`."""
    for index, stage in enumerate(graph.stages):
        if stage.kind.startswith(then):
            before = [other for other in graph.stages[:index] if other.kind.startswith(first)]
            if before:
                yield before[-1], stage


def _cache_after_shuffle(graph: _Graph) -> Iterator[Finding]:
    for _ in _pairs(graph, ("Shuffle",), "Cache"):
        yield Finding(
            "cache-after-shuffle",
            "shuffle, cache",
            "The cache keeps the first epoch's order: every epoch sees the same one.",
            "Put cache() before shuffle().",
        )


def _cache_after_batch(graph: _Graph) -> Iterator[Finding]:
    for batch, _ in _pairs(graph, ("Batch", "ParallelBatch", "PaddedBatch"), "Cache"):
        if any(stage.kind.startswith("Shuffle") for stage in graph.stages[: graph.stages.index(batch)]):
            yield Finding(
                "cache-after-batch",
                "batch, cache",
                "The cache keeps whole batches: every epoch sees the same samples together.",
                "Put cache() before shuffle() and batch().",
            )


def _cache_after_random(graph: _Graph) -> Iterator[Finding]:
    for index, stage in enumerate(graph.stages):
        if stage.kind.startswith("Cache") and any(map(graph.is_random, graph.stages[:index])):
            yield Finding(
                "cache-after-random-map",
                "map, cache",
                "The cache keeps one draw of the random map: augmentation is frozen.",
                "Put cache() before the random map.",
            )


def _cache_after_prefetch(graph: _Graph) -> Iterator[Finding]:
    for _ in _pairs(graph, ("Prefetch",), "Cache"):
        yield Finding(
            "cache-after-prefetch",
            "prefetch, cache",
            "Once the cache is full, nothing is prefetched any more.",
            "Put prefetch() last, behind cache().",
        )


def _cache_thrown_away(graph: _Graph) -> Iterator[Finding]:
    for index, stage in enumerate(graph.stages):
        if not stage.kind.startswith("Cache"):
            continue
        for later in graph.stages[index + 1 :]:
            position = 2 if later.kind in ("Batch", "PaddedBatch") else 3
            if later.kind in ("Batch", "ParallelBatch") and _is_true(later.constant(position)):
                yield Finding(
                    "drop_remainder-above-cache",
                    "cache, batch(drop_remainder=True)",
                    "The batch never reads the cache to its end, so the cache is thrown away every epoch.",
                    "Use batch(drop_remainder=False), or take() a whole number of batches before cache().",
                )


def _prefetch_not_last(graph: _Graph) -> Iterator[Finding]:
    kinds = [stage.kind for stage in graph.stages if stage.kind not in ("Options", "Model", "AssertCardinality")]
    if "Prefetch" in kinds and kinds[-1] != "Prefetch" and not kinds[-1].startswith("Cache"):
        yield Finding(
            "prefetch-not-last",
            f"prefetch, {kinds[-1].lower()}",
            "What comes after prefetch runs while the model waits.",
            "Put prefetch(tf.data.AUTOTUNE) last.",
        )


def _python_map(graph: _Graph) -> Iterator[Finding]:
    for stage in graph.stages:
        if stage.kind in ("Map", "ParallelMap", "ParallelMapV2") and graph.is_python(stage):
            yield Finding(
                "python-map",
                "map(py_function)",
                "Python holds its lock: the map runs on one core, whatever num_parallel_calls is.",
                "Write the map with TensorFlow operations, or cache() behind it.",
            )


def _sequential_random_map(graph: _Graph) -> Iterator[Finding]:
    for stage in graph.stages:
        if stage.kind == "Map" and graph.is_random(stage):
            yield Finding(
                "sequential-stateful-map",
                "map",
                "A stateful map is not made parallel by itself: it runs on one core.",
                "Give it num_parallel_calls=tf.data.AUTOTUNE.",
            )


def _small_shuffle(graph: _Graph) -> Iterator[Finding]:
    for index, stage in enumerate(graph.stages):
        if not stage.kind.startswith("Shuffle"):
            continue
        buffer, rows = stage.constant(1), _rows(graph, index)
        if buffer is not None and rows is not None and 0 < int(buffer) * 10 < rows:
            yield Finding(
                "small-shuffle-buffer",
                f"shuffle({int(buffer)})",
                f"The buffer is far smaller than the {rows:,} samples: they are mixed only with their neighbours.",
                "Shuffle by index or by path, or use a buffer as large as the data.",
            )


def _rows(graph: _Graph, index: int) -> int | None:
    """Returns how many elements reach a stage, where the stages before it keep the source's number."""
    for stage in graph.stages[1:index]:
        if not stage.kind.startswith(("Map", "ParallelMap", "Cache", "Prefetch", "Options")):
            return None
    source = graph.stages[0]
    if source.kind == "Range":
        return int(source.constant(1))
    first = source.constant(0) if source.kind == "TensorSlice" else None
    return len(first) if first is not None and first.ndim else None


def _is_true(value: Any) -> bool:
    return value is not None and bool(value)


_RULES: tuple[Rule, ...] = (
    _cache_after_shuffle,
    _cache_after_batch,
    _cache_after_random,
    _cache_after_prefetch,
    _cache_thrown_away,
    _prefetch_not_last,
    _python_map,
    _sequential_random_map,
    _small_shuffle,
)
