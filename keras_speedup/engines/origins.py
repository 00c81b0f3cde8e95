"""Which layers the outputs of a call come from: the call is traced once, and what was traced is read back.

The trace is the backend's own (a TensorFlow graph, a jaxpr, PyTorch's functions as they run), so that a `call` may use
any operation. While it is made, what enters and leaves each layer passes through an identity that can be found again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ..flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras, tensorflow

Key = Hashable

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Step:
    """How one tensor comes about.

    Attributes:
        inputs: The tensors that it is computed from.
        layer: The layer that returns it; with `enters`, the one that takes it (cast to its dtype) or whose weight it is.
        enters: See `layer`.
        is_half: Whether it is float16 or bfloat16.
        casts: Whether it is in the dtype that a cast names, whatever it is computed from.
    """

    inputs: tuple[Key, ...]
    layer: Any = None
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
    """Returns whether a layer changes its dtype with all that is in it: one of Keras's own, or one without layers inside."""
    if len(flatten_layers(layer)) == 1:
        return True
    return type(layer).__module__.split(".")[0] == keras.__name__ and not isinstance(layer, keras.Model)


def trace_call(model: Any, inputs: Any) -> Trace:
    """Returns the trace of one call of a model, which changes nothing but that its layers are built.

    Args:
        model: Any Keras model or layer.
        inputs: Its inputs, of which shapes and dtypes count; a missing dimension is taken as 2.
    """
    trace_with = {"jax": _trace_jax, "torch": _trace_torch}.get(FLAVOR, _trace_tensorflow)
    unbuilt = any(not layer.built for layer in flatten_layers(model))
    with keras.StatelessScope() if KERAS_MAJOR == 3 else nullcontext():
        trace = trace_with(model, inputs)
    if unbuilt:  # once more, now that every layer and weight is there
        with keras.StatelessScope() if KERAS_MAJOR == 3 else nullcontext():
            trace = trace_with(model, inputs)
    model._clear_losses()  # Keras 2.15 to 3.15: what add_loss got while tracing
    return trace


@dataclass(frozen=True)
class _Mark:
    """What passes through the identity of this number: `entries` are the numbers of what entered the same call."""

    layer: Any
    entries: tuple[int, ...] | None = None


class _Recorder:
    """Sends what enters and leaves the layers of a model through identities, of which it gives each a number."""

    def __init__(self, model: Any, identity: Callable[[Any, int], Any], is_float: Callable[[Any], bool]):
        self.model = model
        self.marks: list[_Mark] = []
        self._identity = identity
        self._is_float = is_float
        self._is_inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        layers = flatten_layers(self.model)
        before = {id(layer): vars(layer).get("call") for layer in layers}
        for layer in layers:
            vars(layer)["call"] = self._recording(layer, layer.call)
        try:
            yield
        finally:
            for layer in layers:
                if before[id(layer)] is None:
                    del vars(layer)["call"]
                else:
                    vars(layer)["call"] = before[id(layer)]

    def _recording(self, layer: Any, call: Any) -> Any:
        whole = is_whole(layer)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return call(*args, **kwargs)
            first = len(self.marks)
            args, kwargs = map_leaves(lambda leaf: self._mark(leaf, _Mark(layer)), (args, kwargs))
            entries = tuple(range(first, len(self.marks)))
            if not whole:
                return call(*args, **kwargs)
            self._is_inside = True
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._is_inside = False
            return map_leaves(lambda leaf: self._mark(leaf, _Mark(layer, entries)), outputs)

        return recording

    def _mark(self, leaf: Any, mark: _Mark) -> Any:
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
            return Step((source,), mark.layer, enters=True, is_half=is_half)
        return Step(tuple(key_of(entry) for entry in mark.entries), mark.layer, is_half=is_half)

    def owned(self, key_of: Callable[[Any], Key]) -> dict[Key, Step]:
        """Returns the weights that layers with other layers inside hold themselves."""
        steps: dict[Key, Step] = {}
        for layer in flatten_layers(self.model):  # outermost first, so that the innermost keeps it
            if not is_whole(layer):
                steps.update({key_of(weight): Step((), layer, enters=True, is_half=False) for weight in layer.weights})
            else:
                for weight in layer.weights:
                    steps.pop(key_of(weight), None)
        return steps


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


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(2 if size is None else int(size) for size in value.shape)


