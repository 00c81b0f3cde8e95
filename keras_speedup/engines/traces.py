"""What a model's outputs are computed from, noted while its layers are called."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..flavor import flatten_layers, is_operation, keras

Key = Hashable

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Step:
    """How one tensor comes about.

    Attributes:
        inputs: The tensors that it is computed from.
        layers: The layer that returns it; empty for the tensor of an operation outside layers.
        enters: It leaves no layer but is what `layers` make of an input or of a weight, by casting it.
        is_half: Whether it is float16 or bfloat16.
        casts: Whether it is in the dtype that a cast names, whatever it is computed from.
    """

    inputs: tuple[Key, ...]
    layers: tuple[Any, ...] = ()
    enters: bool = False
    is_half: bool = True
    casts: bool = False


@dataclass
class Trace:
    """What a model's outputs are computed from.

    Attributes:
        outputs: The tensors that the model returns.
        steps: How each tensor comes about, in the order in which they do.
        is_strict: Whether operations outside layers refuse to mix float32 and half precision.
    """

    outputs: list[Key] = field(default_factory=list)
    steps: dict[Key, Step] = field(default_factory=dict)
    is_strict: bool = True


def is_whole(layer: Any) -> bool:
    """Returns whether a layer changes its dtype as a whole: one of Keras's own, or one without layers inside."""
    if len(flatten_layers(layer)) == 1:
        return True
    return type(layer).__module__.split(".")[0] == keras.__name__ and not isinstance(layer, keras.Model)


@contextmanager
def calls_replaced(layers: Iterable[Any], replaced: Callable[[Any, Any], Any]) -> Iterator[None]:
    """While it is entered, each layer's `call` is what `replaced` makes of the layer and its `call`."""
    each = {id(layer): (layer, vars(layer).get("call")) for layer in layers}.values()
    for layer, _ in each:
        vars(layer)["call"] = replaced(layer, layer.call)
    try:
        yield
    finally:
        for layer, own in each:
            if own is None:
                del vars(layer)["call"]
            else:
                vars(layer)["call"] = own


@dataclass(frozen=True)
class Mark:
    """What passes through the identity of this number: `entries` are the numbers of what entered the same call."""

    layer: Any
    entries: tuple[int, ...] | None = None


class Recorder:
    """Sends what enters and leaves the layers of a model through identities, of which it gives each a number."""

    def __init__(self, model: Any, identity: Callable[[Any, int], Any], is_float: Callable[[Any], bool]):
        self.model = model
        self.marks: list[Mark] = []
        self._identity = identity
        self._is_float = is_float
        self._is_inside = False

    def watching(self) -> AbstractContextManager[None]:
        layers = [layer for layer in flatten_layers(self.model) if not is_operation(layer)]
        return calls_replaced(layers, self._recording)

    def _recording(self, layer: Any, call: Any) -> Any:
        whole = is_whole(layer)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            first = len(self.marks)
            args, kwargs = map_leaves(lambda leaf: self._mark(leaf, Mark(layer)), (args, kwargs))
            entries = tuple(range(first, len(self.marks)))
            if not whole:
                return call(*args, **kwargs)
            self._is_inside = True
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._is_inside = False
            return map_leaves(lambda leaf: self._mark(leaf, Mark(layer, entries)), outputs)

        return recording

    def _mark(self, leaf: Any, mark: Mark) -> Any:
        if not self._is_float(leaf):
            return leaf
        marked = self._identity(leaf, len(self.marks))
        self.marks.append(mark)
        mask = getattr(leaf, "_keras_mask", None)  # Keras 2.15 to 3.15: how masks travel
        if mask is not None:
            marked._keras_mask = mask
        return marked

    def step(self, number: int, source: Key, is_half: bool, key_of: Callable[[int], Key]) -> Step:
        """Returns the step of what came out of an identity."""
        mark = self.marks[number]
        if mark.entries is None:
            return Step((source,), (mark.layer,), enters=True, is_half=is_half)
        return Step(tuple(key_of(entry) for entry in mark.entries), (mark.layer,), is_half=is_half)

    def weights(self, key_of: Callable[[Any], Key]) -> dict[Key, Step]:
        """Returns the steps of the weights that are read outside a layer's call: who reads may be any layer around."""
        around: dict[Key, tuple[Any, ...]] = {}
        for layer in flatten_layers(self.model):
            if not is_whole(layer):
                for weight in layer.weights:
                    around[key_of(weight)] = (*around.get(key_of(weight), ()), layer)
        return {key: Step((), layers, enters=True) for key, layers in around.items()}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a structure of dicts, lists and tuples with `function` applied to what is in it."""
    if isinstance(value, dict):
        return type(value)((name, map_leaves(function, part)) for name, part in value.items())
    if isinstance(value, (list, tuple)) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, part) for part in value))
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map_leaves(function, part) for part in value)
    return function(value)


def leaves(value: Any) -> list[Any]:
    """Returns what is in a structure of dicts, lists and tuples."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def dtype_name(value: Any) -> str:
    """Returns the name of a tensor's dtype, whichever library it is of."""
    dtype = getattr(value, "dtype", None)
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def is_tensor(value: Any) -> bool:
    """Returns whether a value has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")
