"""The training, evaluation and prediction loops: Keras's own events around calls of one or many steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from ..engines.events import names_of_those, overrides_batch_hook
from ..engines.feed import Cursor, assemble, flatten
from ..errors import SpeedupWarning
from .meter import Meter
from .tuner import Tuner


@dataclass
class Session:
    """What the loops of one model share.

    Attributes:
        model: The model.
        engine: Runs its steps.
        meter: The clock that callbacks read.
    """

    model: Any
    engine: Any
    meter: Meter


class _Pass:
    """Passes over a feed, cut into epochs of `steps` batches where that is given.

    Args:
        session: Whose engine runs the steps.
        feed: What to pass over.
        steps: Batches in an epoch; None for a whole pass.
        epochs: How many epochs there will be at the most.
    """

    def __init__(self, session: Session, feed: Any, steps: int | None, epochs: int = 1):
        self.feed, self.steps = feed, steps
        self._convert, self._epochs = session.engine.convert, epochs
        self._cursor: Cursor | None = None
        self._at = self._seen = 0

    def begin(self) -> None:
        if self._cursor is None or self._cursor.is_used_up:
            self._restart()
        self._at = 0

    def take(self, wanted: int) -> Any:
        left = None if self.steps is None else self.steps - self._at
        if left == 0:
            return None
        block = self._next(wanted, left)
        if block is None and self._at == 0 and self._seen and left is not None:
            self.begin()  # the last epoch ended where the data did
            block = self._next(wanted, left)
        if block is None:
            if left is not None and self._at:
                warnings.warn(
                    f"The data ended after {self._at} of the {self.steps} steps of an epoch. Give at least "
                    "steps_per_epoch * epochs batches; `.repeat()` makes a dataset go on.",
                    SpeedupWarning,
                    stacklevel=2,
                )
            return None
        self._at += block.steps
        self._seen += block.steps
        return block

    def end(self) -> None:
        self.feed.end_epoch()
        self._epochs -= 1

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None

    def _next(self, wanted: int, left: int | None) -> Any:
        assert self._cursor is not None
        return self._cursor.take(wanted if left is None else min(wanted, left), ahead=wanted)

    def _restart(self) -> None:
        self.close()
        self._cursor = Cursor(self.feed, self._convert, max(1, self._epochs))
        self._seen = 0


def train(
    session: Session,
    tuner: Tuner,
    feed: Any,
    callbacks: Any,
    *,
    epochs: int,
    first: tuple[int, int],
    steps_per_epoch: int | None,
    validate: Callable[[int], dict[str, Any]],
    after_epoch: Callable[[], None],
    rates: list[float],
) -> int:
    """Trains as `fit` does; see there for the arguments. Returns the number of steps.

    Args:
        session: The model and what it shares.
        tuner: Chooses the plans.
        feed: The training data.
        callbacks: A `CallbackList`, after `on_train_begin`.
        epochs: Index of the epoch to end before.
        first: The epoch and the step to begin at.
        steps_per_epoch: Batches in an epoch, where it is not one pass.
        validate: Returns the logs of validation after an epoch.
        after_epoch: Called between two epochs.
        rates: Gets the samples/s of each epoch.
    """
    model, host, meter = session.model, session.engine.host, session.meter
    logs: dict[str, Any] | None = None
    data = _Pass(session, feed, steps_per_epoch, epochs - first[0])
    boundaries = _boundaries(callbacks)
    epoch_steps = steps_per_epoch or feed.num_batches
    total = 0
    try:
        for epoch in range(first[0], epochs):
            host.reset_metrics()
            meter.start_epoch(epoch)
            callbacks.on_epoch_begin(epoch)
            data.begin()
            step = first[1] if epoch == first[0] else 0
            if epoch == first[0]:
                every = names_of_those(callbacks.callbacks, "train")
                left = None if epoch_steps is None else (epochs - epoch) * epoch_steps - step
                tuner.begin(every_batch=every, epoch_steps=_whole(feed, epoch_steps), steps_left=left)
            step, last = _epoch(session, tuner, data, callbacks, step, boundaries, total)
            total += step
            session.engine.pull()
            if last is None and logs is None:
                raise ValueError("The training data is empty: expected at least one batch, got none.")
            if last is None:
                warnings.warn(f"The data is used up: training ends before epoch {epoch}.", SpeedupWarning, stacklevel=2)
                break
            logs = host.result(last)
            rates.append(meter.samples / max(meter.seconds, 1e-9))
            data.end()
            logs.update(validate(epoch))
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
            if epoch + 1 < epochs:
                after_epoch()
        if epochs > 0:
            host.finish()
    except BaseException:
        for callback in callbacks.callbacks:  # Keras has no event for it
            getattr(callback, "on_train_error", lambda: None)()
        raise
    finally:
        session.engine.pull()
        data.close()
        tuner.finish()
    callbacks.on_train_end(logs=logs)
    return total


def _epoch(
    session: Session, tuner: Tuner, data: _Pass, callbacks: Any, step: int, boundaries: list[int], total: int
) -> tuple[int, Any]:
    """Trains for one epoch; returns the number of its steps and the last logs."""
    model, meter = session.model, session.meter
    listening = any(overrides_batch_hook(callback, "train") for callback in callbacks.callbacks)
    logs = None
    while not model.stop_training or step == 0:
        wanted = tuner.steps_wanted()
        for boundary in boundaries:
            if total + step < boundary < total + step + wanted:
                wanted = boundary - total - step
        began = perf_counter()
        block = data.take(wanted)
        if block is None:
            break
        waited = perf_counter() - began
        if listening:
            callbacks.on_train_batch_begin(step)
        called = perf_counter()
        logs, record = tuner.run(data.feed, block)
        ended = perf_counter()
        seconds = ended - called - record.compile_seconds  # with what the loop itself takes
        meter.calls.append(replace(record, seconds=seconds, input_wait_seconds=waited))
        step += block.steps
        if listening:
            if tuner.every_batch:
                session.engine.pull()
            callbacks.on_train_batch_end(step - 1, logs)
        meter.callback_seconds += (called - began - waited) + (perf_counter() - ended)
        if model.stop_training:
            break
    if logs is not None:  # what the device still had to do belongs to the epoch
        began = perf_counter()
        session.engine.wait(logs)
        meter.calls[-1] = replace(meter.calls[-1], seconds=meter.calls[-1].seconds + perf_counter() - began)
    return step, logs


def evaluate(
    session: Session, tuner: Tuner, feed: Any, callbacks: Any, *, steps: int | None, times: int = 1
) -> dict[str, Any]:
    """Evaluates as `evaluate` does; returns the metrics.

    Args:
        session: The model and what it shares.
        tuner: Chooses the plans.
        feed: The data.
        callbacks: A `CallbackList`.
        steps: Batches, where it is not one pass.
        times: How often the data will be evaluated, this time included: what is compiled pays in all of them.
    """
    host = session.engine.host
    callbacks.on_test_begin()
    host.reset_metrics()
    epoch_steps = steps or feed.num_batches
    tuner.begin(
        every_batch=names_of_those(callbacks.callbacks, "test"),
        epoch_steps=_whole(feed, epoch_steps),
        steps_left=None if epoch_steps is None else epoch_steps * times,
    )
    logs: Any = None

    def run(block: Any) -> Any:
        nonlocal logs
        logs, _ = tuner.run(feed, block)
        return logs

    _pass_over(session, feed, callbacks, "test", steps, run, tuner.steps_wanted)
    result = host.result(logs)
    callbacks.on_test_end(result)
    return result


def predict(session: Session, feed: Any, callbacks: Any, *, steps: int | None) -> Any:
    """Predicts as `predict` does; returns NumPy arrays in the structure of the model's outputs."""
    engine, parts = session.engine, []
    structure: Any = None

    def run(block: Any) -> dict[str, Any]:
        nonlocal structure
        outputs = engine.predict_batch(feed, block)
        structure, leaves = flatten(outputs)
        parts.append(leaves)
        return {"outputs": outputs}

    callbacks.on_predict_begin()
    _pass_over(session, feed, callbacks, "predict", steps, run)
    callbacks.on_predict_end()
    return assemble(structure, [engine.concatenate(column) for column in zip(*parts, strict=True)])


