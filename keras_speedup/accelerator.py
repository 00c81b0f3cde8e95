"""Ties one model to its engine, its plans and its data."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

from .engines import engine_for
from .engines.feed import ArrayFeed, flatten
from .flavor import FLAVOR, flatten_layers, is_random, keras
from .pipeline.arrays import array_source
from .plans import loop
from .plans.memory import PlanMemory
from .plans.meter import Meter
from .plans.mixed import PrecisionTuner
from .plans.tuner import Tuner
from .precision import check_precision, devices, needs_loss_scaling, scaled, scales_loss
from .report import SpeedupReport

_PACKAGES = ("keras", "tf_keras", "tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Choices:
    """What the user left to us, and what not.

    Attributes:
        jit_compile: "auto", True or False.
        steps_per_execution: "auto" or a number of steps.
        precision: None, "auto" or the name of a policy.
    """

    jit_compile: Any = "auto"
    steps_per_execution: Any = "auto"
    precision: str | None = None

    @classmethod
    def checked(cls, jit_compile: Any, steps_per_execution: Any, precision: Any = None) -> Choices:
        """Returns the choices, or raises a `ValueError` that says which is none."""
        jit_compile = "auto" if jit_compile is None else jit_compile  # None is Keras 2's word for "not said"
        steps_per_execution = "auto" if steps_per_execution is None else steps_per_execution
        if jit_compile not in ("auto", True, False):
            raise ValueError(f'jit_compile must be "auto", True or False, got {jit_compile!r}.')
        whole = isinstance(steps_per_execution, int) and not isinstance(steps_per_execution, bool)
        if steps_per_execution != "auto" and (not whole or steps_per_execution < 1):
            raise ValueError(f'steps_per_execution must be "auto" or a positive integer, got {steps_per_execution!r}.')
        if precision is not None:
            check_precision(precision)
        return cls(jit_compile, steps_per_execution, precision)

    @classmethod
    def of_plain(cls, model: Any) -> Choices:
        """Returns what a plain model was compiled with; Keras's defaults count as "auto"."""
        config = model.get_compile_config() or {}
        steps = config.get("steps_per_execution")
        return cls.checked(config.get("jit_compile", "auto"), "auto" if steps in (None, 1) else steps)

    def config(self) -> dict[str, Any]:
        # Layers are saved with the policy that they have.
        return {name: choice for name, choice in asdict(self).items() if name != "precision" or choice == "auto"}

    def for_keras(self) -> dict[str, Any]:
        """Returns what Keras itself is told; it runs the steps only where nothing can be accelerated."""
        unsaid = False if FLAVOR in ("tensorflow", "legacy") else "auto"
        jit = unsaid if self.jit_compile == "auto" else self.jit_compile
        steps = 1 if self.steps_per_execution == "auto" else self.steps_per_execution
        return {"jit_compile": jit, "steps_per_execution": steps}


