"""One job beside the training, which neither the training nor the end of the process waits for long."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

from ..engines.shadow import be_nice

T = TypeVar("T")

#: How long the end of the process waits for jobs at the most, in seconds: a thread that comes back from native code
#: while the interpreter is taken down aborts the process. Jobs are asked to stop, and do between two compilations.
EXIT_SECONDS = 20.0


class BackgroundJob(Generic[T]):
    """Runs a function in a thread.

    Args:
        function: What to run; it is given a function that says whether it should stop.
        urgent: Whether it takes its share of the processor, and not only what the training leaves free.
    """

    def __init__(self, function: Callable[[Callable[[], bool]], T], *, urgent: bool = False):
        self._function, self._urgent = function, urgent
        self.result: T | None = None
        self.error: Exception | None = None
        self.started = perf_counter()
        self.seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keras_speedup-compile", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Asks the function to stop."""
        self._stop.set()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        if not self._urgent:
            be_nice()
        try:
            self.result = self._function(self._stop.is_set)
        except Exception as error:  # told in the report; a plan that fails to compile is not an error of the training
            self.error = error
        self.seconds = perf_counter() - self.started
        _running.discard(self)


_running: weakref.WeakSet[BackgroundJob[Any]] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    deadline = monotonic() + EXIT_SECONDS
    jobs = list(_running)
    for job in jobs:
        job.stop()
    for job in jobs:
        job.join(max(0.0, deadline - monotonic()))