#: By kind of step: the attribute of the model that ends a pass early, and what is done with the data.
_PASSES = {"test": ("stop_evaluating", "evaluate"), "predict": ("stop_predicting", "predict")}


def _pass_over(
    session: Session,
    feed: Any,
    callbacks: Any,
    kind: str,
    steps: int | None,
    run: Callable[[Any], Any],
    wanted: Callable[[], int] = lambda: 1,
) -> None:
    """Runs every block of a pass that does not train, with Keras's events around each call."""
    stops, verb = _PASSES[kind]
    setattr(session.model, stops, False)
    listening = any(overrides_batch_hook(callback, kind) for callback in callbacks.callbacks)
    data = _Pass(session, feed, steps)
    data.begin()
    step = 0
    try:
        while (block := data.take(wanted())) is not None:
            if listening:
                getattr(callbacks, f"on_{kind}_batch_begin")(step)
            logs = run(block)
            step += block.steps
            if listening:
                getattr(callbacks, f"on_{kind}_batch_end")(step - 1, logs)
            if getattr(session.model, stops, False):
                break
    finally:
        session.engine.pull()
        data.close()
        feed.end_epoch()
    if step == 0:
        raise ValueError(f"The data to {verb} is empty: expected at least one batch, got none.")


def _whole(feed: Any, steps: int | None) -> int | None:
    """Returns the batches of an epoch that are whole."""
    rows, size = getattr(feed, "rows", None), getattr(feed, "batch_size", None)
    if steps is not None and rows is not None and size and steps == feed.num_batches:
        return int(rows // size)
    return steps


def _boundaries(callbacks: Any) -> list[int]:
    """Returns the steps of the training at which a call must end, as callbacks asked."""
    found: set[int] = set()
    for callback in callbacks.callbacks:
        found.update(getattr(callback, "step_boundaries", ()) or ())
    return sorted(found)
