"""Which precision this machine multiplies natively, and the policy that follows from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras, tensorflow

_POLICIES = ("auto", "float32", "mixed_float16", "mixed_bfloat16")
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True)
class Device:
    """A device as far as its arithmetic is concerned.

    Attributes:
        kind: "CPU", "GPU" or "TPU".
        compute_capability: Of an NVIDIA GPU, such as `(8, 0)`; None where it is unknown.
    """

    kind: str
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Choice:
    """A policy and why it is the one.

    Attributes:
        policy: "float32", "mixed_float16" or "mixed_bfloat16".
        reason: Why, in words.
    """

    policy: str
    reason: str


def best_precision(devices: Sequence[Device], cpu_flags: Collection[str]) -> Choice:
    """Returns the policy for the weakest of the devices that train.

    Args:
        devices: What there is; the CPU counts only where nothing else does.
        cpu_flags: The processor's flags, as in `/proc/cpuinfo`.

    Example:

    >>> best_precision([Device("GPU", (7, 5))], ()).policy
    'mixed_float16'
    >>> best_precision([Device("CPU")], ["avx2"]).policy
    'float32'
    """
    gpus = [device for device in devices if device.kind == "GPU"]
    if any(device.kind == "TPU" for device in devices):
        return Choice("mixed_bfloat16", "a TPU multiplies bfloat16 natively")
    if gpus:
        known = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
        if len(known) < len(gpus):
            return Choice("float32", "the GPU does not say its compute capability")
        weakest = min(known)
        text = ".".join(map(str, weakest))
        if weakest >= (8, 0):
            return Choice("mixed_bfloat16", f"compute capability {text} multiplies bfloat16 natively")
        if weakest >= (7, 0):
            return Choice("mixed_float16", f"compute capability {text} multiplies float16 natively, bfloat16 not")
        return Choice("float32", f"compute capability {text} has no units for half precision")
    found = [flag for flag in _BFLOAT16_FLAGS if flag in cpu_flags]
    if found:
        return Choice("mixed_bfloat16", f"the CPU multiplies bfloat16 natively ({', '.join(found)})")
    return Choice("float32", "the CPU has no units for half precision (AMX or AVX512-BF16), which is slower on it")


def set_precision(name: str = "auto") -> str:
    """Sets Keras's global dtype policy and returns its name.

    Set it before the model is made: layers take their policy when they are constructed.

    Args:
        name: "auto", "float32", "mixed_float16" or "mixed_bfloat16". "auto" takes what the device multiplies
            natively: bfloat16 on a TPU, on a GPU of compute capability 8.0 or more and on a CPU with AMX or
            AVX512-BF16, float16 on a GPU of compute capability 7.x, and float32 elsewhere.

    Returns:
        The name of the policy that was set.

    Raises:
        ValueError: The name is none of these.

    Example:

    >>> import keras_speedup as ks
    >>> ks.set_precision("float32")
    'float32'
    """
    if name not in _POLICIES:
        raise ValueError(f"precision must be one of {', '.join(map(repr, _POLICIES))}, got {name!r}.")
    policy = best_precision(devices(), cpu_flags()).policy if name == "auto" else name
    if KERAS_MAJOR == 3:
        keras.config.set_dtype_policy(policy)
    else:
        keras.mixed_precision.set_global_policy(policy)
    return policy


def devices() -> list[Device]:
    """Returns the devices that this process's Keras trains on."""
    if FLAVOR == "jax":
        import jax

        return [_jax_device(device) for device in jax.devices()]
    if FLAVOR == "torch":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [Device("GPU", tuple(torch.cuda.get_device_capability(i))) for i in range(count)] or [Device("CPU")]
    tf = tensorflow("keras_speedup.set_precision")
    found = [Device("TPU") for _ in tf.config.list_physical_devices("TPU")]
    for gpu in tf.config.list_physical_devices("GPU"):
        capability = tf.config.experimental.get_device_details(gpu).get("compute_capability")
        found.append(Device("GPU", tuple(capability) if capability else None))
    return found or [Device("CPU")]


def _jax_device(device: Any) -> Device:
    if device.platform == "tpu":
        return Device("TPU")
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Device("CPU")
    found = re.match(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return Device("GPU", (int(found[1]), int(found[2])) if found else None)


def cpu_flags() -> frozenset[str]:
    """Returns the processor's flags; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def needs_loss_scaling(model: Any) -> bool:
    """Returns whether any trained layer computes in float16, whose small gradients would vanish unscaled."""
    return any(layer.compute_dtype == "float16" and layer.trainable_weights for layer in flatten_layers(model))


def scaled(optimizer: Any) -> Any:
    """Returns the optimizer with loss scaling, which it may have already."""
    wrapper = keras.optimizers.LossScaleOptimizer if KERAS_MAJOR == 3 else keras.mixed_precision.LossScaleOptimizer
    return optimizer if optimizer is None or isinstance(optimizer, wrapper) else wrapper(optimizer)
