"""Which precision this machine multiplies natively, and the policy that follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras, set_policy, tensorflow

_POLICIES = ("auto", "float32", "mixed_float16", "mixed_bfloat16")
_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")

#: A mixed policy is adopted when it takes less than this share of float32's time, so that noise alone adopts nothing.
FASTER = 0.95

#: And when its losses on the same batches from the same weights differ from float32's by no more than this share, on
#: average. Rounding alone makes bfloat16 (8 bits of mantissa) differ by about 1%.
LOSS_TOLERANCE = 0.05


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


def native_precision() -> Choice:
    """Returns the policy for this process's devices."""
    return best_precision(devices(), cpu_flags())


def check_precision(name: Any) -> None:
    """Raises a `ValueError` where `name` is none that `set_precision` takes."""
    if name not in _POLICIES:
        raise ValueError(f"precision must be one of {', '.join(map(repr, _POLICIES))}, got {name!r}.")


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
    check_precision(name)
    policy = native_precision().policy if name == "auto" else name
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
    """Returns whether any trained layer computes in float16, whose small gradients would vanish unscaled.

    Example:

    >>> from keras_speedup.flavor import keras
    >>> half = keras.layers.Dense(4, dtype="mixed_float16")
    >>> needs_loss_scaling(keras.Sequential([keras.Input((3,)), half, keras.layers.Dense(2)]))
    True
    """
    layers = flatten_layers(model)
    return any(getattr(layer, "compute_dtype", None) == "float16" and layer.trainable_weights for layer in layers)


def scales_loss(optimizer: Any) -> bool:
    """Returns whether an optimizer scales the loss: one around another that does, or one with a factor of its own."""
    wrapper = keras.optimizers.LossScaleOptimizer if KERAS_MAJOR == 3 else keras.mixed_precision.LossScaleOptimizer
    return isinstance(optimizer, wrapper) or getattr(optimizer, "loss_scale_factor", None) is not None


def scaled(optimizer: Any) -> Any:
    """Returns the optimizer with loss scaling, which it may have already."""
    if optimizer is None or scales_loss(optimizer):
        return optimizer
    if KERAS_MAJOR == 3:
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return keras.mixed_precision.LossScaleOptimizer(optimizer)


@contextmanager
def only_scaled_losses(optimizer: Any, where: str) -> Iterator[None]:
    """While a training step is traced in it, refuses gradients of a loss that was not scaled.

    Args:
        optimizer: The optimizer of the step; one without loss scaling is not watched.
        where: What applies the gradients, for the message, such as "Gan.train_step".

    Raises:
        ValueError: Gradients are applied, and the optimizer has not scaled a loss before.
    """
    scale = "scale_loss" if KERAS_MAJOR == 3 else "get_scaled_loss"
    applying = [name for name in ("apply", "stateless_apply", "apply_gradients") if hasattr(optimizer, name)]
    if not scales_loss(optimizer) or not hasattr(optimizer, scale):
        yield
        return
    is_scaled = False

    def watch(call: Any, scales: bool) -> Any:
        def watching(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_scaled
            is_scaled = is_scaled or scales
            if not is_scaled:
                raise ValueError(
                    f"{where} applies gradients of a loss that was not scaled, while layers compute in float16. Take "
                    f'them of self.optimizer.{scale}(loss), or train under "mixed_bfloat16", which needs no scaling.'
                )
            return call(*args, **kwargs)

        return watching

    for name in (scale, *applying):
        vars(optimizer)[name] = watch(getattr(optimizer, name), name == scale)
    try:
        yield
    finally:
        for name in (scale, *applying):
            del vars(optimizer)[name]


def watched_step(model: Any, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model's training step, which refuses to apply gradients that its optimizer takes for scaled ones."""

    def step(*args: Any) -> Any:
        with only_scaled_losses(model.optimizer, f"{type(model).__name__}.train_step"):
            return train_step(*args)

    return step


def take_policy(model: Any, policy: str, keep: Collection[str] = ()) -> Callable[[], None]:
    """Puts the layers of a model that are in float32 or under a mixed policy under another, and returns what undoes it.

    Layers under any other policy stay what they are; `heads.make_outputs_float32` sees to the outputs afterwards.

    Args:
        model: The model. Weights are float32 before and after.
        policy: "float32", "mixed_float16" or "mixed_bfloat16".
        keep: The names of layers to leave as they are.

    Raises:
        ValueError: The model has been built by Keras 2, whose weights are cast under the policy they were made under.
    """
    others = set(_POLICIES) - {policy}
    layers = [
        layer
        for layer in flatten_layers(model)
        if layer.name not in keep and getattr(getattr(layer, "dtype_policy", None), "name", None) in others
    ]
    if KERAS_MAJOR == 2 and any(layer.weights for layer in layers):
        raise ValueError(
            f"Keras 2 settles the precision of a layer when it is built, and '{model.name}' has been built. Call "
            f"set_precision({policy!r}) before the model is made."
        )
    before = [(layer, layer.dtype_policy) for layer in flatten_layers(model)]  # heads may change afterwards
    for layer in layers:
        set_policy(layer, keras.mixed_precision.Policy(policy))

    def undo() -> None:
        for layer, old in before:
            set_policy(layer, old)

    return undo


@dataclass(frozen=True)
class PrecisionTrial:
    """What a few steps under a policy showed.

    Attributes:
        policy: "float32", "mixed_float16" or "mixed_bfloat16".
        step_seconds: Of one step, the median.
        losses: Of each step, in order.
    """

    policy: str
    step_seconds: float
    losses: tuple[float, ...]


def choose_precision(float32: PrecisionTrial, mixed: PrecisionTrial) -> Choice:
    """Returns the policy to train under, given what both did with the same batches from the same weights.

    Example:

    >>> choose_precision(
    ...     PrecisionTrial("float32", 0.010, (2.0, 1.0)), PrecisionTrial("mixed_bfloat16", 0.013, (2.0, 1.0))
    ... )
    Choice(policy='float32', reason="mixed_bfloat16 takes 1.30 times float32's time")
    """
    ratio = mixed.step_seconds / float32.step_seconds
    took = f"{mixed.policy} takes {ratio:.2f} times float32's time"
    if ratio >= FASTER:  # its trial may have been ended early
        return Choice("float32", took)
    if not all(math.isfinite(loss) for loss in mixed.losses):
        return Choice("float32", f"under {mixed.policy} the loss is not finite")
    size = sum(abs(loss) for loss in float32.losses) or 1.0
    off = sum(abs(one - other) for one, other in zip(float32.losses, mixed.losses, strict=True)) / size
    if not off <= LOSS_TOLERANCE:
        return Choice("float32", f"under {mixed.policy} the loss is {off:.1%} off float32's")
    return Choice(mixed.policy, f"{took}, the loss is within {off:.1%} of float32's")
