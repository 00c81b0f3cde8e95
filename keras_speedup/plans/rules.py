"""The decisions, as functions of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

#: A call should take about this long, in seconds: long enough for its overhead not to count, short enough for
#: progress bars and interrupts.
CALL_SECONDS = 0.3

#: The most steps and the most bytes of input in one call.
MAX_STEPS, MAX_BYTES = 1024, 64 * 2**20

#: Steps in a call where nothing may be measured.
FIXED_STEPS = 32

#: The largest relative difference to the plain graph's numbers at which a plan is adopted.
TOLERANCE = 1e-3

#: A plan is adopted when a step takes less than this share of the best plan's.
GAIN = 0.98

#: Looking for a better plan may cost this share of the time trained so far.
REGRET = 0.05

#: Calls of a candidate, and of the best plan in turn with it, before one of the two is chosen.
TRIAL_CALLS = 4

#: How long a call of a trial should take on the best plan, in seconds.
TRIAL_SECONDS = 0.04

#: A candidate this many times slower than the plain loop on shadow state, where both are disturbed by the training,
#: is not tried on the training's own steps.
HOPELESS = 6.0

#: A step shorter than this, in seconds, is mostly overhead: its first program is compiled at the training's priority,
#: as it compiles in a few seconds and gains the most. On two busy cores it would take five times as long beside it.
LIGHT_STEP_SECONDS = 0.01

#: A program is compiled in the background only where at least this many seconds of training are left.
WORTH_COMPILING_SECONDS = 1.5

#: And only where at least this many steps are left for each second that tracing took: compiling takes a multiple of
#: that, and the fewer steps there are, the less of their overhead can a compiled loop save.
STEPS_PER_TRACING_SECOND = 1000


def steps_per_call(
    step_seconds: float, epoch_steps: int | None, batch_bytes: int, call_seconds: float = CALL_SECONDS
) -> int:
    """Returns K, such that a call takes about `call_seconds` and an epoch is cut into equal calls.

    Args:
        step_seconds: Time of one step, in seconds.
        epoch_steps: Whole batches in an epoch; None where it is unknown.
        batch_bytes: Size of a batch, in bytes.
        call_seconds: Time that a call should take, in seconds.
    """
    most = min(call_seconds / max(step_seconds, 1e-9), MAX_STEPS, MAX_BYTES / max(batch_bytes, 1))
    steps = max(1, int(most))
    if epoch_steps is None or epoch_steps <= 0:
        return steps
    calls = math.ceil(epoch_steps / steps)
    return math.ceil(epoch_steps / calls)


def trial_cost(step_ratio: float) -> float:
    """Returns what a trial may cost, in seconds, of a plan that takes `step_ratio` times the plain loop's time."""
    return 2 * TRIAL_SECONDS * max(0.0, step_ratio - 1.0)


def steps_per_trial_call(best_step_seconds: float | None, call_seconds: float = TRIAL_SECONDS) -> int:
    """Returns the steps of a call that measures a candidate: enough to be timed, few enough to cost little."""
    return max(1, int(call_seconds / best_step_seconds)) if best_step_seconds else 1


def typical(times: Sequence[float]) -> float:
    """Returns the median of the faster half of the times: what else runs on the machine only ever adds to one."""
    return median(sorted(times)[: (len(times) + 1) // 2])


def is_faster(candidate: Sequence[float], best: Sequence[float]) -> bool:
    """Returns whether the candidate's typical step time beats the best plan's by more than the noise."""
    return typical(candidate) < GAIN * typical(best)


def is_measured(baseline: Sequence[float]) -> bool:
    """Returns whether the plain graph's steps were timed often enough to compare plans with it."""
    return len(baseline) >= TRIAL_CALLS and (sum(baseline) >= 0.03 or len(baseline) >= 20)


def may_spend(spent_seconds: float, trained_seconds: float, cost_seconds: float = 0.0) -> bool:
    """Returns whether trials that have cost `spent_seconds` may cost `cost_seconds` more."""
    return spent_seconds + cost_seconds <= REGRET * trained_seconds


def agrees(difference: float) -> bool:
    """Returns whether a plan's numbers are the plain graph's, within the tolerance."""
    return difference <= TOLERANCE


def is_light(step_seconds: float | None) -> bool:
    """Returns whether a step is so short that it is mostly overhead."""
    return step_seconds is not None and step_seconds < LIGHT_STEP_SECONDS


def worth_compiling(steps_left: int | None, step_seconds: float, tracing_seconds: float = 0.0) -> bool:
    """Returns whether enough training is left for a compilation to pay."""
    if steps_left is None:
        return True
    is_long = steps_left * step_seconds >= WORTH_COMPILING_SECONDS
    return is_long and steps_left >= STEPS_PER_TRACING_SECOND * tracing_seconds