def _trace_tensorflow(model: Any, inputs: Any) -> Trace:
    tf = tensorflow()
    at: dict[Key, int] = {}
    made: list[Any] = []

    def identity(tensor: Any, number: int) -> Any:
        marked = tf.identity(tensor)
        at[marked.ref()] = number
        made.append(marked)
        return marked

    def placeholder(value: Any) -> Any:
        if not is_tensor(value) or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return value
        return tf.compat.v1.placeholder(dtype_name(value), value.shape)

    recorder = _Recorder(model, identity, lambda leaf: tf.is_tensor(leaf) and leaf.dtype.is_floating)
    graph = tf.__internal__.FuncGraph("keras_speedup_origins")  # TensorFlow 2.15 to 2.21; Keras builds models in one
    with graph.as_default(), recorder.watching():
        outputs = model(map_leaves(placeholder, inputs))
    trace = Trace([tensor.ref() for tensor in leaves(outputs) if tf.is_tensor(tensor) and hasattr(tensor, "op")])
    for operation in graph.get_operations():
        sources = tuple(tensor.ref() for tensor in operation.inputs)
        for tensor in operation.outputs:
            key, is_half = tensor.ref(), dtype_name(tensor) in HALF
            if key in at:
                trace.steps[key] = recorder.step(at[key], sources[0], is_half, lambda number: made[number].ref())
            else:
                trace.steps[key] = Step(sources, is_half=is_half, casts=operation.type == "Cast")
    owned = recorder.owned(_variable_key)
    for outer, inner in graph.captures:
        step = owned.get(getattr(outer, "_id", id(outer)))
        if step is not None:
            trace.steps[inner.ref()] = step
    return trace


def _variable_key(weight: Any) -> Key:
    variable = weight.value if KERAS_MAJOR == 3 else weight
    return getattr(variable.handle, "_id", id(variable.handle))  # an eager tensor's number, TensorFlow 2.15 to 2.21


def _trace_jax(model: Any, inputs: Any) -> Trace:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    prefix = f"keras_speedup:{id(model)}:"
    numpy = jax.numpy

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and bool(numpy.issubdtype(leaf.dtype, numpy.floating))

    recorder = _Recorder(model, lambda leaf, number: checkpoint_name(leaf, f"{prefix}{number}"), is_float)
    specs = map_leaves(lambda leaf: jax.ShapeDtypeStruct(_shape(leaf), dtype_name(leaf)) if is_tensor(leaf) else leaf, inputs)
    abstract = [leaf for leaf in leaves(specs) if is_tensor(leaf)]

    def call(*tensors: Any) -> Any:
        given = iter(tensors)
        outputs = model(map_leaves(lambda leaf: next(given) if is_tensor(leaf) else leaf, specs))
        return [leaf for leaf in leaves(outputs) if is_tensor(leaf)]

    with recorder.watching():
        closed = jax.make_jaxpr(call)(*abstract)
    reader = _JaxprReader(recorder, prefix)
    reader.trace.outputs = reader.read(closed.jaxpr, ())
    owned = recorder.owned(lambda weight: id(weight.value))
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if id(value) in owned:
            reader.trace.steps[((), id(variable))] = owned[id(value)]
    return reader.trace


