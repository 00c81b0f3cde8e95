"""One job beside the training, which neither the training nor the end of the process waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

from ..engines.shadow import be_nice

T = TypeVar("T")


class BackgroundJob(Generic[T]):
    """Runs a function in a thread of low priority.

    Args:
        function: What to run.
    """

    def __init__(self, function: Callable[[], T]):
        self._function = function
        self.result: T | None = None
        self.error: Exception | None = None
        self.started = perf_counter()
        self._thread = threading.Thread(target=self._run, name="keras_speedup-compile", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        be_nice()
        try:
            self.result = self._function()
        except Exception as error:  # told in the report; a plan that fails to compile is not an error of the training
            self.error = error
