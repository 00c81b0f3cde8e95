"""Output layers that compute in float32 under a mixed policy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .engines.origins import trace_call
from .engines.traces import HALF, Key, Step, Trace, dtype_name, is_tensor, is_whole, map_leaves
from .errors import SpeedupWarning
from .flavor import (
    KERAS_MAJOR,
    Functional,
    compute_in_float32,
    flatten_layers,
    is_operation,
    keras,
    output_position,
    producer,
    set_symbolic_dtype,
)


def computes_in_half(model: Any) -> bool:
    """Returns whether any layer of a model computes in float16 or bfloat16 with weights in float32."""
    return any(_is_mixed(layer) for layer in flatten_layers(model))


def make_outputs_float32(model: Any, inputs: Any = None) -> list[str]:
    """Puts every layer that produces an output of `model` in float32, and returns the names of these layers.

    Where an output comes from a layer without weights or from an operation (a softmax, a sum), the nearest layers
    with weights before it are put in float32 too. Weights are float32 under a mixed policy already, and stay what they
    are. Layers under a policy map of their own, in float32, or quantized are left alone.

    What is changed is saved with a layer, except for a layer of your own with layers inside: such a one makes them anew
    when it is loaded, under the policy of that day. `SpeedupModel` finds its heads again after it is loaded.

    Args:
        model: A model with at least one layer that computes in half precision.
        inputs: The inputs of a call, for a model that is no graph of layers. Only shapes and dtypes count. A model that
            has been built needs none where one float tensor is its input.

    Example:

    >>> from keras_speedup.flavor import keras
    >>> dense = keras.layers.Dense(3, dtype="mixed_bfloat16", name="scores")
    >>> model = keras.Sequential([keras.Input((4,)), dense, keras.layers.Softmax(name="odds", dtype="mixed_bfloat16")])
    >>> sorted(make_outputs_float32(model))
    ['odds', 'scores']
    >>> dense.compute_dtype
    'float32'
    """
    if not computes_in_half(model):
        return []
    tensors: dict[Key, Any] = {}
    try:
        heads, float32 = _find(model, inputs, tensors)
    except Exception as error:  # whatever a user's `call` raises where there are no values
        reason = " ".join(str(error).split())
        warnings.warn(
            f"The layers that produce the outputs of {type(model).__name__} were not found and stay in half precision: "
            f'calling it without values failed ({type(error).__name__}: {reason}). Give them dtype="float32".',
            SpeedupWarning,
            stacklevel=2,
        )
        return []
    changed = []
    for layer in heads:
        mixed = [part for part in (_parts(layer) if is_whole(layer) else [layer]) if _is_mixed(part)]
        for part in mixed:
            compute_in_float32(part, is_saved=is_whole(part))
        if mixed:
            changed.append(layer.name)
    for key in float32 & set(tensors):
        set_symbolic_dtype(tensors[key], "float32")
    return changed


def cast_outputs(outputs: Any) -> Any:
    """Returns `outputs` with tensors of half precision as float32, in the same structure."""

    def cast(leaf: Any) -> Any:
        if not is_tensor(leaf) or dtype_name(leaf) not in HALF:
            return leaf
        return keras.ops.cast(leaf, "float32") if KERAS_MAJOR == 3 else keras.backend.cast(leaf, "float32")

    return map_leaves(cast, outputs)


def as_functional(model: Any, specs: Any) -> Any:
    """Returns a functional model of the layers that a subclassed model calls.

    Args:
        model: The subclassed model.
        specs: Its inputs' structure, with `(shape, dtype)` for each.

    Raises:
        ValueError: `call` uses operations that Keras cannot record.
    """
    inputs = map_leaves(lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), specs)
    try:
        return keras.Model(inputs, model.call(inputs))
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__}.call cannot be recorded as a graph of layers: {error}. Use keras.ops in it, or "
            "save the weights alone with save_weights."
        ) from error


@dataclass(frozen=True)
class Spec:
    """What is known of an input before there is one: `shape`, of which the first is the batch, and `dtype`."""

    shape: tuple[int | None, ...]
    dtype: str


def input_specs(inputs: Any) -> Any:
    """Returns the structure of a call's inputs, with a `Spec` for each tensor, of any number of rows."""
    return map_leaves(
        lambda leaf: Spec((None, *tuple(leaf.shape)[1:]), dtype_name(leaf)) if is_tensor(leaf) else leaf, inputs
    )


def _find(model: Any, inputs: Any, tensors: dict[Key, Any]) -> tuple[list[Any], set[Key]]:
    """Returns the layers that produce a model's outputs, and the tensors that are float32 once these are."""
    if _is_graph(model):
        tensors.update((id(tensor), tensor) for tensor in model.outputs)
        trace = _read_graph(model, tensors)
        heads, float32 = find_heads(trace)
        casts_itself = KERAS_MAJOR == 3 or not any(is_operation(layer) for layer in flatten_layers(model))
        if casts_itself and all(is_whole(layer) for layer in heads):
            return heads, float32
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        heads, _ = find_heads(trace_call(model, inputs))
        return heads, {id(tensor) for tensor in model.outputs}
    if inputs is None:
        inputs = _built_inputs(model)
    if inputs is None:
        raise ValueError("a model that is no graph of layers and has not been built needs the inputs of a call.")
    return find_heads(trace_call(model, inputs))


def find_heads(trace: Trace) -> tuple[list[Any], set[Key]]:
    """Returns the layers to put in float32 for the outputs to be float32, and the tensors that are so then.

    Where operations refuse to mix dtypes, whatever meets a tensor that has become float32 is put in float32 as well.
    """
    heads: dict[int, Any] = {}
    seen: set[Key] = set()
    _walk_back(trace, trace.outputs, heads, seen)
    while True:
        float32 = _become_float32(trace, heads)
        meets: list[Key] = []
        for step in trace.steps.values():
            if trace.is_strict and not step.layers and not step.casts and float32.intersection(step.inputs):
                meets += [key for key in step.inputs if key not in float32 and key not in seen]
        before = len(heads)
        for key in meets:
            _stop_at_first(trace, key, heads, seen)
        if len(heads) == before:
            return list(heads.values()), float32


