"""Output layers that compute in float32 under a mixed policy."""

from __future__ import annotations

from typing import Any

from .flavor import (
    KERAS_MAJOR,
    Functional,
    flatten_layers,
    keras,
    producer,
    record_call,
    set_layer_policy,
)

_HALF = ("float16", "bfloat16")


def computes_in_half(model: Any) -> bool:
    """Returns whether any layer of a model computes in float16 or bfloat16."""
    return any(getattr(layer, "compute_dtype", None) in _HALF for layer in flatten_layers(model))


def make_outputs_float32(model: Any, inputs: Any = None) -> list[str]:
    """Puts every layer that produces an output of `model` in float32, and returns the names of these layers.

    Where an output comes from a layer without weights or from an operation (a softmax, a sum), the nearest layers
    with weights before it are put in float32 too. Layers under a policy map of their own are left alone.

    Args:
        model: A model with at least one layer that computes in half precision.
        inputs: The inputs of a first call, for a model that is no graph of layers.
    """
    heads = _graph_heads(model) if _is_graph(model) else _called_heads(model, inputs)
    changed = []
    for layer in heads:
        if _is_mixed(layer):
            set_layer_policy(layer, "float32")
            changed.append(layer.name)
    return changed


def cast_outputs(outputs: Any) -> Any:
    """Returns `outputs` with tensors of half precision as float32, in the same structure."""
    if isinstance(outputs, dict):
        return type(outputs)((name, cast_outputs(value)) for name, value in outputs.items())
    if isinstance(outputs, (list, tuple)):
        cast = [cast_outputs(value) for value in outputs]
        return type(outputs)(*cast) if hasattr(outputs, "_fields") else type(outputs)(cast)
    dtype = getattr(outputs, "dtype", None)
    if dtype is None or str(getattr(dtype, "name", dtype)).removeprefix("torch.") not in _HALF:
        return outputs
    if KERAS_MAJOR == 3:
        return keras.ops.cast(outputs, "float32")
    return keras.backend.cast(outputs, "float32")


def as_functional(model: Any, specs: Any) -> Any:
    """Returns a functional model of the layers that a subclassed model calls.

    Args:
        model: The subclassed model.
        specs: Its inputs' structure, with `(shape, dtype)` for each.

    Raises:
        ValueError: `call` uses operations that Keras cannot record.
    """
    inputs = _symbolic(specs)
    try:
        return keras.Model(inputs, model.call(inputs))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__}.call cannot be recorded as a graph of layers: {error}. Use keras.ops in it, or "
            "save the weights alone with save_weights."
        ) from error


def input_specs(inputs: Any) -> Any:
    """Returns the structure of a call's inputs, with `(shape, dtype)` in place of each tensor."""
    if isinstance(inputs, dict):
        return {name: input_specs(value) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return [input_specs(value) for value in inputs]
    dtype = getattr(inputs.dtype, "name", str(inputs.dtype)).removeprefix("torch.")
    return _Spec((None, *tuple(inputs.shape)[1:]), dtype)


class _Spec(tuple):  # type: ignore[type-arg]
    """A shape and a dtype."""

    def __new__(cls, shape: Any, dtype: str) -> _Spec:
        return super().__new__(cls, (shape, dtype))


def _symbolic(specs: Any) -> Any:
    if isinstance(specs, _Spec):
        return keras.Input(batch_shape=specs[0], dtype=specs[1])
    if isinstance(specs, dict):
        return {name: _symbolic(value) for name, value in specs.items()}
    return [_symbolic(value) for value in specs]


def _is_graph(model: Any) -> bool:
    return isinstance(model, Functional) or (isinstance(model, keras.Sequential) and model.built)


def _graph_heads(model: Any) -> list[Any]:
    inner = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else None
    outputs = (inner or model).outputs
    return _walk(_flat(outputs))


def _called_heads(model: Any, inputs: Any) -> list[Any]:
    """Returns the layers behind the outputs of a model that is known by its call alone."""
    if isinstance(model, keras.Sequential):
        return _last_weighted(list(model.layers))
    if inputs is None:
        return []
    try:
        return _walk(_flat(record_call(model, _symbolic(input_specs(inputs)))))
    except Exception:  # operations of the backend itself take no symbolic tensors: see which layers are called
        return _watched_heads(model, inputs)


def _watched_heads(model: Any, inputs: Any) -> list[Any]:
    """Calls the model once, outside training, and returns the layers whose outputs it returns, or the last one."""
    calls: list[tuple[Any, Any]] = []
    watched = [layer for layer in flatten_layers(model) if layer is not model]

    def watch(layer: Any, call: Any) -> Any:
        def watching(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            calls.append((layer, outputs))
            return outputs

        return watching

    for layer in watched:
        vars(layer)["call"] = watch(layer, layer.call)
    try:
        outputs = _flat(model.call(inputs))
    finally:
        for layer in watched:
            vars(layer).pop("call", None)
    found = [layer for layer, made in calls if any(a is b for a in _flat(made) for b in outputs)]
    return _last_weighted(found) if any(layer.weights for layer in found) else _last_weighted([c[0] for c in calls])


def _last_weighted(layers: list[Any]) -> list[Any]:
    """Returns the layers after the last one with weights, and that one."""
    for index in range(len(layers) - 1, -1, -1):
        if layers[index].weights or isinstance(layers[index], keras.layers.Dense):
            return layers[index:]
    return layers


def _walk(tensors: list[Any]) -> list[Any]:
    """Returns the layers that symbolic tensors come from, back to the nearest ones with weights."""
    heads: list[Any] = []
    seen: set[int] = set()
    pending = list(tensors)
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation, inputs = producer(tensor)
        if operation is None:
            continue
        if isinstance(operation, (Functional, keras.Sequential)) and _is_graph(operation):
            heads.extend(_graph_heads(operation))
        elif isinstance(operation, keras.layers.Layer):
            heads.append(operation)
            if not operation.weights:
                pending.extend(inputs)
        else:
            pending.extend(inputs)
    return list({id(layer): layer for layer in heads}.values())


def _is_mixed(layer: Any) -> bool:
    policy = getattr(layer, "dtype_policy", None)
    if type(policy).__name__ == "DTypePolicyMap":
        return False
    return any(getattr(inner, "compute_dtype", None) in _HALF for inner in flatten_layers(layer))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _flat(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _flat(part)]
    return [value]
