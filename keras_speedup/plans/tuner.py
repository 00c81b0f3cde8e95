"""Finds the fastest plan while the training runs: every step that measures a plan is a step of the training."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from ..engines.shadow import ShadowTrial, free_memory_bytes
from ..errors import XlaUnsupportedError
from . import rules
from .background import BackgroundJob
from .memory import PlanMemory
from .meter import CallRecord
from .trial import PlanTrial, Status


@dataclass
class _Candidate:
    """A plan on its way from its making to a decision."""

    plan: str
    program: Any
    compile_seconds: float = 0.0
    difference: float | None = None
    times: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    runs: int = 0

    @property
    def step_seconds(self) -> float | None:
        return median(self.times) if self.times else None


class Tuner:
    """Chooses the plan of each call and learns from it.

    Args:
        engine: Runs plans.
        kind: Which step: "train" or "test".
        jit_compile: "auto", True or False, as given to `compile`.
        steps_per_execution: "auto" or a number of steps, as given to `compile`.
        memory: What earlier runs chose, or None.
    """

    def __init__(
        self,
        engine: Any,
        kind: str,
        jit_compile: Any = "auto",
        steps_per_execution: Any = "auto",
        memory: PlanMemory | None = None,
    ):
        self.engine, self.kind = engine, kind
        self.jit_compile, self.steps_per_execution = jit_compile, steps_per_execution
        self.memory = memory
        self._remembered = memory.load() if memory is not None and jit_compile == "auto" else None
        self.trials: list[PlanTrial] = []
        self.notes: list[str] = []
        self.blockers: list[str] = []
        self.choosing_seconds = 0.0
        self.trained_seconds = self.tracing_seconds = 0.0
        self.every_batch: list[str] = []
        self.random = False
        self._plain: dict[Any, Any] = {}
        self._baseline: _Candidate | None = None
        self.best: _Candidate | None = None
        self._trial: _Candidate | None = None
        self._waiting: tuple[_Candidate, float] | None = None
        self._queue: list[str] | None = None
        self._job: tuple[str, int, BackgroundJob[Any]] | None = None
        self._steps_left: int | None = None
        self._epoch_steps: int | None = None
        self.last: tuple[Any, Any] | None = None
        self._turn = 0
        self._loop_steps = 1  # K, which a compiled loop gets even where the plain one did not pay
        self._rival: list[float] = []  # the best plan's times in turn with the trial's

    # What the loop asks

    def begin(self, *, every_batch: list[str], epoch_steps: int | None, steps_left: int | None) -> None:
        """Says what a fit is like before its first step."""
        self._epoch_steps, self._steps_left = epoch_steps, steps_left
        if bool(every_batch) != bool(self.every_batch):  # K changes from or to 1: the plans must be found anew
            self.best = self._trial = self._waiting = self._queue = None
        self.every_batch = every_batch
        if every_batch:
            self._remembered = None
            self._note(f"one step a call: {', '.join(every_batch)} must see every batch")

    def steps_wanted(self) -> int:
        """Returns how many batches the next call should get."""
        if self.every_batch or self.best is None:
            return 1 if self.every_batch or self.steps_per_execution == "auto" else int(self.steps_per_execution)
        if self._trial is not None:
            return min(int(self._trial.program.steps), rules.steps_per_trial_call(self.best.step_seconds))
        return int(self.best.program.steps)

    def run(self, feed: Any, block: Any) -> tuple[Any, CallRecord]:
        """Runs a block on the plan whose turn it is; returns the last step's logs and what it took."""
        began = perf_counter()
        candidate = self._choose(feed, block)
        built = perf_counter()
        logs = candidate.program.run(block)
        if block.steps > 1 or self._is_measuring:
            self.engine.wait(logs)
        seconds = perf_counter() - built
        compiling = built - began
        if candidate.runs == 0:  # the first run still optimises or loads the program
            known = self.best.step_seconds if self.best is not None else None
            work = seconds if known is None else min(seconds, block.steps * known)
            if self.best is None:
                self.tracing_seconds = compiling + seconds
            compiling += seconds - work
            seconds = work
        else:
            candidate.times.append(seconds / block.steps)
            if self._trial is not None and candidate is self.best:
                self._rival.append(seconds / block.steps)
        candidate.runs += 1
        self.trained_seconds += seconds + compiling
        if self._steps_left is not None:
            self._steps_left -= block.steps
        self.last = (feed, block) if block.steps > 1 or self.last is None or self.every_batch else self.last
        self._decide(feed, block, candidate, seconds)
        return logs, CallRecord(block.steps, block.samples, seconds, 0.0, compiling, candidate.plan)

    def finish(self) -> None:
        """Ends a fit: a job that runs on is left to itself."""
        if self._job is not None and self._job[2].is_done:
            self._collect()

    def restart(self) -> None:
        """Forgets every plan: the model computes in another precision."""
        self.memory = self._remembered = self.best = self._baseline = None
        self._trial = self._waiting = self._queue = None
        self._plain.clear()
        self.trials.clear()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs beside the training."""
        return self._job is None

    @property
    def plain_step_seconds(self) -> float | None:
        """Median time of a step on the plain graph, or of the best plan where that was not timed."""
        timed = [one.step_seconds for one in (self._baseline, self.best) if one is not None and one.times]
        return timed[0] if timed else None

    @property
    def plan(self) -> str:
        """The name of the plan that runs the steps now."""
        if self.best is not None:
            return self.best.plan
        return str(self.engine.explicit_plan if self.jit_compile is True else self.engine.baseline)

    @property
    def gain(self) -> float | None:
        """How many times faster a step is than on the plain graph."""
        if self._baseline is None or self.best is None or not self._baseline.times or not self.best.times:
            return None
        return median(self._baseline.times) / median(self.best.times)

    # Choosing

    @property
    def _is_measuring(self) -> bool:
        return self.best is None or self._trial is not None

    def _choose(self, feed: Any, block: Any) -> _Candidate:
        if self.jit_compile is True:
            return self._explicit(feed, block)
        able = [plan for plan in (self._trial, self.best) if plan is not None and self._fits(plan, block)]
        self._turn += 1
        return able[self._turn % len(able)] if able else self._plain_for(feed, block)

    def _fits(self, candidate: _Candidate, block: Any) -> bool:
        return bool(self.engine.runs_block(candidate.program, block)) and block.steps <= candidate.program.steps

    def _plain_for(self, feed: Any, block: Any) -> _Candidate:
        """Returns the plain graph for one batch, or a plain loop for several."""
        if block.steps > 1:
            return self._made(self.engine.loop_plan, block.batch_size, feed, block)
        candidate = self._made(self.engine.baseline, None, feed, block)
        self._baseline = self._baseline or candidate
        return candidate

    def _explicit(self, feed: Any, block: Any) -> _Candidate:
        """Returns a compiled plan for any block: `jit_compile=True` is honoured for every batch."""
        return self._made(self.engine.explicit_plan, block.batch_size, feed, block)

    def _made(self, plan: str, rows: int | None, feed: Any, block: Any) -> _Candidate:
        """Returns a plan that nothing has to be compiled for beside the training, made once for each shape."""
        key = (plan, repr(feed.structure), rows, str(feed.specs))
        if key not in self._plain:
            if self.jit_compile is True and (found := self.engine.blockers(self.kind, feed, block)):
                raise XlaUnsupportedError(found[0])
            self._plain[key] = _Candidate(plan, self.engine.program(self.kind, plan, block.steps, feed, block))
        candidate: _Candidate = self._plain[key]
        candidate.program.steps = max(candidate.program.steps, block.steps)
        return candidate

    # Learning

    def _decide(self, feed: Any, block: Any, ran: _Candidate, seconds: float) -> None:
        if self.best is None:
            self._leave_baseline(feed, block)
        elif self._trial is not None:
            if ran is self._trial and ran.step_seconds and self.best.step_seconds:
                self.choosing_seconds += max(0.0, seconds - block.steps * self.best.step_seconds)
            self._judge_trial()
        elif self._waiting is not None:
            if rules.may_spend(self.choosing_seconds, self.trained_seconds, self._waiting[1]):
                (candidate, _), self._waiting = self._waiting, None
                self._start_trial(candidate)
        elif self._job is not None:
            if self._job[2].is_done:
                self._collect()
        elif self._queue:
            self._start_next()

    def _leave_baseline(self, feed: Any, block: Any) -> None:
        """Leaves the plain graph once it is measured, for a loop of K steps where that can be had."""
        if self.engine.is_deterministic:
            self._follow_rule(feed, block)
            return
        if self._remembered is not None:
            self._follow_memory(feed, block, self._remembered)
            return
        baseline = self._baseline if self.jit_compile is not True else self._explicit(feed, block)
        if baseline is None or not rules.is_measured(baseline.times):
            return
        if self.jit_compile is True:
            self._baseline = baseline
        self._add(baseline, "baseline", "every other plan is compared with it")
        self.best = baseline
        self._queue = self._plans_to_compile(feed, block)
        if (loop := self._loop(feed, block, self._steps_per_call(feed, block))) is not None:
            self._start_trial(loop)

    def _follow_rule(self, feed: Any, block: Any) -> None:
        """Takes the plain loop at once: what is measured is not the same in every run, so nothing is."""
        self._note("operations are deterministic: the plan is chosen by rule")
        self._take_loop(
            feed, block, self.steps_per_execution if self.steps_per_execution != "auto" else rules.FIXED_STEPS
        )

    def _follow_memory(self, feed: Any, block: Any, remembered: dict[str, Any]) -> None:
        """Takes the plan that an earlier run chose; what must be compiled first is, beside the training."""
        self._note(f"an earlier run chose {remembered['plan']}: nothing is tried again")
        steps = min(remembered["steps_per_call"], self._epoch_steps or remembered["steps_per_call"])
        self._take_loop(feed, block, 1 if remembered["plan"] == self.engine.baseline else steps)
        compiled = remembered["plan"] in self._plans_to_compile(feed, block)
        self._queue = [remembered["plan"]] if compiled else []

    def _take_loop(self, feed: Any, block: Any, steps: int) -> None:
        baseline = self._baseline if self.jit_compile is not True else self._explicit(feed, block)
        if baseline is None:
            return
        self.best, self._queue = baseline, []
        self.best = self._loop(feed, block, steps) or baseline

    def _loop(self, feed: Any, block: Any, steps: int) -> _Candidate | None:
        """Returns K plain steps in one call, where that can be had; an explicit plan loops by itself."""
        assert self.best is not None
        if steps <= 1 or self.every_batch or not self.engine.can_loop(self.kind, feed, block):
            return None
        if self.jit_compile is True:
            self.best.program.steps = steps
            return None
        self._loop_steps, began = steps, perf_counter()
        program = self.engine.program(self.kind, self.engine.loop_plan, steps, feed, block)
        self.choosing_seconds += perf_counter() - began
        return _Candidate(self.engine.loop_plan, program)

    def _steps_per_call(self, feed: Any, block: Any) -> int:
        if self.steps_per_execution != "auto":
            return int(self.steps_per_execution)
        assert self.best is not None and self.best.step_seconds is not None
        size = sum(int(getattr(leaf, "nbytes", 0) or 0) for leaf in block.leaves) // max(block.steps, 1)
        # Plans that loop are faster than the plain graph by an amount not yet known; a call stays under a second.
        return rules.steps_per_call(self.best.step_seconds, self._epoch_steps, size)

    def _plans_to_compile(self, feed: Any, block: Any) -> list[str]:
        if self.jit_compile is False:
            return []
        self.blockers = [str(blocker) for blocker in self.engine.blockers(self.kind, feed, block)]
        needed, free = self.engine.shadow_bytes(self.kind, feed, block), free_memory_bytes()
        if free is not None and needed > free // 2:
            self._note(
                f"no plan is compiled beside the training: that takes {needed >> 20:,} MB, {free >> 20:,} MB are free"
            )
            return []
        plans = list(self.engine.compiled_plans(self.kind, feed, block))
        return [plan for plan in plans if plan == self.engine.explicit_plan] if self.every_batch else plans

    def _start_trial(self, candidate: _Candidate) -> None:
        self._trial, self._turn, self._rival = candidate, 0, []

    def _judge_trial(self) -> None:
        trial, best = self._trial, self.best
        assert trial is not None and best is not None
        in_turn = best.program.steps > 1 or trial.program.steps == 1  # else the best plan cannot run the same blocks
        rival = self._rival if in_turn else list(best.times)
        if len(trial.times) < rules.TRIAL_CALLS or len(rival) < rules.TRIAL_CALLS:
            too_dear = len(rival) > 1 and not rules.may_spend(self.choosing_seconds, self.trained_seconds)
            if not trial.times or not too_dear or rules.is_faster(trial.times, rival):
                return
        self._trial = None
        ratio = rules.typical(rival) / rules.typical(trial.times)
        if rules.is_faster(trial.times, rival):
            if best is not self._baseline:
                self._replace(best, "refused", f"{trial.plan} is faster")
            self._add(trial, "kept", f"{ratio:.2f} times as fast as {best.plan}")
            self.best = trial
            is_single = trial.plan == self.engine.explicit_plan  # a loop of it gains where a call's overhead counts
            if trial.compile_seconds and not (is_single and rules.is_light(trial.step_seconds)):
                self._queue = []
        else:
            self._add(trial, "refused", f"a step takes {1 / ratio:.2f} times as long as with {best.plan}")
        self._remember()

    def _start_next(self) -> None:
        """Begins to compile the next plan beside the training, where enough training is left."""
        assert self.best is not None and self._queue and self.last is not None
        traced = 0.0 if self._remembered else self.tracing_seconds  # what an earlier run chose is known to pay
        if not rules.worth_compiling(self._steps_left, self.best.step_seconds or 0.0, traced):
            return
        feed, block = self.last
        plan = self._queue.pop(0)
        steps = 1 if self.every_batch else max(self._loop_steps, self.best.program.steps, block.steps)
        began = perf_counter()
        start = self.engine.prepare_shadow(self.kind, feed, block)
        self.choosing_seconds += perf_counter() - began
        check, is_first = self._remembered is None, not any(trial.compile_seconds for trial in self.trials)
        made_of, timed = (self.kind, plan, steps, feed, block), rules.steps_per_trial_call(self.best.step_seconds)
        compiling = partial(self.engine.compile_on_shadow, ShadowTrial(made_of, self.random, check, timed), start)
        urgent = not check or (is_first and rules.is_light(self.best.step_seconds))
        self._job = (plan, steps, BackgroundJob(compiling, urgent=urgent))

    def _collect(self) -> None:
        """Takes the result of the background job and decides whether the plan gets its turn."""
        assert self._job is not None and self.best is not None
        (plan, steps, job), self._job = self._job, None
        if job.error is not None:
            if isinstance(job.error, XlaUnsupportedError):
                self.blockers.append(str(job.error.blocker))
                self._queue = []
            reason = str(job.error).splitlines()[0]
            self.trials.append(PlanTrial(plan, steps, None, job.seconds, None, "failed", reason))
            return
        assert job.result is not None
        program, found = job.result
        if self._remembered is not None:
            self.best = _Candidate(plan, program, found.compile_seconds)
            self._add(self.best, "kept", "an earlier run found it the fastest, and its numbers equal")
            return
        candidate = _Candidate(plan, program, found.compile_seconds, found.difference)
        if not rules.agrees(found.difference):
            gap = f"its numbers differ from the plain graph's by {found.difference:.1e}, allowed are {rules.TOLERANCE}"
            self._add(candidate, "refused", gap)
        elif found.step_ratio > rules.HOPELESS:
            self._add(candidate, "refused", f"{found.step_ratio:.1f} times as slow as the plain loop on shadow state")
        else:
            self._waiting = candidate, rules.trial_cost(found.step_ratio)
        self._remember()

    # Telling

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _add(self, candidate: _Candidate, status: Status, reason: str) -> None:
        figures = candidate.step_seconds, candidate.compile_seconds, candidate.difference
        self.trials.append(PlanTrial(candidate.plan, int(candidate.program.steps), *figures, status, reason))

    def _replace(self, candidate: _Candidate, status: Status, reason: str) -> None:
        self.trials = [trial for trial in self.trials if not (trial.plan == candidate.plan and trial.status == "kept")]
        self._add(candidate, status, reason)

    def _remember(self) -> None:
        """Keeps the choice for later runs, once nothing is left to be tried."""
        if self._queue or self._job or self._trial or self._waiting or self.engine.is_deterministic:
            return
        if self.memory is not None and self.best is not None and not self._remembered and not self.every_batch:
            self.memory.save({"plan": self.best.plan, "steps_per_call": int(self.best.program.steps)})