class Accelerator:
    """Runs `fit`, `evaluate` and `predict` of one model since it was compiled.

    Args:
        model: The model.
        choices: What is left to the accelerator.
    """

    def __init__(self, model: Any, choices: Choices):
        self.model, self.choices = model, choices
        self.meter = Meter()
        self._engine: Any = None
        self._tuners: dict[str, Tuner] = {}
        self._trained: Tuner | None = None
        self._rates: list[float] = []
        self._notes: list[str] = []
        self._skipped = 0
        self._mixed = PrecisionTuner(model) if choices.precision == "auto" else None

    def reason_not_to(self) -> str:
        """Returns why Keras must run the steps itself, or an empty string; the report says so too."""
        reason = ""
        strategy = getattr(self.model, "distribute_strategy", None) if FLAVOR in ("tensorflow", "legacy") else None
        if self.model.run_eagerly:
            reason = "run_eagerly=True: nothing can be accelerated"
        elif strategy is not None and strategy.num_replicas_in_sync > 1:
            reason = f"{type(strategy).__name__} runs the steps on {strategy.num_replicas_in_sync} replicas"
        elif _overrides(self.model, ("make_train_function", "make_test_function", "make_predict_function")):
            reason = "the model makes its own train_function: it is run as it is"
        if reason and reason not in self._notes:
            self._notes.append(reason)
        return reason

    def fit(self, given: Any) -> None:
        """Trains as `keras.Model.fit` does.

        Args:
            given: That method's arguments, each under its name.
        """
        engine = self._ready()
        host = engine.host
        host.check_compiled("fit")
        _check_batch_size(given.batch_size)
        if needs_loss_scaling(self.model):
            self.model.optimizer = scaled(self.model.optimizer)
        epochs, steps_per_epoch = host.max_epochs(given.epochs), host.max_steps(given.steps_per_epoch)
        data, validation_data = (given.x, given.y, given.sample_weight), given.validation_data
        if given.validation_split and validation_data is None:
            data, validation_data = host.split(data, validation_split=given.validation_split)
        how = {"shuffle": given.shuffle, "class_weight": given.class_weight, **_workers(given)}
        feed = self._feed(*data, batch_size=given.batch_size, steps_per_epoch=steps_per_epoch, **how)
        valid_feed: list[Any] = []

        def validate(epoch: int) -> dict[str, Any]:
            if validation_data is None or not host.should_validate(epoch, given.validation_freq):
                return {}
            steps = given.validation_steps
            if not valid_feed:
                parts, size = host.unpack(validation_data), given.validation_batch_size or given.batch_size
                valid_feed.append(self._feed(*parts, batch_size=size, steps_per_epoch=steps, **_workers(given)))
            tuner, left = self._tuner("test", valid_feed[0]), epochs - epoch
            results = loop.evaluate(session, tuner, valid_feed[0], listeners, steps=steps, times=left)
            return {f"val_{name}": value for name, value in results.items()}

        def after_epoch() -> None:
            tuners = self._tuners.values()
            if self._mixed and all(tuner.is_idle for tuner in tuners) and self._mixed.moves(trained):
                engine.forget()
                for tuner in tuners:
                    tuner.restart()

        session = loop.Session(self.model, engine, self.meter)
        listeners = self._listeners(given, steps_per_epoch or feed.num_batches, history=True, epochs=epochs)
        self.model.stop_training = False
        self._rates.clear()
        listeners.on_train_begin()
        first = host.first_epoch(given.initial_epoch, steps_per_epoch or feed.num_batches)
        trained, before = self._tuner("train", feed), self._updates()
        steps = loop.train(
            session,
            trained,
            feed,
            listeners,
            epochs=epochs,
            first=first,
            steps_per_epoch=steps_per_epoch,
            validate=validate,
            after_epoch=after_epoch,
            rates=self._rates,
        )
        self._skipped = self._overflows(steps, self._updates() - before)

    def evaluate(self, given: Any) -> Any:
        """Evaluates as `keras.Model.evaluate` does; see `fit` for the argument."""
        engine = self._ready()
        engine.host.check_compiled("evaluate")
        _check_batch_size(given.batch_size)
        steps = engine.host.max_steps(given.steps)
        data = given.x, given.y, given.sample_weight
        feed = self._feed(*data, batch_size=given.batch_size, steps_per_epoch=steps, **_workers(given))
        listeners = self._listeners(given, steps or feed.num_batches)
        session = loop.Session(self.model, engine, self.meter)
        results = loop.evaluate(session, self._tuner("test", feed), feed, listeners, steps=steps)
        return results if given.return_dict else engine.host.in_order(results)

    def predict(self, given: Any) -> Any:
        """Predicts as `keras.Model.predict` does; see `fit` for the argument."""
        engine = self._ready()
        _check_batch_size(given.batch_size)
        feed = self._feed(given.x, batch_size=given.batch_size, steps_per_epoch=given.steps, **_workers(given))
        listeners = self._listeners(given, given.steps or feed.num_batches)
        return loop.predict(loop.Session(self.model, engine, self.meter), feed, listeners, steps=given.steps)

    def report(self) -> SpeedupReport:
        tuner = self._trained
        if tuner is None:
            return SpeedupReport(flavor=FLAVOR, notes=tuple(self._notes))
        return SpeedupReport(
            flavor=FLAVOR,
            plan=tuner.plan,
            steps_per_call=int(tuner.best.program.steps) if tuner.best else 1,
            trials=tuple(tuner.trials),
            notes=(*self._notes, *tuner.notes, *self._precision_notes()),
            blockers=tuple(tuner.blockers),
            choosing_seconds=tuner.choosing_seconds,
            gain=tuner.gain,
            samples_per_second=tuple(self._rates),
        )

    # The parts

    def _listeners(self, given: Any, steps: int | None, *, epochs: int = 1, history: bool = False) -> Any:
        """Returns the list that tells callbacks, and Keras's own, of `steps` steps in each of the epochs."""
        if isinstance(given.callbacks, keras.callbacks.CallbackList):
            return given.callbacks
        verbose = self._engine.host.verbosity(given.verbose)
        how = {"verbose": verbose, "epochs": epochs, "steps": steps, "model": self.model}
        return keras.callbacks.CallbackList(given.callbacks, history, verbose != 0, **how)

    def _precision_notes(self) -> list[str]:
        skipped = f"loss scaling: {self._skipped} steps of the last fit overflowed float16 and changed nothing"
        return [*([self._mixed.reason] if self._mixed else []), *([skipped] if self._skipped else [])]

    def _overflows(self, steps: int, updates: int) -> int:
        inner = getattr(self.model.optimizer, "inner_optimizer", None)
        is_counted = scales_loss(self.model.optimizer) and not getattr(inner, "gradient_accumulation_steps", None)
        return max(0, steps - updates) if updates and is_counted else 0

    def _updates(self) -> int:
        """Returns how often the optimizer has changed the weights; on Keras 3, a step that overflows does not count."""
        # Keras 3.7 counts in the inner optimizer of a LossScaleOptimizer alone.
        inner: Any = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        count: Any = getattr(inner, "iterations", None)
        return int(count.numpy() if hasattr(count, "numpy") else count or 0)

    def _ready(self) -> Any:
        if self._engine is None:
            self._engine = engine_for(self.model)
        return self._engine

    def _tuner(self, kind: str, feed: Any) -> Tuner:
        """Returns the tuner for a step on data of this shape; it goes on where an earlier call ended."""
        data = _shape_of(feed)
        key = f"{kind} {data}"
        if key not in self._tuners:
            choices, memory = self.choices, PlanMemory([kind, *self._facts(), data])
            self._tuners[key] = Tuner(self._engine, kind, choices.jit_compile, choices.steps_per_execution, memory)
        tuner = self._tuners[key]
        tuner.random = any(is_random(layer) for layer in flatten_layers(self.model))
        if kind == "train":
            self._trained = tuner
        return tuner

    def _facts(self) -> list[Any]:
        """Returns what the choice of a plan depends on, besides the data."""
        layers = [(type(layer).__name__, _config(layer)) for layer in flatten_layers(self.model)]
        shapes = [tuple(weight.shape) for weight in self.model.weights]
        optimizer = type(self.model.optimizer).__name__
        machine = [platform.machine(), platform.processor(), os.cpu_count(), *map(repr, devices())]
        versions = [(name, getattr(sys.modules.get(name), "__version__", "")) for name in _PACKAGES]
        return [FLAVOR, layers, shapes, optimizer, str(self.choices), machine, versions]

    def _feed(self, x: Any, y: Any = None, sample_weight: Any = None, **how: Any) -> Any:
        source = array_source(x) if y is None and sample_weight is None and not how.get("class_weight") else None
        if source is not None:
            structure, leaves = flatten(source.arrays)
            return ArrayFeed(leaves, structure, source.batch_size, source.last_batch == "drop", source.epoch_order)
        return self._engine.host.feed(x, y, sample_weight, **how)


