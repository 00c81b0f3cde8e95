"""Which layers the outputs of a call come from: the call is traced once, and what was traced is read back.

The trace is the backend's own (a TensorFlow graph, a jaxpr, PyTorch's functions as they run), so that a `call` may use
any operation. While it is made, what enters and leaves each layer passes through an identity that can be found again.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ..flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras, tensorflow
from .traces import HALF, Key, Recorder, Step, Trace, dtype_name, is_tensor, leaves, map_leaves


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

    recorder = Recorder(model, identity, lambda leaf: tf.is_tensor(leaf) and leaf.dtype.is_floating)
    graph = tf.__internal__.FuncGraph("keras_speedup_origins")  # TensorFlow 2.15 to 2.21; Keras builds models in one
    with graph.as_default(), recorder.watching():
        outputs = model(map_leaves(placeholder, inputs))
    trace = Trace([tensor.ref() for tensor in leaves(outputs) if tf.is_tensor(tensor) and hasattr(tensor, "op")])
    weights = recorder.weights(_variable_key)
    reads: dict[Key, Step] = {}  # and what they are cast to
    for outer, inner in graph.captures:
        if _tensor_number(outer) in weights:
            reads[inner.ref()] = weights[_tensor_number(outer)]
    for operation in graph.get_operations():
        sources = tuple(tensor.ref() for tensor in operation.inputs)
        for tensor in operation.outputs:
            key, is_half = tensor.ref(), dtype_name(tensor) in HALF
            if key in at:
                trace.steps[key] = recorder.step(at[key], sources[0], is_half, lambda number: made[number].ref())
            elif operation.type in ("ReadVariableOp", "Cast") and sources[0] in reads:
                trace.steps[key] = reads[key] = reads[sources[0]]
            else:
                trace.steps[key] = Step(sources, is_half=is_half, casts=operation.type == "Cast")
    return trace


def _variable_key(weight: Any) -> Key:
    variable = weight._value if KERAS_MAJOR == 3 else weight  # Keras 3.3 to 3.15: the tf.Variable, without a cast
    return _tensor_number(getattr(variable, "handle", weight))


def _tensor_number(tensor: Any) -> Key:
    return getattr(tensor, "_id", id(tensor))  # an eager tensor's own, TensorFlow 2.15 to 2.21


def _trace_jax(model: Any, inputs: Any) -> Trace:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    prefix = f"keras_speedup:{id(model)}:"
    numpy = jax.numpy

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and bool(numpy.issubdtype(leaf.dtype, numpy.floating))

    recorder = Recorder(model, lambda leaf, number: checkpoint_name(leaf, f"{prefix}{number}"), is_float)

    def spec(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(_shape(leaf), dtype_name(leaf)) if is_tensor(leaf) else leaf

    specs = map_leaves(spec, inputs)
    abstract = [leaf for leaf in leaves(specs) if is_tensor(leaf)]

    def call(*tensors: Any) -> Any:
        given = iter(tensors)
        outputs = model(map_leaves(lambda leaf: next(given) if is_tensor(leaf) else leaf, specs))
        return [leaf for leaf in leaves(outputs) if is_tensor(leaf)]

    with recorder.watching():
        closed = jax.make_jaxpr(call)(*abstract)
    reader = _JaxprReader(recorder, prefix)
    reader.trace.outputs = reader.read(closed.jaxpr, ())
    weights = recorder.weights(lambda weight: id(weight.value))
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if id(value) in weights:
            reader.trace.steps[((), id(variable))] = weights[id(value)]
    return reader.trace


class _JaxprReader:
    """Reads a jaxpr and those inside it into steps. A variable's key is the path to its jaxpr and its identity."""

    def __init__(self, recorder: Recorder, prefix: str):
        self.trace = Trace(is_strict=False)
        self._recorder = recorder
        self._prefix = prefix

    def read(self, jaxpr: Any, path: tuple[int, ...]) -> list[Key]:
        """Adds the steps of a jaxpr and returns the keys of its outputs."""
        steps = self.trace.steps
        for number, equation in enumerate(jaxpr.eqns):
            sources = tuple((path, id(variable)) for variable in equation.invars)
            keys: list[Key] = [(path, id(variable)) for variable in equation.outvars]
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
            taken: list[Key] = [(place, id(variable)) for variable in jaxpr.invars]
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
            sources = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, (torch.Tensor, keras.Variable))]
            name = getattr(func, "__name__", "")
            for made in leaves(outputs):
                if isinstance(made, torch.Tensor) and all(made is not source for source in sources):
                    casts = name in ("to", "type", "float", "half", "bfloat16")
                    is_half = dtype_name(made) in HALF
                    own = weights.get(id(sources[0])) if casts and sources else None
                    trace.steps[id(made)] = own or Step(tuple(map(id, sources)), is_half=is_half, casts=casts)
                    kept.extend((made, *sources))
            return outputs

    def identity(tensor: Any, number: int) -> Any:
        marked = tensor.view_as(tensor)
        at[number] = (marked, id(tensor))
        kept.append(tensor)
        return marked

    def is_float(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()

    recorder = Recorder(model, identity, is_float)
    weights = {**recorder.weights(lambda weight: id(weight.value)), **recorder.weights(id)}
    trace.steps.update(weights)

    def zeros(leaf: Any) -> Any:
        return keras.ops.zeros(_shape(leaf), dtype_name(leaf)) if is_tensor(leaf) else leaf

    with torch.no_grad(), recorder.watching(), Watch():
        outputs = model(map_leaves(zeros, inputs))
    for number, (marked, source) in at.items():
        is_half = dtype_name(marked) in HALF
        trace.steps[id(marked)] = recorder.step(number, source, is_half, lambda number: id(at[number][0]))
    trace.outputs = [id(leaf) for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor)]
    kept.append(outputs)
    return trace
