"""Which callbacks must see every batch, so that several steps may not be run in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..flavor import keras

_HOOKS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def overrides_batch_hook(callback: Any, kind: str) -> bool:
    """Returns whether a callback does anything at a batch."""
    return any(_owner(callback, hook) is not keras.callbacks.Callback for hook in _HOOKS[kind])


def needs_every_batch(callback: Any, kind: str) -> bool:
    """Returns whether a callback must be called for each batch and not once for several.

    A callback of a user's own says that it need not by an attribute `every_batch = False`.
    """
    if not getattr(callback, "every_batch", True) or not overrides_batch_hook(callback, kind):
        return False
    return not all(_is_safe(callback, _owner(callback, hook)) for hook in _HOOKS[kind])


def names_of_those(callbacks: Iterable[Any], kind: str) -> list[str]:
    """Returns the class names of the callbacks that need every batch."""
    return [type(callback).__name__ for callback in callbacks if needs_every_batch(callback, kind)]


def _owner(callback: Any, hook: str) -> Any:
    """Returns the class that defines a hook, or the callback itself where the instance does."""
    if hook in vars(callback):
        return callback
    return next(cls for cls in type(callback).__mro__ if hook in vars(cls))


def _is_safe(callback: Any, owner: Any) -> bool:
    known = keras.callbacks
    if owner in (known.Callback, known.ProgbarLogger, known.History):
        return True
    if owner in (known.ModelCheckpoint, known.BackupAndRestore):
        return bool(callback.save_freq == "epoch")
    if owner is known.TensorBoard:
        # _should_trace is private in Keras 2.15 to 3.15: whether a profile of certain batches was asked for.
        return bool(callback.update_freq == "epoch" and not getattr(callback, "_should_trace", True))
    return False
