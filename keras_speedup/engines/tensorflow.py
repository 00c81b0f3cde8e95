"""Runs a model's steps on TensorFlow: plain graphs, loops of K steps, and both compiled by XLA."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from ..errors import XlaUnsupportedError
from ..flavor import flatten_layers
from .blockers import Blocker, blocker_in, blockers
from .feed import Block, Feed, assemble
from .graphs import Program, Step, shadow_copies, tf
from .quiet import without_randomness
from .shadow import ShadowResult, relative_difference


class TensorFlowEngine:
    """Keras 3 or Keras 2 on TensorFlow.

    Args:
        model: A compiled model.
        host: What the loop needs of the Keras around the model.
    """

    baseline = "graph"
    loop_plan = "graph-loop"
    compiled_plans = ("xla-loop", "xla")

    def __init__(self, model: Any, host: Any):
        self.model, self.host = model, host
        self._steps: dict[Any, Step] = {}
        self._tracing = threading.Lock()

    # Data

    def convert(self, block: Block) -> Block:
        return Block([tf.convert_to_tensor(leaf) for leaf in block.leaves], block.steps, block.batch_size)

    # Programs

    def forget(self) -> None:
        """Drops every traced step: the model was compiled anew."""
        self._steps.clear()

    def step(self, kind: str, feed: Feed, block: Block, *, quiet: bool = False) -> Step:
        """Returns the traced step of a kind ("train", "test", "predict") for batches like those of `block`.

        Args:
            kind: Which step of the model.
            feed: Where the block came from.
            block: A block of it.
            quiet: Whether random layers are turned off, to compare numbers.
        """
        specs = feed.specs or [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in block.leaves]
        key = (kind, quiet, repr(feed.structure), tuple(specs))
        if key not in self._steps:
            function = self.host.step_function(kind)

            def run(*leaves: Any) -> Any:
                return function(assemble(feed.structure, leaves))

            with self._tracing, without_randomness(self.model) if quiet else nullcontext():
                self._steps[key] = Step(run, specs)
        return self._steps[key]

    def program(self, kind: str, plan: str, steps: int, feed: Feed, block: Block, *, quiet: bool = False) -> Program:
        """Returns a program of `plan` for blocks like `block`; nothing of it is compiled yet."""
        return Program(plan, self.step(kind, feed, block, quiet=quiet), steps, block.batch_size)

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

    # Compiling in the background

    def prepare_shadow(self, kind: str, feed: Feed, block: Block) -> list[Any]:
        """Returns copies of the state as it is now."""
        return shadow_copies(self.step(kind, feed, block).variables)

    def compile_on_shadow(
        self, kind: str, program: Program, feed: Feed, block: Block, start: list[Any], *, random: bool
    ) -> ShadowResult:
        """Compiles a program, compares its numbers with the plain graph's and times both, all on shadow state.

        Raises:
            XlaUnsupportedError: XLA cannot compile an operation of the step.
        """
        head, _ = block.split(min(4, block.steps))
        began = perf_counter()
        try:
            variables = program.step.variables
            program.on_shadow(variables, shadow_copies(start), head)
            seconds = perf_counter() - began
            checked = self.program(kind, program.plan, program.steps, feed, block, quiet=True) if random else program
            plain = self.program(kind, "graph-loop", program.steps, feed, block, quiet=random)
            inputs = checked.step.variables
            first = _matching(inputs, variables, start)
            mine, theirs = shadow_copies(first), shadow_copies(first)
            checked.on_shadow(inputs, mine, head)
            plain.on_shadow(inputs, theirs, head)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError) as error:
            raise XlaUnsupportedError(blocker_in(str(error), flatten_layers(self.model))) from error
        gap = relative_difference(*([v.numpy() for v in values] for values in (theirs, mine, first)))
        # Timed at the training's own priority, which this thread gave up: a compiled loop runs in the calling thread.
        with ThreadPoolExecutor(1) as pool:
            ratio = pool.submit(_ratio, (checked, inputs, mine), (plain, inputs, theirs), head).result()
        return ShadowResult(seconds, gap, ratio)


def _bytes(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def _matching(wanted: list[Any], variables: list[Any], values: list[Any]) -> list[Any]:
    """Returns, for each wanted variable, the value that belongs to it, or a copy of it as it is now."""
    by_id = {id(variable): value for variable, value in zip(variables, values, strict=True)}
    return [by_id[id(v)] if id(v) in by_id else shadow_copies([v])[0] for v in wanted]


def _ratio(one: tuple[Any, ...], other: tuple[Any, ...], block: Block) -> float:
    """Returns the least time of one program over that of another, each run four times in turn."""

    def timed(program: Program, variables: list[Any], shadows: list[Any]) -> float:
        began = perf_counter()
        logs = program.on_shadow(variables, shadows, block)
        for leaf in tf.nest.flatten(logs):
            leaf.numpy()
        return perf_counter() - began

    times = [(timed(*one), timed(*other)) for _ in range(4)]
    return min(first for first, _ in times) / min(second for _, second in times)
