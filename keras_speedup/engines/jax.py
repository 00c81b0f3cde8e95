"""Runs a model's steps on JAX: one compiled step a call, or K steps in one compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .blockers import Blocker
from .feed import Block, Feed, assemble
from .shadow import ShadowResult, ShadowTrial, Stop, give_up_if, relative_difference, step_ratio

State = tuple[list[Any], ...]

_STATES = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


class JaxProgram:
    """A plan made ready to run, as a pure function of the model's state and a block.

    Attributes:
        plan: "jit" (one step a call of the device), "jit-loop" (K of them in a row) or "scan" (K in one program).
        steps: The most steps that one call runs.
        batch_size: Rows of a batch.
    """

    def __init__(self, engine: JaxEngine, kind: str, plan: str, step: Step, steps: int, block: Block):
        self.plan, self.steps, self.batch_size = plan, steps, block.batch_size
        self._engine, self._kind, self._step = engine, kind, step
        self._call: Callable[..., Any] = step.jitted if plan != "scan" else jax.jit(self._loop, donate_argnums=0)

    def run(self, block: Block) -> Any:
        logs, state = self.apply(self._engine.state(self._kind), block)
        self._engine.hold(self._kind, state)
        return logs

    def apply(self, state: State, block: Block) -> tuple[Any, State]:
        """Returns the last step's logs and the state after a block; `state` is used up."""
        if self.plan == "scan":
            padded = [_padded(leaf, self.steps * block.batch_size) for leaf in block.leaves]
            result: tuple[Any, State] = self._call(state, np.int32(block.steps), *padded)
            return result
        logs = None
        for index in range(block.steps):
            rows = slice(index * block.batch_size, (index + 1) * block.batch_size)
            leaves = block.leaves if block.steps == 1 else [leaf[rows] for leaf in block.leaves]
            logs, state = self._call(state, *leaves)
        return logs, state

    def compile_ahead(self, state: State, block: Block) -> None:
        """Compiles the loop for blocks like `block` without running it."""
        rows = [_padded(leaf, self.steps * block.batch_size) for leaf in block.leaves]
        self._call = self._call.lower(state, np.int32(1), *rows).compile()  # type: ignore[attr-defined]

    def _loop(self, state: State, count: Any, *rows: Any) -> tuple[Any, State]:
        size = self.batch_size

        def batch(index: Any) -> list[Any]:
            return [jax.lax.dynamic_slice_in_dim(leaf, index * size, size) for leaf in rows]

        shapes = jax.eval_shape(lambda s: self._step.pure(s, *batch(0))[0], state)
        zeros = jax.tree_util.tree_map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def body(index: Any, carry: Any) -> Any:
            logs, after = self._step.pure(carry[1], *batch(index))
            return _like(logs, zeros), _like(after, carry[1])

        result: tuple[Any, State] = jax.lax.fori_loop(0, count, body, (zeros, state))
        return result


class Step:
    """One step of a model as a pure function `(state, *leaves) -> (logs, state)`."""

    def __init__(self, function: Callable[..., Any], structure: Any):
        self._function, self._structure = function, structure
        self.jitted = jax.jit(self.pure, donate_argnums=0)

    def pure(self, state: State, *leaves: Any) -> tuple[Any, State]:
        result: tuple[Any, State] = self._function(state, assemble(self._structure, leaves))
        return result


