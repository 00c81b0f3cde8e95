"""What keras_speedup raises and warns with, besides Python's own."""

from __future__ import annotations


class SpeedupWarning(UserWarning):
    """A warning of keras_speedup; filter it with `warnings.simplefilter("ignore", keras_speedup.errors.SpeedupWarning)`."""


class XlaUnsupportedError(ValueError):
    """XLA cannot compile an operation of the model; the message names the operation and the layer."""
