"""A model with its randomness off, to compare the numbers of two plans that draw different random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..flavor import flatten_layers, is_random


@contextmanager
def without_randomness(model: Any) -> Iterator[None]:
    """Calls the innermost random layers as outside training, while a step is traced."""
    random = [layer for layer in flatten_layers(model) if is_random(layer)]
    innermost = [layer for layer in random if sum(map(is_random, flatten_layers(layer))) == 1]
    for layer in innermost:
        vars(layer)["call"] = _outside_training(layer.call)
    try:
        yield
    finally:
        for layer in innermost:
            del vars(layer)["call"]


def _outside_training(call: Any) -> Any:
    def quiet(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{**kwargs, "training": False})

    return quiet
