"""StepProfiler: a trace of exactly these steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..flavor import FLAVOR, keras, tensorflow
from ..plans.meter import CallRecord, Meter


class StepProfiler(keras.callbacks.Callback):  # type: ignore[misc]
    """Traces exactly the steps from `steps[0]` up to and without `steps[1]`, for TensorBoard or XProf to open.

    A model of ours ends its calls at these steps, whatever its plan. A plain Keras model of several steps an execution
    does not: the trace then has the executions that begin among these steps.

    The trace is stopped where the training ends. Where it ends in an exception, `close()` stops it, and so does the
    callback's own end.

    Args:
        log_dir: Folder for the trace.
        steps: The first step and the one after the last, counted from 0 over the whole training.

    Attributes:
        summary: In words, where the time of these steps went; empty before they are over.

    Raises:
        ValueError: `steps` are not two whole numbers in order.

    Example:

    >>> import keras_speedup as ks
    >>> ks.StepProfiler("logs", steps=(10, 20)).step_boundaries
    (10, 20)
    """

    async_safe = True
    every_batch = False

    def __init__(self, log_dir: str | os.PathLike[str], steps: tuple[int, int] = (10, 20)):
        super().__init__()
        start, stop = steps
        if not 0 <= start < stop:
            raise ValueError(f"steps must be two numbers in order, such as (10, 20), got {steps!r}.")
        self.log_dir, self.step_boundaries = str(log_dir), (int(start), int(stop))
        self._running = False
        self._reset()

    def _reset(self) -> None:
        self.summary = ""
        self._before = 0  # steps of the epochs that are over
        self._step = 0
        self._calls: list[CallRecord] = []  # of epochs that are over, in the trace
        self._from_call = 0

    def close(self) -> None:
        """Stops the trace if it runs."""
        if self._running:
            self._end()

    def on_train_error(self) -> None:
        """Stops the trace when the training ends in an exception; keras_speedup's models send this."""
        self.close()

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._from_call = 0

    # Not `on_train_batch_end`: Keras 3 on JAX and PyTorch sends it from a pool of threads, late and in any order.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._leave(self._before + batch)
        if not self._running and self._step in range(*self.step_boundaries):
            self._from_call = len(meter.calls) if (meter := self._meter()) else 0
            self._begin()

    def on_test_begin(self, logs: Any = None) -> None:
        self._leave(self._before + self._steps())  # validation: the steps so far are over

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._before += self._steps()
        self._leave(self._before)
        if self._running and (meter := self._meter()):
            self._calls += meter.calls[self._from_call :]

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_running", False):  # a plain model's training ended in an exception
            self._stop()

    def _steps(self) -> int:
        """Returns the steps of the epoch, which is over."""
        if (meter := self._meter()) and meter.calls:
            return sum(call.steps for call in meter.calls)
        return int((self.params or {}).get("steps") or self._step - self._before + 1)

    def _leave(self, step: int) -> None:
        self._step = step
        if self._running and step >= self.step_boundaries[1]:
            self._end()

    def _meter(self) -> Meter | None:
        return getattr(self.model, "speedup_meter", None) if self.model is not None else None

    def _begin(self) -> None:
        self._stop = _start(self.log_dir)
        self._running = True

    def _end(self) -> None:
        self._running = False
        self._stop()
        if meter := self._meter():
            self.summary = in_words([*self._calls, *meter.calls[self._from_call :]])


def in_words(calls: list[CallRecord]) -> str:
    """Returns where the time of these calls went.

    Example:

    >>> in_words([CallRecord(2, 64, 0.6, 0.2, 0.2, "graph")])
    '2 steps in 1 call: steps 60%, waiting for input 20%, compiling 20%'
    """
    parts = {
        "steps": sum(call.seconds for call in calls),
        "waiting for input": sum(call.input_wait_seconds for call in calls),
        "compiling": sum(call.compile_seconds for call in calls),
    }
    whole = max(sum(parts.values()), 1e-9)
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items())
    count = sum(call.steps for call in calls)
    return f"{count} step{'' if count == 1 else 's'} in {len(calls)} call{'' if len(calls) == 1 else 's'}: {shares}"


def _start(log_dir: str) -> Callable[[], None]:
    """Starts a trace by the backend's own profiler; returns what stops it."""
    if FLAVOR == "jax":
        from jax import profiler

        profiler.start_trace(log_dir)
        return profiler.stop_trace
    if FLAVOR == "torch":
        from torch import profiler

        profile = profiler.profile(on_trace_ready=profiler.tensorboard_trace_handler(log_dir))
        profile.start()
        return profile.stop
    profiler = tensorflow("keras_speedup.StepProfiler").profiler.experimental
    profiler.start(log_dir)
    return profiler.stop
