"""What the training loop needs of Keras 2: tf-keras, and Keras 2.15 with TensorFlow 2.15."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ..flavor import keras
from ..precision import watched_step
from .datasets import DatasetFeed, tf
from .feed import ArrayFeed, Feed, flatten, shuffled

# Private in Keras 2.15 and tf-keras 2.15 to 2.21 (test_private_names); the public names for them are inside fit.
_engine = f"{keras.__name__}.src.engine"
data_adapter: Any = importlib.import_module(f"{_engine}.data_adapter")
training: Any = importlib.import_module(f"{_engine}.training")
training_utils: Any = importlib.import_module(f"{_engine}.training_utils")
tf_utils: Any = importlib.import_module(f"{keras.__name__}.src.utils.tf_utils")


class Keras2:
    """The parts of Keras's own `fit`, `evaluate` and `predict` that do not run steps.

    Args:
        model: A compiled model.
    """

    def __init__(self, model: Any):
        self.model = model

    # Data

    def feed(self, x: Any, y: Any = None, sample_weight: Any = None, *, shuffle: Any = False, **how: Any) -> Feed:
        """Returns the data as Keras would read it; the arguments are those of `fit`."""
        if shuffle != "batch" and data_adapter.TensorLikeDataAdapter.can_handle(x, y):
            return self._arrays(x, y, sample_weight, bool(shuffle), how)
        how = {"sample_weight": sample_weight, "shuffle": shuffle, "model": self.model, **how}
        handler = data_adapter.get_data_handler(x=x, y=y, **how)
        plain = isinstance(x, tf.data.Dataset)
        return DatasetFeed(handler._dataset, _size(handler), end=None if plain else handler._adapter.on_epoch_end)

    def _arrays(self, x: Any, y: Any, weights: Any, shuffle: bool, how: Mapping[str, Any]) -> Feed:
        x, y, weights = data_adapter._process_tensorlike((x, y, weights))
        modes = data_adapter.broadcast_sample_weight_modes(weights, None)
        weights, _, _ = training_utils.handle_partial_sample_weights(y, weights, modes, check_all_flat=True)
        data = data_adapter.pack_x_y_sample_weight(x, y, weights)
        data_adapter._check_data_cardinality(data)
        if class_weight := how.get("class_weight"):
            data = data_adapter._make_class_weight_map_fn(class_weight)(*data)
        structure, leaves = flatten(data)
        leaves = [leaf.numpy() for leaf in leaves]
        rows = len(leaves[0])
        size, steps = how.get("batch_size"), how.get("steps_per_epoch")
        if not size:
            size = -(-rows // steps) if steps else 32
        if rows == 0:
            raise ValueError("Expected input data to be non-empty.")
        return ArrayFeed(leaves, structure, size, order=shuffled(rows) if shuffle else lambda: None)

    split = staticmethod(data_adapter.train_validation_split)
    unpack = staticmethod(data_adapter.unpack_x_y_sample_weight)

    # Steps

    def step_function(self, kind: str) -> Callable[[Any], Any]:
        """Returns the model's own step of a kind: "train", "test" or "predict"."""
        model = self.model
        function, counter = {
            "train": (watched_step(model, model.train_step), model._train_counter),
            "test": (model.test_step, model._test_counter),
            "predict": (model.predict_step, model._predict_counter),
        }[kind]

        def step(data: Any) -> Any:
            with training_utils.RespectCompiledTrainableState(model):
                outputs = function(data)
            with tf.control_dependencies([leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]):
                counter.assign_add(1)
            return outputs

        return step

    # Events

    def verbosity(self, verbose: Any) -> Any:
        return training._get_verbosity(verbose, self.model.distribute_strategy)

    def first_epoch(self, initial_epoch: int, steps: int | None) -> tuple[int, int]:
        """Returns the epoch and the step to begin at, which `BackupAndRestore` may have set."""
        self.model._train_counter.assign(0)
        first: tuple[int, int] = self.model._maybe_load_initial_counters_from_ckpt(steps, initial_epoch)
        return first

    def max_epochs(self, epochs: int) -> int:
        return epochs

    def max_steps(self, steps: int | None) -> int | None:
        return steps

    # Results

    def check_compiled(self, method: str) -> None:
        self.model._assert_compile_was_called()

    def should_validate(self, epoch: int, frequency: Any) -> bool:
        return bool(self.model._should_eval(epoch, frequency))

    def reset_metrics(self) -> None:
        self.model.reset_metrics()

    def result(self, logs: Any) -> dict[str, Any]:
        """Returns the epoch's metrics as Python numbers."""
        logs = tf_utils.sync_to_numpy_or_python_type(logs)
        return dict(self.model._validate_and_get_metrics_result(logs))

    def in_order(self, logs: dict[str, Any]) -> Any:
        """Returns the metrics as `evaluate` does without `return_dict`."""
        return training.flatten_metrics_in_order(logs, self.model.metrics_names)

    def finish(self) -> None:
        """Writes averaged weights into the model, where its optimizer keeps an average."""
        finalize = getattr(self.model.optimizer, "finalize_variable_values", None)
        if finalize is not None:
            finalize(self.model.trainable_variables)


def _size(handler: Any) -> int | None:
    """Returns the batches in one pass over the data, whatever `steps_per_epoch` says."""
    size = handler._adapter.get_size()
    if size is None and isinstance(handler._dataset, tf.data.Dataset):
        size = int(handler._dataset.cardinality())
    return None if size is None or size < 0 else int(size)
