"""What one execution plan was measured to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["baseline", "kept", "refused", "abandoned", "failed"]


@dataclass(frozen=True)
class PlanTrial:
    """One plan that was tried, and what became of it.

    Attributes:
        plan: The plan's name, such as `"xla-loop"`.
        steps_per_call: Optimizer steps in one call, K.
        step_seconds: Median time of one step, in seconds; None where it was never timed.
        compile_seconds: Time its compilation took, in seconds (in the background where possible).
        difference: Largest difference to the plain graph's numbers from the same state and batches, relative to
            the size of the numbers; None where it was not compared.
        status: What became of it.
        reason: Why, in words.
    """

    plan: str
    steps_per_call: int
    step_seconds: float | None
    compile_seconds: float
    difference: float | None
    status: Status
    reason: str
