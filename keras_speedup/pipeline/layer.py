"""DataPipeline: preprocessing layers and a fast tf.data pipeline in one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engines.traces import HALF
from ..flavor import flatten_layers, is_random, keras, require_this_keras, set_layer_policy, tensorflow
from . import sources
from .stages import Plan, Stage, build

_CACHES = ("auto", "memory", "disk", None)
_LAST = ("keep", "drop", "pad")
_ERRORS = ("raise", "skip")


@keras.saving.register_keras_serializable(package="keras_speedup")
class DataPipeline(keras.layers.Layer):  # type: ignore[misc]
    """Preprocessing layers, and fast datasets of any source with these layers in the right place.

    Called on tensors it applies its layers, so it can be the first layer of a model that is served. `dataset` puts
    the stages in the order that is always right: source, deterministic layers, cache, shuffle, batch, random layers,
    prefetch.

    Args:
        layers: Keras layers that are applied to `x`, in order. Those before the first random one are computed once.
        batch_size: Rows in a batch.
        shuffle: Whether training data is shuffled, anew each epoch; arrays are shuffled over the whole set.
        cache: "auto" takes memory, disk or none by what is free; "memory", "disk" or None.
        last_batch: "keep" leaves the odd last batch as it is; "drop" leaves it out; "pad" repeats rows with a
            `sample_weight` of 0, which distorts BatchNormalization's statistics, unweighted metrics and the loss's
            divisor, for loops that need one shape at any price.
        seed: Of the shuffles; None takes one from Keras's seed.
        deterministic: Whether elements come in the same order whatever the threads do.
        on_error: "raise" stops at a file that cannot be decoded, with its path; "skip" leaves it out and lists it in
            `skipped`.
        service: Address or addresses of tf.data service workers' dispatcher, such as "grpc://host:port".
        placement: "pipeline" runs random layers in the input threads, "device" leaves them to the model, of which
            the pipeline is then the first layer.
        dtype: What the layers compute in, whatever the global policy is.

    Raises:
        ValueError: An argument is not one of those named.
        TypeError: A layer is of the other Keras.

    Example:

    >>> import numpy as np, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> pipeline = ks.DataPipeline([keras.layers.Rescaling(1 / 255)], batch_size=4)
    >>> data = pipeline.dataset(np.zeros((10, 8, 8, 3), "uint8"), np.zeros(10))
    >>> [tuple(x.shape) for x, y in data]
    [(4, 8, 8, 3), (4, 8, 8, 3), (2, 8, 8, 3)]
    """

    def __init__(
        self,
        layers: Sequence[Any] = (),
        batch_size: int = 32,
        *,
        shuffle: bool = True,
        cache: str | None = "auto",
        last_batch: str = "keep",
        seed: int | None = None,
        deterministic: bool = True,
        on_error: str = "raise",
        service: Any = None,
        placement: str = "pipeline",
        dtype: Any = "float32",
        **kwargs: Any,
    ):
        layers = [_restored(layer) for layer in layers]
        for layer in layers:
            require_this_keras(layer, "DataPipeline")
            if not isinstance(layer, keras.layers.Layer):
                raise TypeError(f"layers must be Keras layers, got {type(layer).__name__}.")
        if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or batch_size < 1:
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}.")
        _check("cache", cache, _CACHES)
        _check("last_batch", last_batch, _LAST)
        _check("on_error", on_error, _ERRORS)
        _check("placement", placement, ("pipeline", "device"))
        super().__init__(dtype=dtype, **kwargs)
        self.layers = list(layers)
        self.batch_size, self.shuffle, self.cache, self.last_batch = int(batch_size), shuffle, cache, last_batch
        self.seed, self.deterministic, self.on_error, self.service = seed, deterministic, on_error, service
        self.placement = placement
        for layer in self.layers:
            if any(getattr(inner, "compute_dtype", None) in HALF for inner in flatten_layers(layer)):
                set_layer_policy(layer, self.compute_dtype)
        self.generator = np.random.default_rng(random.randrange(2**32) if seed is None else seed)
        self._stages: list[Stage] = []
        self._skipped: list[str] = []

    # As a layer

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        for layer in self.layers:
            inputs = layer(inputs, training=training) if _takes_training(layer) else layer(inputs)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        for layer in self.layers:
            input_shape = layer.compute_output_shape(input_shape)
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "cache", "last_batch", "seed", "deterministic")
        config: dict[str, Any] = super().get_config()
        config.update({name: getattr(self, name) for name in (*names, "on_error", "service", "placement")})
        config["layers"] = [keras.saving.serialize_keras_object(layer) for layer in self.layers]
        config["dtype"] = self.compute_dtype
        return config

    # As a pipeline

    def dataset(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        training: bool = True,
        image_size: tuple[int, int] | None = None,
        features: dict[str, Any] | None = None,
        batched: bool | None = None,
    ) -> Any:
        """Returns a `tf.data.Dataset` of batches `x`, `(x, y)` or `(x, y, sample_weight)`.

        Args:
            x: Arrays, memory maps, tensors, frames, or dicts and tuples of them; a `tf.data.Dataset`; a
                `PyDataset` or `Sequence`; a generator function or an iterable; a folder of class folders of images;
                TFRecord files.
            y: Targets, for arrays.
            sample_weight: Weights, for arrays.
            training: Whether to shuffle, and to apply random layers.
            image_size: `(height, width)` in pixels, for a folder of images.
            features: For TFRecord files, what `tf.io.parse_example` takes.
            batched: For a `tf.data.Dataset`, whether its elements are batches; None finds out.

        Raises:
            ValueError: Rows of different number, no data, or a dataset that does not show whether it is batched.
            ImportError: TensorFlow is not installed.
        """
        tf = tensorflow("keras_speedup.DataPipeline.dataset")
        plan = Plan(
            self,
            before=self._deterministic_layers(),
            after=self._random_layers() if self.placement == "pipeline" else [],
            training=training,
            shuffle=bool(self.shuffle and training),
            last_batch=self.last_batch if training or self.last_batch == "pad" else "keep",
        )
        how = {"image_size": image_size, "features": features, "batched": batched}
        with tf.device("CPU:0"):
            source = sources.find(tf, (x, y, sample_weight), how, self)
            dataset, self._stages = build(tf, source, plan)
        return dataset

    @property
    def skipped(self) -> list[str]:
        """The paths of files that could not be decoded, under `on_error="skip"`."""
        return list(self._skipped)

    def summary(self) -> str:
        """Prints the stages of the last dataset in order, with the choice made at each and why; returns the text."""
        if not self._stages:
            text = "DataPipeline: no dataset has been made yet; call .dataset(...)."
        else:
            width = max(len(stage.name) for stage in self._stages)
            rows = [f"{i}. {stage.name:<{width}}  {stage.choice}" for i, stage in enumerate(self._stages, 1)]
            text = "\n".join(["DataPipeline", *rows])
        keras.utils.io_utils.print_msg(text) if hasattr(keras.utils, "io_utils") else print(text)
        return text

    def _deterministic_layers(self) -> list[Any]:
        kept = []
        for layer in self.layers:
            if is_random(layer):
                break
            kept.append(layer)
        return kept

    def _random_layers(self) -> list[Any]:
        return self.layers[len(self._deterministic_layers()) :]


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")


def _restored(layer: Any) -> Any:
    return keras.saving.deserialize_keras_object(layer) if isinstance(layer, dict) else layer


def _takes_training(layer: Any) -> bool:
    return "training" in getattr(layer.call, "__code__", type(layer).call.__code__).co_varnames
