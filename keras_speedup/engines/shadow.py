"""What a background compilation found, and what there is to run one with."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ShadowResult:
    """A program's first runs on shadow state.

    Attributes:
        compile_seconds: Time until it had run once.
        difference: Largest relative difference to the plain graph's numbers.
        step_ratio: Its step time over the plain loop's, both measured beside the training.
    """

    compile_seconds: float
    difference: float
    step_ratio: float


def free_memory_bytes() -> int | None:
    """Returns the memory that can still be had, in bytes; None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def be_nice() -> None:
    """Lets the calling thread run only where the training leaves the processor free."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux, of this thread alone
    except (AttributeError, OSError):
        pass


def relative_difference(plain: Iterable[np.ndarray], other: Iterable[np.ndarray], start: Iterable[np.ndarray]) -> float:
    """Returns the largest relative difference between two states, infinite where whole numbers differ.

    For each variable, the norm of the difference over the norm of the value, or of its change where that is larger.

    Args:
        plain: The variables after the plain steps.
        other: The same after the other plan's.
        start: The same before both.
    """
    worst = 0.0
    for a, b, before in zip(plain, other, start, strict=True):
        if a.dtype.kind in "iubSOU":
            if not np.array_equal(a, b):
                return float("inf")
            continue
        a, b, before = (np.asarray(value, np.float64) for value in (a, b, before))
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        a, b, before = (np.nan_to_num(value) for value in (a, b, before))
        scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(a - before)), 1e-6 * float(np.sqrt(a.size)))
        worst = max(worst, float(np.linalg.norm(a - b)) / scale if a.size else 0.0)
    return worst
