"""What keras_speedup raises and warns with, besides Python's own."""

from __future__ import annotations

from typing import Any


class SpeedupWarning(UserWarning):
    """A warning of keras_speedup; `warnings.simplefilter("ignore", SpeedupWarning)` turns them off."""


class XlaUnsupportedError(ValueError):
    """XLA cannot compile an operation of the model.

    Args:
        blocker: The operation, with its layer.
    """

    def __init__(self, blocker: Any):
        self.blocker = blocker
        super().__init__(
            f'XLA cannot compile {blocker}. Use jit_compile="auto" to train without XLA, or move the layer into the '
            "DataPipeline."
        )