def _shape_of(feed: Any) -> list[Any]:
    """Returns what batches of a feed look like, and how many there are."""
    leaves = [(str(leaf.dtype), leaf.shape[1:]) for leaf in getattr(feed, "leaves", ())]
    return [str(feed.structure), str(feed.specs), leaves, getattr(feed, "batch_size", None), feed.num_batches]


def _config(layer: Any) -> Any:
    try:
        return layer.get_config()
    except Exception:  # a layer of the user's that cannot be saved has none
        return None


def _workers(given: Any) -> dict[str, Any]:
    """Returns how a `Sequence` of Keras 2 is read."""
    names = ("max_queue_size", "workers", "use_multiprocessing")
    return {name: getattr(given, name) for name in names if hasattr(given, name)}


def _check_batch_size(batch_size: Any) -> None:
    whole = hasattr(batch_size, "__index__") and not isinstance(batch_size, bool)
    if batch_size is not None and (not whole or batch_size < 1):
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")


def _overrides(model: Any, names: tuple[str, ...]) -> bool:
    """Returns whether a class of the user's own defines one of the methods."""
    owners = [next(cls for cls in type(model).__mro__ if name in vars(cls)) for name in names]
    return any(owner.__module__.split(".")[0] not in ("keras", "tf_keras", "keras_speedup") for owner in owners)
