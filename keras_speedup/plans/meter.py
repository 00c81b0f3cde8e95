"""The clock of the training loop: what each call into the model did and took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallRecord:
    """One call into the compiled model.

    Attributes:
        steps: Optimizer steps in the call.
        samples: Real rows in the call (no padding).
        seconds: Time of the call itself, without the wait for input and without compilation.
        input_wait_seconds: Time spent waiting for the input pipeline before the call.
        compile_seconds: Time spent tracing or compiling in the foreground before the call.
        plan: The plan that ran it.
    """

    steps: int
    samples: int
    seconds: float
    input_wait_seconds: float
    compile_seconds: float
    plan: str


@dataclass
class Meter:
    """The calls of the current epoch.

    Attributes:
        epoch: Index of the epoch, from 0.
        calls: Its calls so far, in order; emptied just before `on_epoch_begin`.
        callback_seconds: Time spent in callbacks between the epoch's calls.
    """

    epoch: int = 0
    calls: list[CallRecord] = field(default_factory=list)
    callback_seconds: float = 0.0

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.calls, self.callback_seconds = epoch, [], 0.0

    @property
    def samples(self) -> int:
        return sum(call.samples for call in self.calls)

    @property
    def seconds(self) -> float:
        """Training time of the epoch: calls and waits for input, without compilation and callbacks."""
        return sum(call.seconds + call.input_wait_seconds for call in self.calls)
