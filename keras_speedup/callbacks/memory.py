"""GPUMemoryGrowth: memory that grows with need, and what is in use, epoch by epoch."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from ..errors import SpeedupWarning
from ..flavor import FLAVOR, keras, tensorflow

_MEGABYTE = 2**20

#: Growth over this many epochs in a row, by this share in all, is warned of.
_EPOCHS, _SHARE = 5, 0.05


class GPUMemoryGrowth(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets TensorFlow take GPU memory as it needs it, and logs what is in use.

    Growth is turned on when the callback is constructed, for every GPU or for none, where that is still possible;
    where it is too late, a warning says so, with the line to add and where. Without a GPU, the figures are those of
    the process.

    | key              | unit | meaning                                            |
    | ---------------- | ---- | -------------------------------------------------- |
    | `memory_mb`      | MB   | in use at the end of the epoch, over all devices   |
    | `memory_peak_mb` | MB   | the most that was in use, over all devices         |

    Args:
        limit_mb: The most memory to take of each GPU, in MB, in place of growth; None for no limit.

    Raises:
        ValueError: `limit_mb` is not positive.

    Example:

    >>> import keras_speedup as ks
    >>> memory = ks.GPUMemoryGrowth()
    """

    async_safe = True
    every_batch = False

    def __init__(self, limit_mb: int | None = None):
        super().__init__()
        if limit_mb is not None and limit_mb <= 0:
            raise ValueError(f"limit_mb must be a positive number of megabytes, got {limit_mb!r}.")
        self.limit_mb = limit_mb
        self.use_by_epoch: list[float] = []
        if FLAVOR in ("tensorflow", "legacy"):
            _turn_on(tensorflow("keras_speedup.GPUMemoryGrowth"), limit_mb)

    def on_train_begin(self, logs: Any = None) -> None:
        self.use_by_epoch = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        used, peak, _ = memory_bytes()
        self.use_by_epoch.append(used / _MEGABYTE)
        if logs is not None:
            logs["memory_mb"], logs["memory_peak_mb"] = used / _MEGABYTE, peak / _MEGABYTE
        last = self.use_by_epoch[-_EPOCHS - 1 :]
        if len(last) > _EPOCHS and rises(last):
            warnings.warn(
                f"Memory has risen in each of the last {_EPOCHS} epochs, from {last[0]:,.0f} to {last[-1]:,.0f} MB: "
                "something is kept that should not be, such as tensors in a list.",
                SpeedupWarning,
                stacklevel=2,
            )
            self.use_by_epoch = [last[-1]]


def rises(use: list[float]) -> bool:
    """Returns whether memory rose at every step, and by more than is noise in all."""
    return all(a < b for a, b in zip(use, use[1:], strict=False)) and use[-1] > use[0] * (1 + _SHARE)


def memory_bytes() -> tuple[int, int, int]:
    """Returns the bytes in use, at peak and to be had, over all GPUs, or of the process where there is none.

    What there is to be had is 0 where that is not known.
    """
    found: list[tuple[int, int, int]] = []
    if FLAVOR in ("tensorflow", "legacy"):
        tf = tensorflow("keras_speedup.GPUMemoryGrowth")
        for index, _ in enumerate(tf.config.list_logical_devices("GPU")):
            info = tf.config.experimental.get_memory_info(f"GPU:{index}")
            found.append((info["current"], info["peak"], 0))
    elif FLAVOR == "jax":
        import jax

        for stats in (device.memory_stats() or {} for device in jax.devices()):
            in_use, at_peak = stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use", 0)
            found.append((in_use, at_peak, stats.get("bytes_limit", 0)))
    else:
        import torch

        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            size = torch.cuda.get_device_properties(index).total_memory
            found.append((torch.cuda.memory_allocated(index), torch.cuda.max_memory_allocated(index), size))
    used, peak, limit = (sum(column) for column in zip((0, 0, 0), *found, strict=True))
    return (used, peak, limit) if used else (resident_bytes(), peak_bytes(), 0)


def resident_bytes() -> int:
    """Returns the memory that the process holds, in bytes; its peak where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    """Returns the most memory that the process has held, in bytes; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _turn_on(tf: Any, limit_mb: int | None) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    try:
        for gpu in gpus:
            if limit_mb is None:
                tf.config.experimental.set_memory_growth(gpu, True)
            else:
                limit = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)
                tf.config.set_logical_device_configuration(gpu, [limit])
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"It is too late to change how the GPU's memory is taken ({error}). Put this line first in the script, "
            "before anything uses TensorFlow: import keras_speedup; keras_speedup.configure(memory_growth=True)",
            SpeedupWarning,
            stacklevel=3,
        )
