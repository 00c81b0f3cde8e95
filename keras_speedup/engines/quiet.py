"""A model with its randomness off, to compare the numbers of two plans that draw different random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..flavor import flatten_layers, is_random
from .traces import calls_replaced


def without_randomness(model: Any) -> AbstractContextManager[None]:
    """Calls the innermost random layers as outside training, while a step is traced."""
    random = [layer for layer in flatten_layers(model) if is_random(layer)]
    innermost = [layer for layer in random if sum(map(is_random, flatten_layers(layer))) == 1]
    return calls_replaced(innermost, _outside_training)


def _outside_training(layer: Any, call: Any) -> Any:
    return lambda *args, **kwargs: call(*args, **{**kwargs, "training": False})
