"""Runs a model's steps on TensorFlow: plain graphs, loops of K steps, and both compiled by XLA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

# No public name in TensorFlow 2.15 to 2.21; enable_op_determinism is public.
from tensorflow.python.framework.config import is_op_determinism_enabled

from ..errors import XlaUnsupportedError
from ..flavor import flatten_layers
from .blockers import Blocker, blocker_in, blockers
from .feed import Block, Feed, assemble
from .graphs import Program, Step, shadow_copies, tf
from .quiet import without_randomness
from .shadow import ShadowResult, ShadowTrial, Stop, give_up_if, relative_difference, step_ratio

#: Two rounding errors of float32.
NUDGE = 2.4e-7


class TensorFlowEngine:
    """Keras 3 or Keras 2 on TensorFlow.

    Args:
        model: A compiled model.
        host: What the loop needs of the Keras around the model.
    """

    baseline = "graph"
    loop_plan = "graph-loop"
    explicit_plan = "xla"

    def __init__(self, model: Any, host: Any):
        self.model, self.host = model, host
        self._steps: dict[Any, Step] = {}
        self._tracing = threading.RLock()
        self._on_cpu = not tf.config.list_logical_devices("GPU")

    # Data

    def convert(self, block: Block) -> Block:
        return Block([tf.convert_to_tensor(leaf) for leaf in block.leaves], block.steps, block.batch_size)

    # Programs

    def forget(self) -> None:
        """Drops every traced step: the model computes in another precision."""
        self._steps.clear()

    def step(self, kind: str, feed: Feed, block: Block, *, quiet: bool = False, compiled: str = "") -> Step:
        """Returns the traced step of a kind ("train", "test", "predict") for batches like those of `block`.

        Args:
            kind: Which step of the model.
            feed: Where the block came from.
            block: A block of it.
            quiet: Whether random layers are turned off, to compare numbers.
            compiled: What XLA compiles of it: "whole", "parts" or "". The number of rows is fixed then: inside a loop,
                XLA cannot compile the gradient of a broadcast over a number of rows that it does not know.
        """
        specs = feed.specs or [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in block.leaves]
        if compiled:
            specs = [tf.TensorSpec([block.batch_size, *spec.shape[1:]], spec.dtype) for spec in specs]
        key = (kind, quiet, compiled, repr(feed.structure), tuple(specs))
        if key not in self._steps:
            function = self.host.step_function(kind)

            def run(*leaves: Any) -> Any:
                return function(assemble(feed.structure, leaves))

            with self._tracing, without_randomness(self.model) if quiet else nullcontext():
                self._steps[key] = Step(run, specs, compiled=compiled)
        return self._steps[key]

    def program(self, kind: str, plan: str, steps: int, feed: Feed, block: Block, *, quiet: bool = False) -> Program:
        """Returns a program of `plan` for blocks like `block`; nothing of it is compiled yet."""
        compiled = "whole" if plan.startswith("xla") else "parts" if plan == "clusters" else ""
        step = self.step(kind, feed, block, quiet=quiet, compiled=compiled)
        return Program(plan, step, steps, block.batch_size)

    def compiled_plans(self, kind: str, feed: Feed, block: Block) -> tuple[str, ...]:
        """Returns the plans that must be compiled, the likeliest first."""
        if not self.can_loop(kind, feed, block):
            return ()
        if found := self.blockers(kind, feed, block):  # XLA may still compile parts of the step
            return () if any(blocker.is_on_the_host for blocker in found) else ("clusters",)
        # On a CPU, a convolution in a compiled loop runs on one thread.
        slow_loop = self._on_cpu and self.step(kind, feed, block).has_convolutions()
        return ("xla", "xla-loop") if slow_loop else ("xla-loop", "xla")

    @property
    def is_deterministic(self) -> bool:
        """Whether operations are to give equal bits in every run."""
        return bool(is_op_determinism_enabled())

    def can_loop(self, kind: str, feed: Feed, block: Block) -> bool:
        return feed.can_stack and self.step(kind, feed, block).can_loop()

    def blockers(self, kind: str, feed: Feed, block: Block) -> list[Blocker]:
        """Returns the operations of the step that XLA is known not to compile."""
        return blockers(self.step(kind, feed, block).concrete, flatten_layers(self.model))

    def shadow_bytes(self, kind: str, feed: Feed, block: Block) -> int:
        """Returns what the shadow state for one comparison takes, in bytes."""
        return 3 * sum(_bytes(variable) for variable in self.step(kind, feed, block).variables)

    def predict_batch(self, feed: Feed, block: Block) -> Any:
        """Returns the model's outputs for a batch; one program serves every number of rows."""
        return self.step("predict", feed, block).concrete(*block.leaves)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Returns the outputs of the batches one after another, as an array where they are dense."""
        whole = parts[0] if len(parts) == 1 else tf.concat(list(parts), axis=0)
        return whole.numpy() if isinstance(whole, tf.Tensor) else whole

    def runs_block(self, program: Program, block: Block) -> bool:
        return program.batch_size == block.batch_size or (program.plan == "graph" and block.steps == 1)

    def wait(self, logs: Any) -> None:
        """Waits until the device has finished."""
        for leaf in tf.nest.flatten(logs):
            if hasattr(leaf, "numpy"):
                leaf.numpy()
                return

    def pull(self) -> None:
        """Writes the state into the model; TensorFlow's programs write it themselves."""

    @contextmanager
    def rehearsal(self, feed: Feed, block: Block) -> Iterator[Callable[[Block], Any]]:
        """Gives a function that runs a plain training step on copies of the state, and returns its logs."""
        program = self.program("train", self.baseline, 1, feed, block)
        copies = shadow_copies(program.step.variables)
        yield lambda batch: program.on_shadow(program.step.variables, copies, batch)

    # Compiling in the background

    def prepare_shadow(self, kind: str, feed: Feed, block: Block) -> list[Any]:
        """Returns copies of the state as it is now."""
        return shadow_copies(self.step(kind, feed, block).variables)

    def compile_on_shadow(self, trial: ShadowTrial, start: list[Any], stopped: Stop) -> tuple[Program, ShadowResult]:
        """Compiles a plan, compares its numbers with the plain graph's and times both, all on shadow state.

        Args:
            trial: What is tried.
            start: The state to begin from.
            stopped: Says whether to give up; asked between two compilations.

        Raises:
            XlaUnsupportedError: XLA cannot compile an operation of the step.
            InterruptedError: It was to give up.
        """
        kind, plan, steps, feed, block = trial.made_of
        random = trial.random
        head, _ = block.split(min(4, block.steps))
        began = perf_counter()
        variables = self.step(kind, feed, block).variables
        program = self.program(kind, plan, steps, feed, block)
        give_up_if(stopped)
        try:
            _run_on_copies(program, variables, start, head)
            seconds = perf_counter() - began
            if not trial.check:
                return program, ShadowResult(seconds, 0.0, 0.0)
            give_up_if(stopped)
            checked = self.program(kind, plan, steps, feed, block, quiet=True) if random else program
            plain = self.program(kind, "graph-loop", steps, feed, block, quiet=random)
            give_up_if(stopped)
            mine, first = _run_on_copies(checked, variables, start, head)
            theirs, _ = _run_on_copies(plain, variables, start, head)
            nudged, _ = _run_on_copies(plain, variables, start, head, nudge=NUDGE)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError) as error:
            raise XlaUnsupportedError(blocker_in(str(error), flatten_layers(self.model))) from error
        paired, nudged = (_in_order_of(checked, plain, values) for values in (theirs, nudged))
        gap = relative_difference(*([v.numpy() for v in values] for values in (paired, mine, first, nudged)))
        give_up_if(stopped)
        head, _ = block.split(min(trial.timed, block.steps))
        ratio = step_ratio(
            lambda: self.wait(checked.on_shadow(checked.step.variables, mine, head)),
            lambda: self.wait(plain.on_shadow(plain.step.variables, theirs, head)),
        )
        return program, ShadowResult(seconds, gap, ratio)


def _bytes(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def _run_on_copies(
    program: Program, variables: list[Any], values: list[Any], block: Block, nudge: float = 0.0
) -> tuple[list[Any], list[Any]]:
    """Runs a program on copies of `values`, which belong to `variables`; returns the copies after and before.

    With `nudge`, the floating-point copies are that share larger before.
    """
    by_id = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    before = [by_id.get(id(variable), variable) for variable in program.step.variables]
    after = shadow_copies(before)
    for copy in after if nudge else ():
        if copy.dtype.is_floating:
            copy.assign(copy * (1 + nudge))
    program.on_shadow(program.step.variables, after, block)
    return after, before


def _in_order_of(wanted: Program, given: Program, values: list[Any]) -> list[Any]:
    """Returns the values of one program's variables in the order of another's."""
    by_id = {id(variable): value for variable, value in zip(given.step.variables, values, strict=True)}
    return [by_id[id(variable)] for variable in wanted.step.variables]