class _JaxprReader:
    """Reads a jaxpr and those inside it into steps. A variable's key is the path to its jaxpr and its identity."""

    def __init__(self, recorder: _Recorder, prefix: str):
        self.trace = Trace(is_strict=False)
        self._recorder = recorder
        self._prefix = prefix

    def read(self, jaxpr: Any, path: tuple[int, ...]) -> list[Key]:
        """Adds the steps of a jaxpr and returns the keys of its outputs."""
        steps = self.trace.steps
        for number, equation in enumerate(jaxpr.eqns):
            sources = tuple((path, id(variable)) for variable in equation.invars)
            keys = [(path, id(variable)) for variable in equation.outvars]
            name = str(equation.params.get("name", ""))
            inner = [jaxpr for value in equation.params.values() for jaxpr in _jaxprs(value)]
            if equation.primitive.name == "name" and name.startswith(self._prefix):
                mark = int(name.removeprefix(self._prefix))
                is_half = dtype_name(equation.outvars[0].aval) in HALF
                steps[("mark", mark)] = self._recorder.step(mark, sources[0], is_half, lambda mark: ("mark", mark))
                steps[keys[0]] = Step((("mark", mark),))
            elif inner:
                self._read_inner(equation.primitive.name, inner, sources, keys, (*path, number))
            else:
                steps.update({key: Step(sources) for key in keys})
        return [(path, id(variable)) for variable in jaxpr.outvars]

    def _read_inner(
        self, name: str, inner: list[Any], sources: tuple[Key, ...], keys: list[Key], path: tuple[int, ...]
    ) -> None:
        steps = self.trace.steps
        is_flow = name in ("scan", "while", "cond")  # which feed outputs back, or choose
        for number, jaxpr in enumerate(inner):
            place = (*path, number)
            made = self.read(jaxpr, place)
            taken = [(place, id(variable)) for variable in jaxpr.invars]
            one_to_one = not is_flow and len(taken) == len(sources) and len(made) == len(keys)
            for index, key in enumerate(taken):
                steps[key] = Step((sources[index],) if one_to_one else (*sources, *(made if is_flow else ())))
            for index, key in enumerate(keys):
                before = steps[key].inputs if key in steps else ()
                steps[key] = Step((*before, *([made[index]] if one_to_one else made)))


def _jaxprs(value: Any) -> list[Any]:
    """Returns the jaxprs in a parameter of an equation."""
    if isinstance(value, (list, tuple)):
        return [jaxpr for part in value for jaxpr in _jaxprs(part)]
    value = getattr(value, "jaxpr", value)
    return [value] if hasattr(value, "eqns") else []


def _trace_torch(model: Any, inputs: Any) -> Trace:
    import torch

    kept: list[Any] = []  # so that no identity comes again
    at: dict[int, Any] = {}
    trace = Trace()

    class Watch(torch.overrides.TorchFunctionMode):
        """Notes what each function of PyTorch makes of what."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outputs = func(*args, **(kwargs or {}))
            sources = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            name = getattr(func, "__name__", "")
            for made in leaves(outputs):
                if isinstance(made, torch.Tensor) and all(made is not source for source in sources):
                    casts = name in ("to", "type", "float", "half", "bfloat16")
                    is_half = dtype_name(made) in HALF
                    trace.steps[id(made)] = Step(tuple(map(id, sources)), is_half=is_half, casts=casts)
                    kept.extend((made, *sources))
            return outputs

    def identity(tensor: Any, number: int) -> Any:
        marked = tensor.view_as(tensor)
        at[number] = (marked, id(tensor))
        kept.append(tensor)
        return marked

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()

    recorder = _Recorder(model, identity, is_float)
    given = map_leaves(lambda leaf: keras.ops.zeros(_shape(leaf), dtype_name(leaf)) if is_tensor(leaf) else leaf, inputs)
    with torch.no_grad(), recorder.watching(), Watch():
        outputs = model(given)
    for number, (marked, source) in at.items():
        is_half = dtype_name(marked) in HALF
        trace.steps[id(marked)] = recorder.step(number, source, is_half, lambda number: id(at[number][0]))
    trace.steps.update(recorder.owned(lambda weight: id(weight.value)))
    trace.outputs = [id(leaf) for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    kept.append(outputs)
    return trace
