"""Models that train faster: SpeedupModel, SpeedupSequential, speedup."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from . import heads
from .accelerator import Accelerator, Choices
from .flavor import KERAS_MAJOR, Functional, keras, require_this_keras
from .plans.meter import Meter
from .precision import take_policy
from .report import SpeedupReport

_register = keras.saving.register_keras_serializable


class _Accelerated:
    """What every accelerated model has; each method hands its work to the model's accelerator."""

    _speedup: Accelerator | None = None
    _float32_outputs = True
    _heads_settled = False
    _casts_outputs = False
    _speedup_inputs: Any = None

    # Training

    def compile(
        self,
        *args: Any,
        jit_compile: Any = "auto",
        steps_per_execution: Any = "auto",
        precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures the model for training, as Keras does; see `SpeedupModel` for the three named arguments."""
        choices = Choices.checked(jit_compile, steps_per_execution, precision)
        if precision not in (None, "auto"):
            self._take_policy(str(precision))
        super().compile(*args, **kwargs, **choices.for_keras())  # type: ignore[misc]
        self._speedup = Accelerator(self, choices)

    def get_compile_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_compile_config()  # type: ignore[misc]
        if config and self._speedup is not None:
            config.update(self._speedup.choices.config())
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:  # type: ignore[attr-defined]
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model; every argument is Keras's own."""
        accelerator = self._accelerator("fit")
        if accelerator.reason_not_to():
            return super().fit(*args, **kwargs)  # type: ignore[misc]
        accelerator.fit(_named("fit", args, kwargs))
        return self.history  # type: ignore[attr-defined]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model; every argument is Keras's own."""
        accelerator = self._accelerator("evaluate")
        if accelerator.reason_not_to() or "_use_cached_eval_dataset" in kwargs:
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]
        return accelerator.evaluate(_named("evaluate", args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts; every argument is Keras's own."""
        if self._speedup is None:
            self._speedup = Accelerator(self, Choices())
        if self._speedup.reason_not_to():
            return super().predict(*args, **kwargs)  # type: ignore[misc]
        return self._speedup.predict(_named("predict", args, kwargs))

    def _accelerator(self, method: str) -> Accelerator:
        if self._speedup is None:
            raise ValueError(
                f"You must call `compile()` before using the model, got `{method}()` of an uncompiled model."
            )
        return self._speedup

    # Outputs in float32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._heads_settled:
            self._settle_heads(args)
        outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return heads.cast_outputs(outputs) if self._casts_outputs else outputs

    def _take_policy(self, policy: str, keep: Collection[str] = ()) -> Callable[[], None]:
        """Puts the layers under a policy, and those of the outputs in float32; returns what undoes it."""
        undo = take_policy(self, policy, keep)
        self._heads_settled = False
        self._settle_known_heads()
        return undo

    def _settle_known_heads(self) -> None:
        """Settles the heads of a graph of layers, and of a model that has been called; others are when they are."""
        is_graph = isinstance(self, (Functional, keras.Sequential)) and self.built
        if is_graph or self._speedup_inputs is not None:
            self._settle_heads(() if is_graph else (self._speedup_inputs,))

    def _settle_heads(self, args: tuple[Any, ...] = ()) -> None:
        self._heads_settled = True
        if args:
            self._speedup_inputs = heads.input_specs(args[0])
        if self._float32_outputs and heads.computes_in_half(self):
            heads.make_outputs_float32(self, args[0] if args else None)
            self._casts_outputs = True

    # Results

    @property
    def speedup_report(self) -> SpeedupReport:
        """What was tried to train this model faster, what was kept, and what it gained."""
        return SpeedupReport() if self._speedup is None else self._speedup.report()

    @property
    def speedup_meter(self) -> Meter:
        """The clock of the current epoch, which callbacks read."""
        return Meter() if self._speedup is None else self._speedup.meter

    def to_keras(self) -> Any:
        """Returns a plain Keras model with the same weights, which loads without keras_speedup.

        Raises:
            ValueError: The model is subclassed and has not been called yet, or its `call` uses operations that
                Keras cannot record.
        """
        plain = _plain_twin(self)
        plain.set_weights(self.get_weights())  # type: ignore[attr-defined]
        return plain


@_register(package="keras_speedup")
class SpeedupModel(_Accelerated, keras.Model):  # type: ignore[misc]
    """A `keras.Model` that finds the fastest way to run its own training, while it trains.

    Subclass it as you would `keras.Model`, or make a functional model with `SpeedupModel(inputs, outputs)`. `fit`,
    `evaluate` and `predict` take Keras's arguments and give Keras's results.

    Args:
        *args: As for `keras.Model`.
        float32_outputs: Whether the layers that produce outputs compute in float32 under a mixed policy.
        **kwargs: As for `keras.Model`.

    `compile` takes Keras's arguments; two have a further value, which is their default, and one is new:
        jit_compile: `"auto"` compiles with XLA beside the training and moves over where that is measured faster and
            gives the same numbers. True compiles every step, or raises `XlaUnsupportedError` with the operation and
            the layer that XLA cannot compile; False never compiles.
        steps_per_execution: `"auto"` runs so many steps in one call that it takes about 0.3 seconds, and one step
            where a callback must see every batch. A number is taken as it is.
        precision: None, the default, leaves the numbers alone. "float32", "mixed_float16" or "mixed_bfloat16" puts the
            layers under that policy. `"auto"` runs a few of the training's own batches under a mixed policy, on copies
            of the weights between two epochs, and moves over where a step takes less than 95% of float32's time and
            the losses are within 5% of float32's; a layer that fails or overflows stays in float32. Keras 2 settles
            the policy of a layer when it is built: there, a name is taken before that alone, and "auto" never moves.

    Example:

    >>> import numpy as np, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> inputs = keras.Input((8,))
    >>> model = ks.SpeedupModel(inputs, keras.layers.Dense(1)(inputs))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.zeros((64, 8)), np.zeros((64, 1)), epochs=2, verbose=0)
    >>> sorted(history.history)
    ['loss']
    >>> model.predict(np.zeros((3, 8)), verbose=0).shape
    (3, 1)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is SpeedupModel and _is_functional(args, kwargs):
            return keras.Model.__new__(SpeedupFunctional)
        return super().__new__(cls)

    def __init__(self, *args: Any, float32_outputs: bool = True, **kwargs: Any):
        functional = _is_functional(args, kwargs)
        if functional and not isinstance(self, Functional):
            # Keras would rewrite the bases of this class, for all who use it; this object gets a class of its own.
            self.__class__ = _named_like(type(self), (type(self), SpeedupFunctional))
        if functional:
            Functional.__init__(self, *args, **kwargs)
            for layer in self.layers:
                require_this_keras(layer, "SpeedupModel")
        else:
            super().__init__(*args, **kwargs)
        self._float32_outputs = float32_outputs
        if functional:
            self._settle_heads()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(value, "compute_output_shape"):
            require_this_keras(value, type(self).__name__)
        super().__setattr__(name, value)


@_register(package="keras_speedup")
class SpeedupFunctional(SpeedupModel, Functional):  # type: ignore[misc]
    """What `SpeedupModel(inputs, outputs)` makes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return keras.Model.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    if KERAS_MAJOR == 2:  # by its constructor's signature Keras tells a functional model when it saves it
        __init__.__signature__ = inspect.signature(Functional.__init__)  # type: ignore[attr-defined]


@_register(package="keras_speedup")
class SpeedupSequential(_Accelerated, keras.Sequential):  # type: ignore[misc]
    """A `keras.Sequential` that finds the fastest way to run its own training; see `SpeedupModel`.

    Args:
        layers: As for `keras.Sequential`.
        float32_outputs: See `SpeedupModel`.
        **kwargs: As for `keras.Sequential`.

    Example:

    >>> import numpy as np, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> model = ks.SpeedupSequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.zeros((64, 8)), np.zeros((64, 1)), verbose=0)
    """

    def __init__(self, layers: Any = None, float32_outputs: bool = True, **kwargs: Any):
        for layer in layers or ():
            require_this_keras(layer, "SpeedupSequential")
        super().__init__(layers, **kwargs)
        self._float32_outputs = float32_outputs

    def add(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        require_this_keras(layer, "SpeedupSequential")
        self._heads_settled = False
        super().add(layer, *args, **kwargs)


def speedup(model: Any) -> Any:
    """Returns an accelerated model with the layers, weights, optimizer and compile settings of `model`.

    The two share their weights: what one learns, the other knows, and `model` keeps working.

    Args:
        model: Any Keras model, built or not, compiled or not.

    Raises:
        TypeError: `model` is no model of the Keras in use.

    Example:

    >>> import numpy as np, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> fast = ks.speedup(model)
    >>> history = fast.fit(np.zeros((64, 8)), np.zeros((64, 1)), verbose=0)
    """
    if isinstance(model, _Accelerated):
        return model
    if not isinstance(model, keras.Model):
        require_this_keras(model, "speedup")
        raise TypeError(f"speedup takes a model of {keras.__name__}, got {type(model).__name__}.")
    twin = keras.Model.__new__(_accelerated_class(type(model)))
    own = set(vars(twin))  # Keras 3 wraps build and quantize of each object when it is made
    for name, value in vars(model).items():
        if name not in own or not callable(value):
            vars(twin)[name] = value
    for name in ("train_function", "test_function", "predict_function"):
        vars(twin)[name] = None
    twin._settle_known_heads()
    if getattr(model, "optimizer", None) is not None:
        vars(twin)["_speedup"] = Accelerator(twin, Choices.of_plain(model))
    return twin


def _named(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """Returns the arguments of a call of Keras's method by their names, Keras's defaults among them.

    Raises:
        TypeError: An argument is not one of the method's.
    """
    bound = inspect.signature(getattr(keras.Model, method)).bind(None, *args, **kwargs)
    bound.apply_defaults()
    named = SimpleNamespace(**bound.arguments)
    if more := vars(named).pop("kwargs", {}):
        raise TypeError(f"{method}() got an unexpected argument {next(iter(more))!r}.")
    return named


def _is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether the arguments are `(inputs, outputs)`."""
    return len(args) == 2 or (len(args) == 1 and "outputs" in kwargs) or ("inputs" in kwargs and "outputs" in kwargs)


def _accelerated_class(cls: type) -> type:
    if cls is keras.Sequential:
        return SpeedupSequential
    if cls in (Functional, keras.Model):
        return SpeedupFunctional
    return _named_like(cls, (SpeedupSequential if issubclass(cls, keras.Sequential) else SpeedupModel, cls))


def _named_like(cls: type, bases: tuple[type, ...]) -> type:
    made: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, bases, made)


def _plain_twin(model: Any) -> Any:
    if isinstance(model, keras.Sequential):
        layers = [keras.Input(batch_shape=model.input_shape)] if KERAS_MAJOR == 3 and model.built else []
        twin = keras.Sequential([*layers, *(layer.__class__.from_config(layer.get_config()) for layer in model.layers)])
        if model.built and not layers:
            twin.build(model.input_shape)
        return twin
    if isinstance(model, Functional):
        return keras.models.clone_model(keras.Model(model.input, model.output, name=model.name))
    if model._speedup_inputs is None:
        raise ValueError(f"{type(model).__name__} has not been called yet; call it on a batch before to_keras().")
    return keras.models.clone_model(heads.as_functional(model, model._speedup_inputs))
