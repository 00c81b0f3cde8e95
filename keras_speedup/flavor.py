"""Which Keras this process uses. Decided once, at import; everything else takes `keras` from here."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

_INSTALL = 'pip install "keras-speedup[tensorflow]"'


def _wants_legacy() -> bool:
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def _import_keras() -> ModuleType:
    """Returns the Keras that `tf.keras` would be."""
    name = "tf_keras" if _wants_legacy() else "keras"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if importlib.util.find_spec(name) is None:
            extra = "legacy" if name == "tf_keras" else "tensorflow"
            raise ImportError(
                f'keras_speedup needs {name}, which is not installed. Install it: pip install "keras-speedup[{extra}]"'
            ) from error
        if importlib.util.find_spec("tensorflow") is None:
            raise ImportError(_missing_tensorflow("Keras on the TensorFlow backend")) from error
        raise


def _missing_tensorflow(what: str) -> str:
    return (
        f"{what} needs TensorFlow, which is not installed. Install it: {_INSTALL} "
        '("[cpu]" for a machine without a GPU, "[gpu]" with CUDA), or set KERAS_BACKEND=jax or torch.'
    )


keras: Any = _import_keras()

#: The major version of the Keras in use, 2 or 3.
KERAS_MAJOR = int(getattr(keras, "__version__", "2").split(".")[0])

#: One of "tensorflow", "jax", "torch" (Keras 3 on that backend) and "legacy" (Keras 2, on TensorFlow).
FLAVOR: str = "legacy" if KERAS_MAJOR == 2 else keras.backend.backend()

if FLAVOR not in ("tensorflow", "jax", "torch", "legacy"):
    raise ImportError(
        f"keras_speedup works with Keras on tensorflow, jax or torch, got KERAS_BACKEND={FLAVOR}. "
        "Set KERAS_BACKEND to one of the three before Keras is imported."
    )

# The class that `keras.Model(inputs, outputs)` makes; no public name for it in Keras 2.15 to 3.15.
_SOURCE = "models.functional" if KERAS_MAJOR == 3 else "engine.functional"
Functional: Any = importlib.import_module(f"{keras.__name__}.src.{_SOURCE}").Functional


def tensorflow(what: str = "keras_speedup.DataPipeline") -> Any:
    """Returns TensorFlow, hidden from the GPU where another backend owns it.

    Args:
        what: What needs TensorFlow, for the message.

    Raises:
        ImportError: TensorFlow is not installed; the message has the command that installs it.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(_missing_tensorflow(what))
    tf = importlib.import_module("tensorflow")
    if FLAVOR in ("jax", "torch"):
        try:
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError:  # TensorFlow was used before us; what it holds it keeps.
            pass
    return tf


def other_keras(layer: Any) -> str | None:
    """Returns the name of the Keras that `layer` comes from when that is not this process's, else None."""
    roots = {cls.__module__.split(".")[0] for cls in type(layer).__mro__}
    mine = keras.__name__
    for root in ("keras", "tf_keras"):
        if root in roots and root != mine and mine not in roots:
            return root
    return None


def require_this_keras(layer: Any, where: str) -> None:
    """Raises a `TypeError` when `layer` belongs to another Keras than this process uses."""
    other = other_keras(layer)
    if other is None:
        return
    cure = (
        "Set TF_USE_LEGACY_KERAS=1 before importing to use tf_keras throughout"
        if other == "tf_keras"
        else "Unset TF_USE_LEGACY_KERAS to use Keras 3 throughout"
    )
    name = getattr(layer, "name", type(layer).__name__)
    raise TypeError(
        f"{where} uses {keras.__name__} {keras.__version__}, got layer '{name}' ({type(layer).__name__}) of {other}. "
        f"{cure}, or import the layer from {keras.__name__}."
    )


def flatten_layers(layer: Any) -> list[Any]:
    """Returns `layer` and every layer inside it, outermost first."""
    # Private in Keras 2.15 to 3.15, with one meaning.
    return list(layer._flatten_layers())


def is_random(layer: Any) -> bool:
    """Returns whether `layer`, or a layer inside it, draws random numbers (it holds a seed generator)."""
    return any(_holds_generator(inner) for inner in flatten_layers(layer))


def _holds_generator(layer: Any) -> bool:
    if KERAS_MAJOR == 3:
        return any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    # Keras 2.15: random layers derive from BaseRandomLayer, which keeps its generator under this name.
    if getattr(layer, "_random_generator", None) is None:
        return False
    rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout", "stddev")]
    rates = [rate for rate in rates if rate is not None]
    return not rates or any(rates)


def set_layer_policy(layer: Any, name: str) -> None:
    """Makes `layer`, and the layers inside it, compute under the dtype policy `name`."""
    for inner in flatten_layers(layer):
        set_policy(inner, keras.mixed_precision.Policy(name))


def producer(tensor: Any) -> tuple[Any, list[Any]]:
    """Returns the layer or operation that a symbolic tensor comes from, and that one's symbolic inputs."""
    history = getattr(tensor, "_keras_history", None)  # Keras 2.15 to 3.15
    if history is None:
        return None, []
    operation, index = history[0], history[1]
    if index >= len(operation._inbound_nodes):
        return operation, []
    node = operation._inbound_nodes[index]
    inputs = node.input_tensors if KERAS_MAJOR == 3 else node.keras_inputs
    return operation, list(inputs)


def dataset_graph(tf: Any, dataset: Any) -> Any:
    """Returns the GraphDef of a `tf.data.Dataset`, as tf.data itself optimises it and sends it to workers."""
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
    text = dataset._as_serialized_graph(external_state_policy=ignore)  # private in TensorFlow 2.15 to 2.21
    return tf.compat.v1.GraphDef.FromString(text.numpy())


def compute_in_float32(layer: Any, is_saved: bool = True) -> None:
    """Makes `layer`, without the layers inside it, compute in float32.

    Args:
        layer: A layer under a mixed policy.
        is_saved: Whether its config says so. False keeps the name of its policy, for a layer that makes the layers
            inside it anew when it is loaded, and would find them in half precision.
    """
    policy = keras.mixed_precision.Policy("float32" if is_saved else layer.dtype_policy.name)
    policy._compute_dtype = "float32"  # Keras 2.15 to 3.15; no public way to compute in another dtype than the name's
    set_policy(layer, policy)


def set_policy(layer: Any, policy: Any) -> None:
    """Puts `layer`, without the layers inside it, under a dtype policy."""
    if KERAS_MAJOR == 3:
        layer.dtype_policy = policy
    else:
        layer._set_dtype_policy(policy)  # no public setter in Keras 2.15


def is_operation(layer: Any) -> bool:
    """Returns whether `layer` is an operation of a functional model, which Keras 2 wraps in a layer of its own."""
    return type(layer).__module__ == f"{keras.__name__}.src.layers.core.tf_op_layer"  # Keras 2.15


def output_position(tensor: Any) -> int:
    """Returns which of its layer's outputs a symbolic tensor is."""
    return int(tensor._keras_history[2])  # Keras 2.15 to 3.15


def set_symbolic_dtype(tensor: Any, name: str) -> None:
    """Makes a symbolic tensor say the dtype that its layer has by now."""
    if KERAS_MAJOR == 3:
        setattr(tensor, "_dtype" if hasattr(tensor, "_dtype") else "dtype", name)  # no setter since Keras 3.4
    else:
        spec = tensor._type_spec  # Keras 2.15
        tensor._type_spec = type(spec)(spec.shape, name)
