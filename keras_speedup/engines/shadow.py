"""What a background compilation found, and what there is to run one with."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

#: How many times what one rounding error of the state does to a variable counts as rounding: another order of a sum
#: makes several.
ROUNDING = 10.0


#: Says whether a background job should give up.
Stop = Callable[[], bool]


@dataclass(frozen=True)
class ShadowTrial:
    """A plan to be compiled, compared and timed on shadow state.

    Attributes:
        made_of: What `Engine.program` takes: the kind of step, the plan, the most steps in one call, the feed, a block.
        random: Whether the model has random layers, which are then compared as outside training.
        check: Whether to compare and time at all; not where an earlier run did.
        timed: Steps of a run that is timed.
    """

    made_of: tuple[str, str, int, Any, Any]
    random: bool = False
    check: bool = True
    timed: int = 4


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


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Returns the memory that can still be had, in bytes; None where the system does not say.

    Args:
        meminfo: Where Linux tells the host's memory.
        group: Where it tells the limit of the container, which the host's figure does not know.
    """
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text())
        free = int(found[1]) * 1024 if found else None
    except OSError:
        return None
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no container, or "max": one without a limit
        return free
    inside = max(0, limit - used + (int(cached[1]) if cached else 0))
    return inside if free is None else min(free, inside)


def cache_folder() -> Path:
    """Returns the folder for what is kept across runs."""
    named = os.environ.get("KERAS_SPEEDUP_CACHE")
    if named and named != "off":
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras_speedup"


def be_nice() -> None:
    """Lets the calling thread run only where the training leaves the processor free."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux, of this thread alone
    except (AttributeError, OSError):
        pass


def give_up_if(stopped: Stop) -> None:
    """Raises an `InterruptedError` where a background job was asked to stop."""
    if stopped():
        raise InterruptedError("the process ends")


def step_ratio(one: Callable[[], None], other: Callable[[], None]) -> float:
    """Returns the least time of one run over that of another, each run four times in turn, at normal priority.

    A single pair is enough where the first is several times slower.
    """

    def timed(run: Callable[[], None]) -> float:
        began = perf_counter()
        run()
        return perf_counter() - began

    def measure() -> float:
        times = [(timed(one), timed(other))]
        while len(times) < 4 and times[0][0] < 6 * times[0][1]:
            times.append((timed(one), timed(other)))
        return min(first for first, _ in times) / min(second for _, second in times)

    # The compiling thread gave its priority up, and a compiled loop runs in the calling thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def relative_difference(
    plain: Iterable[np.ndarray],
    other: Iterable[np.ndarray],
    start: Iterable[np.ndarray],
    nudged: Iterable[np.ndarray] | None = None,
) -> float:
    """Returns the largest relative difference between two states, infinite where whole numbers differ.

    For each variable, the norm of the difference over the norm of the value, or of its change where that is larger.
    What rounding alone does is no difference: the gradient of an attention's key bias is zero but for rounding, which
    Adam divides by its own size.

    Args:
        plain: The variables after the plain steps.
        other: The same after the other plan's.
        start: The same before both.
        nudged: The same after plain steps from a state that was off by a rounding error.
    """
    worst = 0.0
    plain = list(plain)
    for a, b, before, off in zip(plain, other, start, nudged or plain, strict=True):
        if a.dtype.kind in "iubSOU":
            if not np.array_equal(a, b):
                return float("inf")
            continue
        a, b, before, off = (np.asarray(value, np.float64) for value in (a, b, before, off))
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        a, b, before, off = (np.nan_to_num(value) for value in (a, b, before, off))
        scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(a - before)), 1e-6 * float(np.sqrt(a.size)))
        gap = float(np.linalg.norm(a - b))
        if a.size and gap > ROUNDING * float(np.linalg.norm(a - off)):
            worst = max(worst, gap / scale)
    return worst
