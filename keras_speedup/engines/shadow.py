"""What a background compilation found, and what there is to run one with."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass


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
