"""Whether a mixed policy pays: measured between two epochs, on the training's own batches and copies of its state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any

from ..engines import engine_for
from ..engines.feed import Block, assemble
from ..engines.traces import calls_replaced, dtype_name, leaves
from ..flavor import KERAS_MAJOR, flatten_layers, keras
from ..heads import computes_in_half
from ..precision import Choice, PrecisionTrial, choose_precision, native_precision, needs_loss_scaling, scaled
from . import rules
from .tuner import Tuner

#: Steps under each policy; the first is not timed.
STEPS = 9

#: A mixed policy's steps end once they took this many times as long as float32's.
SLOWER = 3

#: How often it is tried, each time with one more layer kept in float32.
MOST_TRIES = 3


class PrecisionTuner:
    """Decides whether a model trains on under a mixed policy.

    Args:
        model: A model of ours, compiled with `precision="auto"`.

    Attributes:
        reason: What was found, in words, or why nothing was measured.
    """

    def __init__(self, model: Any):
        self.model = model
        self.reason = "precision: float32; nothing else was measured, as the training was too short for it to pay"
        self._keep: list[str] = []
        self._tries = MOST_TRIES
        if KERAS_MAJOR == 2:
            self._tries, self.reason = 0, "precision: as it is; Keras 2 settles it when a layer is built"

    def moves(self, tuner: Tuner) -> bool:
        """Returns whether the model has just moved to a mixed policy, where trying that costs no more than it may."""
        if self._tries and computes_in_half(self.model):
            self._tries, self.reason = 0, "precision: as it is; layers had a mixed policy before"
        cost = tuner.tracing_seconds + (1 + SLOWER) * STEPS * (tuner.plain_step_seconds or math.inf)
        if not self._tries or not rules.may_spend(tuner.choosing_seconds, tuner.trained_seconds, cost):
            return False
        began = perf_counter()
        choice = self._try(tuner)
        tuner.choosing_seconds += perf_counter() - began
        kept = f" ({', '.join(self._keep)} kept in float32)" if self._keep else ""
        self.reason = f"precision: {choice.policy}{kept}, because {choice.reason}"
        return choice.policy != "float32"

    def _try(self, tuner: Tuner) -> Choice:
        policy = native_precision().policy
        policy = policy if policy != "float32" else "mixed_bfloat16"
        assert tuner.last is not None
        engine, (feed, block) = tuner.engine, tuner.last
        self._tries -= 1
        engine.host.reset_metrics()  # the epoch is over; a running mean would hide the loss of these few steps
        plain = rehearsed(engine, "float32", feed, block)
        undo, optimizer = self.model._take_policy(policy, self._keep), self.model.optimizer
        is_fault = True
        try:
            if needs_loss_scaling(self.model):
                self.model.optimizer = scaled(optimizer)
            limit = SLOWER * STEPS * plain.step_seconds
            mixed = rehearsed(engine_for(self.model), policy, feed, block, limit)
            is_fault = len(mixed.losses) == STEPS and not all(map(math.isfinite, mixed.losses))
            choice = choose_precision(plain, mixed)
        except Exception as error:  # whatever a layer raises where it meets half precision
            choice = Choice("float32", f"under {policy} a step fails: {' '.join(str(error).split())[:200]}")
        culprit = self._first_fault(engine, feed, block) if is_fault else None
        if culprit is not None and culprit not in self._keep:
            self._keep.append(culprit)
        else:
            self._tries = 0  # it is decided
        if choice.policy == "float32":
            self.model.optimizer = optimizer
            undo()
        return choice

    def _first_fault(self, engine: Any, feed: Any, block: Block) -> str | None:
        """Returns the name of the innermost layer that fails, or returns what is not finite, on the first batch."""
        found: list[str] = []

        def watched(layer: Any, call: Any) -> Any:
            def watching(*args: Any, **kwargs: Any) -> Any:
                try:
                    outputs = call(*args, **kwargs)
                except Exception:
                    found.append(layer.name)
                    raise
                floats = [leaf for leaf in leaves(outputs) if "float" in dtype_name(leaf)]
                if not all(bool(keras.ops.all(keras.ops.isfinite(leaf))) for leaf in floats):
                    found.append(layer.name)
                return outputs

            return watching

        x, *_ = engine.host.unpack(assemble(feed.structure, block.split(1)[0].leaves))
        with calls_replaced(flatten_layers(self.model)[1:], watched), suppress(Exception):
            self.model(x)
        return found[0] if found else None


def rehearsed(engine: Any, policy: str, feed: Any, block: Block, limit_seconds: float = math.inf) -> PrecisionTrial:
    """Returns what a few plain steps on copies of the state showed, under the policy that the layers have now."""
    times: list[float] = []
    losses: list[float] = []
    with engine.rehearsal(feed, block) as run:
        for batch in _batches(block, STEPS):
            began = perf_counter()
            logs = run(batch)
            engine.wait(logs)
            times.append(perf_counter() - began)
            losses.append(sum(float(value) for value in leaves(logs.get("loss", logs))))
            if sum(times[1:]) > limit_seconds:
                break
    return PrecisionTrial(policy, rules.typical(times[1:]), tuple(losses))


def _batches(block: Block, count: int) -> Iterator[Block]:
    rest: Block | None = None
    for _ in range(count):
        head, rest = (rest or block).split(1)
        yield head
