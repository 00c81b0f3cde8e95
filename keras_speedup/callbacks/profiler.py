"""StepProfiler: a trace of exactly these steps."""

from __future__ import annotations

import os
from typing import Any

from ..flavor import FLAVOR, keras, tensorflow
from ..plans.meter import Meter


class StepProfiler(keras.callbacks.Callback):  # type: ignore[misc]
    """Traces exactly the steps from `steps[0]` up to and without `steps[1]`, for TensorBoard or XProf to open.

    Args:
        log_dir: Folder for the trace.
        steps: The first step and the one after the last, counted from 0 over the whole training.

    Attributes:
        summary: In words, where the time of these steps went; empty before they are over.

    Raises:
        ValueError: `steps` are not two numbers in order.

    Example:

    >>> import keras_speedup as ks
    >>> ks.StepProfiler("logs", steps=(10, 20)).step_boundaries
    (10, 20)
    """

    every_batch = False  # and not async_safe: the trace has to begin and end with its steps

    def __init__(self, log_dir: str | os.PathLike[str], steps: tuple[int, int] = (10, 20)):
        super().__init__()
        start, stop = steps
        if not 0 <= start < stop:
            raise ValueError(f"steps must be two numbers in order, such as (10, 20), got {steps!r}.")
        self.log_dir, self.step_boundaries = str(log_dir), (int(start), int(stop))
        self.summary = ""
        self._step = 0
        self._before = 0
        self._running = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._step, self._before, self.summary = 0, 0, ""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self._step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step = self._before + batch
        start, stop = self.step_boundaries
        if not self._running and start <= self._step < stop:
            self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step = self._before + batch + 1
        if self._running and self._step >= self.step_boundaries[1]:
            self._end()

    def on_train_end(self, logs: Any = None) -> None:
        if self._running:
            self._end()

    def __del__(self) -> None:
        if getattr(self, "_running", False):  # the training ended in an exception
            self._end()

    def _begin(self) -> None:
        if FLAVOR == "jax":
            import jax

            jax.profiler.start_trace(self.log_dir)
        elif FLAVOR == "torch":
            import torch

            self._profile = torch.profiler.profile(
                on_trace_ready=torch.profiler.tensorboard_trace_handler(self.log_dir)
            )
            self._profile.start()
        else:
            tensorflow("keras_speedup.StepProfiler").profiler.experimental.start(self.log_dir)
        self._running = True

    def _end(self) -> None:
        self._running = False
        if FLAVOR == "jax":
            import jax

            jax.profiler.stop_trace()
        elif FLAVOR == "torch":
            self._profile.stop()
        else:
            tensorflow("keras_speedup.StepProfiler").profiler.experimental.stop()
        meter = getattr(self.model, "speedup_meter", None) if self.model is not None else None
        if meter is not None:
            self.summary = _in_words(meter)


def _in_words(meter: Meter) -> str:
    busy, waited = sum(c.seconds for c in meter.calls), sum(c.input_wait_seconds for c in meter.calls)
    compiling = sum(c.compile_seconds for c in meter.calls)
    whole = max(busy + waited + compiling + meter.callback_seconds, 1e-9)
    shares = {"steps": busy, "waiting for input": waited, "compiling": compiling, "callbacks": meter.callback_seconds}
    return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in shares.items())
