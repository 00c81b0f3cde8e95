"""Figures from made-up calls."""

from __future__ import annotations

import numpy as np
import pytest

from keras_speedup.callbacks.figures import KEYS, figures, step_milliseconds
from keras_speedup.plans.meter import CallRecord


def call(steps, seconds, samples=None, wait=0.0, compiling=0.0):
    return CallRecord(steps, 32 * steps if samples is None else samples, seconds, wait, compiling, "graph")


def test_rates_count_waits_and_neither_compilation_nor_callbacks():
    found = figures([call(10, 0.8, wait=0.2, compiling=5.0), call(1, 0.0, samples=7)], callback_seconds=1.0)
    assert found["samples_per_second"] == pytest.approx(327)
    assert found["steps_per_second"] == pytest.approx(11)
    assert found["input_wait"] == pytest.approx(0.2)
    assert found["compile_seconds"] == 5.0
    assert found["callbacks"] == pytest.approx(1 / 7)


def test_percentiles_weigh_a_call_by_its_steps():
    calls = [call(99, 0.99), call(1, 1.0)]
    assert step_milliseconds(calls, (0.5, 0.95, 1.0)) == pytest.approx([10, 10, 1000])


def test_percentiles_are_those_of_the_single_steps():
    rng = np.random.default_rng(0)
    calls = [
        call(int(steps), float(seconds)) for steps, seconds in zip(rng.integers(1, 9, 50), rng.random(50), strict=True)
    ]
    single = np.repeat([1000 * c.seconds / c.steps for c in calls], [c.steps for c in calls])
    for share, found in zip((0.5, 0.95), step_milliseconds(calls, (0.5, 0.95)), strict=True):
        assert found == pytest.approx(np.percentile(single, 100 * share, method="inverted_cdf"))


def test_what_is_unknown_is_left_out():
    found = figures([call(5, 1.0, samples=0)], splits=False)
    assert set(found) == {"steps_per_second", "step_ms_p50", "step_ms_p95", "step_ms_max"}


def test_flops_and_every_key():
    found = figures([call(1, 1.0)], callback_seconds=0.0, flops=(10.0, 640.0))
    assert found["flops_per_second"] == pytest.approx(320) and found["utilisation"] == pytest.approx(0.5)
    assert list(found) == list(KEYS)
