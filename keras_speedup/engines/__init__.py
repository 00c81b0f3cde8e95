"""How a plan runs on each flavour; one engine for a model."""

from __future__ import annotations

from typing import Any

from ..flavor import FLAVOR


def engine_for(model: Any) -> Any:
    """Returns the engine of this process's flavour, for a model."""
    if FLAVOR == "tensorflow":
        from .keras3 import Keras3
        from .tensorflow import TensorFlowEngine

        return TensorFlowEngine(model, Keras3(model))
    if FLAVOR == "legacy":
        from .legacy import Keras2
        from .tensorflow import TensorFlowEngine

        return TensorFlowEngine(model, Keras2(model))
    from .keras3 import Keras3

    if FLAVOR == "jax":
        from .jax import JaxEngine

        return JaxEngine(model, Keras3(model))
    from .torch import TorchEngine

    return TorchEngine(model, Keras3(model))
