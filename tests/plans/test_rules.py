"""The decisions, with made-up timings and no Keras."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_speedup.plans import rules


@given(st.floats(1e-6, 10), st.one_of(st.none(), st.integers(1, 100_000)), st.integers(1, 2**30), st.floats(0.01, 1))
def test_a_call_stays_within_its_time_its_memory_and_the_epoch(step_seconds, epoch_steps, batch_bytes, call_seconds):
    steps = rules.steps_per_call(step_seconds, epoch_steps, batch_bytes, call_seconds)
    assert 1 <= steps <= rules.MAX_STEPS
    assert steps == 1 or steps * step_seconds <= call_seconds * 1.001
    assert steps == 1 or steps * batch_bytes <= rules.MAX_BYTES
    assert epoch_steps is None or steps <= epoch_steps


@given(st.integers(1, 5000))
def test_an_epoch_is_cut_into_calls_of_nearly_equal_size(epoch_steps):
    steps = rules.steps_per_call(0.001, epoch_steps, 1)
    calls = -(-epoch_steps // steps)
    assert calls * steps - epoch_steps < calls


def test_noise_that_only_adds_time_does_not_hide_the_faster_plan():
    assert rules.is_faster([1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0])
    assert not rules.is_faster([1.99, 2.0, 2.0], [2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("spent", "trained", "cost", "may"),
    [(0, 10, 0.5, True), (0.4, 10, 0.2, False), (0, 0, 0.1, False), (0, 0, 0, True)],
)
def test_trials_cost_at_most_five_percent_of_the_time_trained(spent, trained, cost, may):
    assert rules.may_spend(spent, trained, cost) is may


def test_slow_plans_are_dear_to_try_and_fast_ones_cost_nothing():
    assert rules.trial_cost(0.5) == 0
    assert rules.trial_cost(3.0) > rules.trial_cost(2.0) > 0


def test_compiling_waits_for_enough_training_to_be_left():
    assert rules.worth_compiling(None, 0.001)
    assert rules.worth_compiling(10_000, 0.001)
    assert not rules.worth_compiling(10, 0.001)
    assert rules.worth_compiling(1_000, 0.02, tracing_seconds=0.9)
    assert not rules.worth_compiling(1_000, 0.02, tracing_seconds=1.1)


def test_a_difference_above_the_tolerance_is_refused():
    assert rules.agrees(1e-6)
    assert not rules.agrees(float("inf"))
    assert not rules.agrees(float("nan"))
