"""What the calls of an epoch say about its speed. Pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..plans.meter import CallRecord

#: The keys that the file and TensorBoard have, and `logs` has not.
FURTHER = ("step_ms_max", "callbacks")


def figures(
    calls: Sequence[CallRecord],
    *,
    splits: bool = True,
    callback_seconds: float | None = None,
    flops: tuple[float | None, float | None] = (None, None),
) -> dict[str, float]:
    """Returns the figures for these calls; what is unknown is left out.

    Training time is the time of the calls and of the waits for input: no compilation, no callbacks, no validation.

    Args:
        calls: At least one call.
        splits: Whether they tell the wait for input and compilation from the steps; a plain Keras model's do not.
        callback_seconds: Time spent in callbacks between them; None where it is unknown.
        flops: Floating-point operations of training on one sample, and what the devices can do in a second; None for
            what is unknown.

    Example:

    >>> call = CallRecord(10, 320, 0.15, 0.05, 0.0, "graph-loop")
    >>> {key: round(value, 3) for key, value in figures([call]).items() if key not in FURTHER}
    {'steps_per_second': 50.0, 'step_ms_p50': 15.0, 'step_ms_p95': 15.0, 'samples_per_second': 1600.0,
     'input_wait': 0.25, 'compile_seconds': 0.0}
    """
    steps, samples = sum(call.steps for call in calls), sum(call.samples for call in calls)
    waited, compiling = sum(call.input_wait_seconds for call in calls), sum(call.compile_seconds for call in calls)
    seconds = max(sum(call.seconds for call in calls) + waited, 1e-9)
    p50, p95, most = step_milliseconds(calls, (0.5, 0.95, 1.0))
    found = {"steps_per_second": steps / seconds, "step_ms_p50": p50, "step_ms_p95": p95, "step_ms_max": most}
    if samples:
        found["samples_per_second"] = samples / seconds
    if splits:
        found["input_wait"] = waited / seconds
        found["compile_seconds"] = compiling
    if callback_seconds is not None:
        found["callbacks"] = callback_seconds / (seconds + compiling + callback_seconds)
    per_sample, peak = flops
    if per_sample and samples:
        found["flops_per_second"] = per_sample * samples / seconds
        if peak:
            found["utilisation"] = found["flops_per_second"] / peak
    return found


def step_milliseconds(calls: Sequence[CallRecord], shares: Sequence[float]) -> list[float]:
    """Returns the step times under which these shares of all steps lie; each step of a call counts as its mean."""
    times = np.array([1000 * call.seconds / max(call.steps, 1) for call in calls])
    order = np.argsort(times)
    below = np.cumsum([calls[index].steps for index in order])
    places = np.searchsorted(below, [share * below[-1] for share in shares])
    return [float(times[order[min(place, len(order) - 1)]]) for place in places]


#: Every key there can be, in the order of the file's columns.
KEYS = tuple(figures([CallRecord(1, 1, 1.0, 0.0, 0.0, "")], callback_seconds=0.0, flops=(1.0, 1.0)))
