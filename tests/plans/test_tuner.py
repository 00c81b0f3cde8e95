"""The tuner with an engine whose plans take made-up times, by a made-up clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from keras_speedup.engines.blockers import Blocker
from keras_speedup.engines.feed import Block
from keras_speedup.engines.shadow import ShadowResult
from keras_speedup.errors import XlaUnsupportedError
from keras_speedup.plans import tuner as tuner_module
from keras_speedup.plans.tuner import Tuner


class Clock:
    """Time that passes only when a plan runs."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@dataclass
class FakeProgram:
    plan: str
    steps: int
    batch_size: int
    engine: FakeEngine

    def run(self, block):
        self.engine.clock.now += self.engine.step_seconds[self.plan] * block.steps
        self.engine.ran.append((self.plan, block.steps))
        return {"loss": 0.0}


class FakeFeed:
    structure, specs, can_stack = 0, None, True


class FakeEngine:
    baseline, loop_plan, explicit_plan = "graph", "graph-loop", "xla"

    def __init__(
        self,
        clock,
        step_seconds,
        difference=0.0,
        blocked=(),
        error=None,
        deterministic=False,
        order=("xla-loop", "xla"),
    ):
        self.order = order
        self.clock, self.step_seconds, self.difference = clock, step_seconds, difference
        self.blocked, self.error, self.is_deterministic = list(blocked), error, deterministic
        self.ran, self.compiled = [], []

    def program(self, kind, plan, steps, feed, block):
        return FakeProgram(plan, steps, block.batch_size, self)

    def runs_block(self, program, block):
        return program.batch_size == block.batch_size

    def can_loop(self, *_):
        return True

    def compiled_plans(self, *_):
        return ("clusters",) if self.blocked else self.order

    def blockers(self, *_):
        return self.blocked

    def shadow_bytes(self, *_):
        return 0

    def wait(self, logs):
        pass

    def prepare_shadow(self, *_):
        return []

    def compile_on_shadow(self, trial, start, stopped):
        _, plan, steps, _, block = trial.made_of
        if self.error is not None:
            raise self.error
        self.compiled.append(plan)
        ratio = self.step_seconds[plan] / self.step_seconds["graph-loop"]
        return FakeProgram(plan, steps, block.batch_size, self), ShadowResult(1.0, self.difference, ratio)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(tuner_module, "perf_counter", made)
    return made


def train(tuner, steps=40_000, every_batch=()):
    """Gives the tuner so many steps, in blocks of the size that it asks for."""
    tuner.begin(every_batch=list(every_batch), epoch_steps=1000, steps_left=steps)
    while steps > 0:
        count = min(tuner.steps_wanted(), steps)
        tuner.run(FakeFeed(), Block([], count, 32))
        steps -= count
        if tuner._job is not None:
            tuner._job[2].join()
    tuner.finish()


TIMES = {"graph": 0.002, "graph-loop": 0.001, "xla": 0.0009, "xla-loop": 0.0002, "clusters": 0.0005}


def test_fastest_plan_is_adopted_and_every_plan_reported(clock):
    tuner = Tuner(FakeEngine(clock, TIMES), "train")
    train(tuner)
    assert tuner.best.plan == "xla-loop"
    assert {trial.plan: trial.status for trial in tuner.trials} == {
        "graph": "baseline",
        "graph-loop": "refused",
        "xla-loop": "kept",
    }
    assert tuner.gain == pytest.approx(10, rel=0.01)


def test_loop_is_compiled_for_many_steps_even_where_the_plain_one_does_not_pay(clock):
    tuner = Tuner(FakeEngine(clock, TIMES | {"graph-loop": 0.0021}), "train")
    train(tuner)
    assert tuner.best.plan == "xla-loop"
    assert tuner.best.program.steps > 100


@pytest.mark.parametrize(("faster", "urgent"), [(1, [True, False]), (0.05, [False])])
def test_only_the_first_program_of_a_light_step_is_compiled_at_the_trainings_priority(
    clock, monkeypatch, faster, urgent
):
    asked, made = [], tuner_module.BackgroundJob
    monkeypatch.setattr(
        tuner_module, "BackgroundJob", lambda job, urgent: asked.append(urgent) or made(job, urgent=urgent)
    )
    times = {plan: seconds / faster for plan, seconds in TIMES.items()}
    train(Tuner(FakeEngine(clock, times, order=("xla", "xla-loop")), "train"))
    assert asked == urgent