class JaxEngine:
    """Keras 3 on JAX.

    Args:
        model: A compiled model.
        host: What the loop needs of the Keras around the model.
    """

    baseline = "jit"
    loop_plan = "jit-loop"
    explicit_plan = "jit-loop"
    is_deterministic = False

    def __init__(self, model: Any, host: Any):
        self.model, self.host = model, host
        self._steps: dict[Any, Step] = {}
        self._held: tuple[str, State] | None = None
        self._on_cpu = jax.default_backend() == "cpu"

    # Data

    def convert(self, block: Block) -> Block:
        leaves = [leaf.numpy() if hasattr(leaf, "numpy") else leaf for leaf in block.leaves]
        if not self._on_cpu:  # the copy to the device overlaps the steps before
            leaves = jax.device_put(leaves)
        return Block(leaves, block.steps, block.batch_size)

    # State

    def state(self, kind: str) -> State:
        """Returns the values that a step of this kind takes; the model's own are gone until `pull`."""
        if self._held is not None and self._held[0] != kind:
            self.pull()
        if self._held is None:
            return tuple([variable.value for variable in group] for group in self._variables(kind))
        return self._held[1]

    def hold(self, kind: str, state: State) -> None:
        self._held = (kind, state)

    def pull(self) -> None:
        """Writes the state back into the model's variables."""
        if self._held is None:
            return
        (kind, state), self._held = self._held, None
        for group, values in zip(self._variables(kind), state, strict=True):
            for variable, value in zip(group, values, strict=True):
                # Private in Keras 3.0 to 3.15; `assign` would check each value, at some microseconds each.
                variable._value = value

    def _variables(self, kind: str) -> list[list[Any]]:
        model = self.model
        groups = {
            "trainable_variables": model.trainable_variables,
            "non_trainable_variables": model.non_trainable_variables,
            "metrics_variables": model.metrics_variables,
            "optimizer_variables": model.optimizer.variables if kind == "train" else [],
        }
        return [list(groups[name]) for name in _STATES[kind]]

    @contextmanager
    def rehearsal(self, feed: Feed, block: Block) -> Iterator[Callable[[Block], Any]]:
        """Gives a function that runs a plain training step on copies of the state, and returns its logs."""
        program = self.program("train", self.baseline, 1, feed, block)
        state = _copy(self.state("train"))

        def run(batch: Block) -> Any:
            nonlocal state
            logs, state = program.apply(state, batch)
            return logs

        yield run

    # Programs

    def forget(self) -> None:
        """Drops every traced step: the model computes in another precision."""
        self._steps.clear()

    def step(self, kind: str, feed: Feed, block: Block) -> Step:
        key = (kind, repr(feed.structure))
        if key not in self._steps:
            self._build(kind, feed, block)
            function = self.host.step_function(kind)
            if kind == "predict":  # Keras returns only what changes
                function = _with_whole_state(function)
            self._steps[key] = Step(function, feed.structure)
        return self._steps[key]

    def _build(self, kind: str, feed: Feed, block: Block) -> None:
        """Makes the variables of model, metrics and optimizer, from the shapes of a batch."""
        batch = assemble(feed.structure, [leaf[: block.batch_size] for leaf in block.leaves])
        if kind == "predict":
            if not self.model.built:
                self.model(self.host.unpack(batch)[0])
            return
        self.model._symbolic_build(data_batch=batch)  # private in Keras 3.0 to 3.15

    def program(self, kind: str, plan: str, steps: int, feed: Feed, block: Block) -> JaxProgram:
        return JaxProgram(self, kind, plan, self.step(kind, feed, block), steps, block)

    def compiled_plans(self, kind: str, feed: Feed, block: Block) -> tuple[str, ...]:
        return ("scan",) if self.can_loop(kind, feed, block) else ()

    def runs_block(self, program: JaxProgram, block: Block) -> bool:
        return program.plan != "scan" or program.batch_size == block.batch_size

    def can_loop(self, kind: str, feed: Feed, block: Block) -> bool:
        return feed.can_stack

    def blockers(self, kind: str, feed: Feed, block: Block) -> list[Blocker]:
        return []  # whatever JAX runs is compiled by XLA already

    def shadow_bytes(self, kind: str, feed: Feed, block: Block) -> int:
        return 3 * sum(value.nbytes for group in self.state(kind) for value in group)

    def predict_batch(self, feed: Feed, block: Block) -> Any:
        """Returns the model's outputs for a batch; rows are padded to a power of two, which bounds the programs."""
        rows = block.batch_size
        padded = 1 << (rows - 1).bit_length()
        leaves = [_padded(leaf, padded, repeat=True) for leaf in block.leaves]
        step = self.step("predict", feed, block)
        outputs, others = step.jitted(self.state("predict"), *leaves)
        self.hold("predict", others)
        return jax.tree_util.tree_map(
            lambda leaf: np.asarray(leaf)[:rows] if leaf.shape[:1] == (padded,) else leaf, outputs
        )

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return np.concatenate([np.asarray(part) for part in parts])

    def wait(self, logs: Any) -> None:
        jax.block_until_ready(logs)

    # Compiling in the background

    def prepare_shadow(self, kind: str, feed: Feed, block: Block) -> State:
        """Returns copies of the state as it is now."""
        return _copy(self.state(kind))

    def compile_on_shadow(self, trial: ShadowTrial, start: State, stopped: Stop) -> tuple[JaxProgram, ShadowResult]:
        """Compiles a plan, compares its numbers with the plain steps' and times both, all on shadow state."""
        kind, plan, steps, feed, block = trial.made_of
        program = self.program(kind, plan, steps, feed, block)
        began = perf_counter()
        program.compile_ahead(start, block)
        seconds = perf_counter() - began
        if not trial.check:
            return program, ShadowResult(seconds, 0.0, 0.0)
        give_up_if(stopped)
        head, _ = block.split(min(4, block.steps))
        # JAX draws the same random numbers in a loop and out of it, so nothing has to be turned off.
        plain = self.program(kind, "jit-loop", steps, feed, block)
        _, mine = program.apply(_copy(start), head)
        _, theirs = plain.apply(_copy(start), head)
        flat = [[np.asarray(v) for group in state for v in group] for state in (theirs, mine, start)]
        gap = relative_difference(*flat)
        head, _ = block.split(min(trial.timed, block.steps))
        ratio = step_ratio(*(lambda one=one: self.wait(one.apply(_copy(start), head)) for one in (program, plain)))
        return program, ShadowResult(seconds, gap, ratio)


def _with_whole_state(predict_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: State, data: Any) -> Any:
        outputs, non_trainable = predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return step


def _copy(state: State) -> State:
    return tuple([jnp.array(value, copy=True) for value in group] for group in state)


def _like(values: Any, template: Any) -> Any:
    """Returns `values` in the structure and the types of `template`, as a loop's carry must be."""
    leaves = jax.tree_util.tree_leaves(values)
    targets, structure = jax.tree_util.tree_flatten(template)
    cast = [jnp.asarray(leaf, target.dtype) for leaf, target in zip(leaves, targets, strict=True)]
    return jax.tree_util.tree_unflatten(structure, cast)


def _padded(leaf: Any, rows: int, repeat: bool = False) -> Any:
    """Returns `leaf` with rows of zeros up to `rows`, or with its last one repeated."""
    missing = rows - leaf.shape[0]
    if missing <= 0:
        return leaf
    xp = np if isinstance(leaf, np.ndarray) else jnp
    more = xp.repeat(leaf[-1:], missing, axis=0) if repeat else xp.zeros((missing, *leaf.shape[1:]), leaf.dtype)
    return xp.concatenate([leaf, more])
