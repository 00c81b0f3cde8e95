"""Runs a model's steps on PyTorch, one at a time as Keras does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..flavor import keras
from .blockers import Blocker
from .feed import Block, Feed, assemble


class TorchProgram:
    """One step a call, as `train_step` runs it.

    Attributes:
        plan: The plan's name.
        steps: The most steps that one call runs.
        batch_size: None: batches of any size are run.
    """

    batch_size = None

    def __init__(self, plan: str, steps: int, function: Any, structure: Any):
        self.plan, self.steps, self._function, self._structure = plan, steps, function, structure

    def run(self, block: Block) -> Any:
        logs = None
        for index in range(block.steps):
            part = slice(index * block.batch_size, (index + 1) * block.batch_size)
            leaves = block.leaves if block.steps == 1 else [leaf[part] for leaf in block.leaves]
            logs = self._function(assemble(self._structure, leaves))
        return logs


class TorchEngine:
    """Keras 3 on PyTorch.

    Args:
        model: A compiled model.
        host: What the loop needs of the Keras around the model.
    """

    baseline = "eager"
    loop_plan = "eager-loop"
    explicit_plan = "eager-loop"
    is_deterministic = False

    def __init__(self, model: Any, host: Any):
        self.model, self.host = model, host
        self._device = keras.src.backend.torch.core.get_device()  # no public name in Keras 3.0 to 3.15

    def convert(self, block: Block) -> Block:
        arrays = [np.asarray(leaf) for leaf in block.leaves]
        # PyTorch cannot share memory that must not be written, such as a TensorFlow tensor's.
        writable = [array if array.flags.writeable else array.copy() for array in arrays]
        leaves = [torch.as_tensor(array).to(self._device) for array in writable]
        return Block(leaves, block.steps, block.batch_size)

    def program(self, kind: str, plan: str, steps: int, feed: Feed, block: Block) -> TorchProgram:
        batch = assemble(feed.structure, [leaf[: block.batch_size] for leaf in block.leaves])
        if kind != "predict":
            self.model._symbolic_build(data_batch=batch)  # private in Keras 3.0 to 3.15
        function = self.host.step_function(kind)
        train = kind == "train"

        def step(data: Any) -> Any:
            if self.model.training is not train:
                self.model.train(train)
            if train:
                return function(data)
            with torch.no_grad():
                return function(data)

        return TorchProgram(plan, steps, step, feed.structure)

    def compiled_plans(self, kind: str, feed: Feed, block: Block) -> tuple[str, ...]:
        return ()

    def runs_block(self, program: TorchProgram, block: Block) -> bool:
        return True

    def can_loop(self, kind: str, feed: Feed, block: Block) -> bool:
        return feed.can_stack

    def blockers(self, kind: str, feed: Feed, block: Block) -> list[Blocker]:
        return []

    def shadow_bytes(self, kind: str, feed: Feed, block: Block) -> int:
        return 0

    def predict_batch(self, feed: Feed, block: Block) -> Any:
        return self.program("predict", self.baseline, 1, feed, block).run(block)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])

    def wait(self, logs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def pull(self) -> None:
        """Writes the state into the model; PyTorch's steps write it themselves."""

    def forget(self) -> None:
        """Drops every traced step; nothing is traced."""

    @contextmanager
    def rehearsal(self, feed: Feed, block: Block) -> Iterator[Callable[[Block], Any]]:
        """Gives a function that runs a training step and returns its logs; the state is put back in the end."""
        program = self.program("train", self.baseline, 1, feed, block)
        model = self.model
        before = [
            (variable, variable.value.detach().clone())
            for variable in (*model.variables, *model.optimizer.variables, *model.metrics_variables)
        ]
        try:
            yield program.run
        finally:
            for variable, value in before:
                variable.assign(value)