@pytest.mark.parametrize(
    ("faster", "order", "compiled"),
    [
        (1, ("xla-loop", "xla"), ["xla-loop"]),
        (1, ("xla", "xla-loop"), ["xla", "xla-loop"]),
        (0.01, ("xla", "xla-loop"), ["xla"]),
    ],
)
def test_nothing_is_compiled_that_could_no_longer_gain(clock, faster, order, compiled):
    """A loop spares the overhead of calls, which a long step does not notice."""
    engine = FakeEngine(clock, {plan: seconds / faster for plan, seconds in TIMES.items()}, order=order)
    train(Tuner(engine, "train"))
    assert engine.compiled == compiled


def test_plan_with_other_numbers_is_refused(clock):
    tuner = Tuner(FakeEngine(clock, TIMES, difference=0.1), "train")
    train(tuner)
    assert tuner.best.plan == "graph-loop"
    assert "numbers differ" in next(trial.reason for trial in tuner.trials if trial.plan == "xla-loop")


def test_looking_for_a_better_plan_costs_at_most_five_percent(clock):
    slow = TIMES | {"xla-loop": 0.005, "xla": 0.0055}
    engine = FakeEngine(clock, slow)
    tuner = Tuner(engine, "train")
    train(tuner)
    best = 40_000 * slow["graph-loop"]
    assert tuner.best.plan == "graph-loop"
    assert clock.now < best * 1.06


def test_blocked_operation_leaves_the_rest_of_the_step_to_xla(clock):
    engine = FakeEngine(clock, TIMES, blocked=[Blocker("Unique", "dedupe", "Dedupe")])
    tuner = Tuner(engine, "train")
    train(tuner)
    assert engine.compiled == ["clusters"]
    assert tuner.best.plan == "clusters"
    assert tuner.blockers == ["Unique (layer 'dedupe', class Dedupe)"]


def test_failed_compilation_is_told_and_training_goes_on(clock):
    tuner = Tuner(FakeEngine(clock, TIMES, error=XlaUnsupportedError(Blocker("Bad"))), "train")
    train(tuner)
    assert tuner.best.plan == "graph-loop"
    assert tuner.blockers == ["Bad"]


def test_callback_that_sees_every_batch_gets_one_step_a_call(clock):
    engine = FakeEngine(clock, TIMES)
    tuner = Tuner(engine, "train")
    train(tuner, 4000, every_batch=["Mine"])
    assert {steps for _, steps in engine.ran} == {1}
    assert any("Mine" in note for note in tuner.notes)
    assert tuner.best.plan == "xla"  # a compiled step, one a call


@pytest.mark.parametrize("jit", [False, True])
def test_explicit_choices_are_honoured(clock, jit):
    engine = FakeEngine(clock, TIMES)
    train(Tuner(engine, "train", jit_compile=jit, steps_per_execution=7), 2100)
    assert {steps for _, steps in engine.ran[30:]} == {7}
    assert {plan for plan, _ in engine.ran[30:]} == {"xla" if jit else "graph-loop"}


class Memory:
    def __init__(self, entry=None):
        self.entry, self.saved = entry, []

    def load(self):
        return self.entry

    def save(self, choice):
        self.saved.append(choice)


def test_choice_is_remembered_and_taken_at_once_by_the_next_run(clock):
    memory = Memory()
    train(Tuner(FakeEngine(clock, TIMES), "train", memory=memory))
    assert [choice["plan"] for choice in memory.saved] == ["xla-loop"]
    engine = FakeEngine(clock, TIMES)
    second = Tuner(engine, "train", memory=Memory(memory.saved[0]))
    train(second)
    assert engine.compiled == ["xla-loop"]
    assert {plan for plan, _ in engine.ran} == {"graph", "graph-loop", "xla-loop"}
    assert second.best.plan == "xla-loop"
    assert [trial.status for trial in second.trials] == ["kept"]


def test_nothing_is_tried_where_operations_are_deterministic(clock):
    engine = FakeEngine(clock, TIMES, deterministic=True)
    memory = Memory()
    train(Tuner(engine, "train", memory=memory))
    assert not engine.compiled
    assert not memory.saved
    assert {plan for plan, _ in engine.ran} == {"graph", "graph-loop"}
