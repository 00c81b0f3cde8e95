"""The clock for a model that keeps none: what Keras's own events tell about a plain model's training."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from ..plans.meter import CallRecord


class EventClock:
    """Times a plain Keras model by the events that begin a batch.

    Events that end a batch will not do: Keras 3 on JAX and PyTorch sends them from a pool of threads, late and in any
    order. A call counts until the next one begins, so that its time holds the wait for input and other callbacks as
    well. The first call of a training, in which Keras compiles, is left out where there are others.

    Attributes:
        calls: The calls of the epoch that are over and count.
        steps: Steps of the epoch that are over.
    """

    def __init__(self) -> None:
        self.start_training()

    def start_training(self) -> None:
        self._is_first_epoch = True
        self.start_epoch()

    def start_epoch(self) -> None:
        self.calls: list[CallRecord] = []
        self.steps = 0
        self._began: float | None = None

    def begin_call(self, batch: int) -> None:
        """Notes that a call begins whose first step has the index `batch`."""
        now = perf_counter()
        self._end_call(batch - self.steps, now)
        self.steps, self._began = batch, now

    def end_epoch(self, model: Any, steps_in_epoch: int | None) -> None:
        """Notes that the training of an epoch is over, before its validation; the device has finished by now.

        Args:
            model: The model.
            steps_in_epoch: Steps in an epoch; None where that is not known.
        """
        if self._began is None:
            return
        per_call = getattr(model, "steps_per_execution", 1)
        last = steps_in_epoch - self.steps if steps_in_epoch is not None else int(per_call or 1)
        self._end_call(max(last, 1), perf_counter())
        self.steps += max(last, 1)
        self._began = None
        if self._is_first_epoch and len(self.calls) > 1:
            self.calls = self.calls[1:]
        self._is_first_epoch = False

    def _end_call(self, steps: int, now: float) -> None:
        if self._began is not None:
            self.calls.append(CallRecord(steps, 0, now - self._began, 0.0, 0.0, "keras"))