def _walk_back(trace: Trace, outputs: Iterable[Key], heads: dict[int, Any], seen: set[Key]) -> None:
    """Adds the layers from which tensors come, back to the nearest ones with weights."""
    pending = list(outputs)
    while pending:
        key = pending.pop()
        step = trace.steps.get(key)
        if step is None or key in seen:
            continue
        seen.add(key)
        _add(heads, step)
        if step.enters or not any(layer.weights for layer in step.layers):
            pending.extend(step.inputs)
        elif not _has_matrix(step.layers):
            _add_matrix_before(trace, step, heads)


def _add(heads: dict[int, Any], step: Step) -> None:
    """Adds the layers by whose policy a tensor has its dtype."""
    heads.update((id(layer), layer) for layer in step.layers if not (step.enters and is_whole(layer)))


def _add_matrix_before(trace: Trace, step: Step, heads: dict[int, Any]) -> None:
    """Adds the layer just before one whose weights are all vectors (a normalization), if it multiplies matrices."""
    while len(step.inputs) == 1 and step.inputs[0] in trace.steps:
        step = trace.steps[step.inputs[0]]
        if not step.enters:
            if _has_matrix(step.layers):
                _add(heads, step)
            return


def _has_matrix(layers: Iterable[Any]) -> bool:
    return any(len(weight.shape) > 1 for layer in layers for weight in layer.weights)


def _stop_at_first(trace: Trace, key: Key, heads: dict[int, Any], seen: set[Key]) -> None:
    """Adds the layers by whose policies a tensor is half precision."""
    pending = [key]
    while pending:
        key = pending.pop()
        step = trace.steps.get(key)
        if step is None or key in seen or not step.is_half or step.casts:
            continue
        seen.add(key)
        _add(heads, step)
        if not step.layers:
            pending.extend(step.inputs)


def _become_float32(trace: Trace, heads: dict[int, Any]) -> set[Key]:
    """Returns the tensors of half precision that are float32 once the heads compute in it."""
    float32: set[Key] = set()
    size = -1
    while len(float32) > size:  # more than once where a loop feeds back
        size = len(float32)
        for key, step in trace.steps.items():
            if not step.is_half or step.casts:
                continue
            if step.layers:
                by_policy = [layer for layer in step.layers if not (step.enters and is_whole(layer))]
                becomes = any(id(layer) in heads for layer in by_policy)
            else:
                becomes = bool(float32.intersection(step.inputs))
            if becomes:
                float32.add(key)
    return float32


def _parts(layer: Any) -> list[Any]:
    """Returns a layer and all inside it, and what a wrapper was made from, by which it is saved."""
    wrapped = [
        part.layer for part in flatten_layers(layer) if isinstance(getattr(part, "layer", None), keras.layers.Layer)
    ]
    parts = [*flatten_layers(layer), *(part for inner in wrapped for part in flatten_layers(inner))]
    return list({id(part): part for part in parts}.values())


def _is_mixed(layer: Any) -> bool:
    """Returns whether a layer has a mixed policy, which is not a map of its own and not quantized."""
    policy = getattr(layer, "dtype_policy", None)
    if type(policy).__name__ == "DTypePolicyMap" or getattr(policy, "quantization_mode", None) is not None:
        return False
    return getattr(layer, "compute_dtype", None) in HALF and layer.variable_dtype == "float32"


def _is_graph(model: Any) -> bool:
    """Returns whether a model is a graph of layers: functional, or a Sequential that knows its inputs."""
    if not isinstance(model, (Functional, keras.Sequential)):
        return False
    try:
        return bool(model.outputs)
    except (AttributeError, ValueError):  # a Sequential of Keras 3 before its first call
        return False


def _read_graph(model: Any, tensors: dict[Key, Any]) -> Trace:
    """Returns the trace of a graph of layers as it is known without a call, and adds its tensors to `tensors`."""
    trace = Trace([id(tensor) for tensor in model.outputs], is_strict=False)
    pending = list(model.outputs)
    while pending:
        tensor = pending.pop()
        if id(tensor) in trace.steps:
            continue
        tensors[id(tensor)] = tensor
        operation, inputs = producer(tensor)
        layer = operation if isinstance(operation, keras.layers.Layer) and not is_operation(operation) else None
        if layer is not None and _is_graph(layer):
            inner, entries = layer.outputs[output_position(tensor)], list(layer.inputs)
            for number, entry in enumerate(entries):
                outer = inputs[number : number + 1] if len(entries) == len(inputs) else inputs
                before = trace.steps[id(entry)].inputs if id(entry) in trace.steps else ()
                trace.steps[id(entry)] = Step((*before, *map(id, outer)), is_half=False)
                tensors[id(entry)] = entry
            pending.extend(inputs)
            layer, inputs = None, [inner]
        layers = () if layer is None else (layer,)
        trace.steps[id(tensor)] = Step(tuple(map(id, inputs)), layers, is_half=dtype_name(tensor) in HALF)
        pending.extend(inputs)
    return trace


def _built_inputs(model: Any) -> Any:
    """Returns the one input that a model was built with, or None where that is not known."""
    config = model.get_build_config() if model.built else None
    shape = (config or {}).get("input_shape")
    if not isinstance(shape, (list, tuple)) or not all(size is None or isinstance(size, int) for size in shape):
        return None
    return Spec(tuple(shape), "float32")
