"""What the training loop needs of Keras 3, whatever its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..flavor import FLAVOR, keras
from ..precision import watched_step
from .feed import ArrayFeed, Feed, IteratorFeed, flatten, shuffled

# Private in Keras 3.0 to 3.15 (test_private_names); the public names for them are inside fit.
from keras.src.trainers import data_adapters  # isort: skip
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils  # isort: skip
from keras.src.utils.python_utils import pythonify_logs  # isort: skip


class Keras3:
    """The parts of Keras's own `fit`, `evaluate` and `predict` that do not run steps.

    Args:
        model: A compiled model.
    """

    def __init__(self, model: Any):
        self.model = model

    # Data

    def feed(self, x: Any, y: Any = None, sample_weight: Any = None, *, shuffle: Any = False, **how: Any) -> Feed:
        """Returns the data as Keras would read it; the arguments are those of `fit`."""
        if not _takes_shuffle(x):
            shuffle = False  # Keras would warn that the data is in an order of its own
        adapter = data_adapters.get_data_adapter(x=x, y=y, sample_weight=sample_weight, shuffle=shuffle, **how)
        arrays = _dense_arrays(adapter) if shuffle != "batch" else None
        if arrays is not None:
            structure, leaves = arrays
            order: Callable[[], np.ndarray | None] = shuffled(len(leaves[0])) if shuffle else lambda: None
            return ArrayFeed(leaves, structure, adapter.batch_size, order=order)
        if FLAVOR == "tensorflow" or _is_tf_dataset(x):
            from .datasets import DatasetFeed

            events = () if _is_tf_dataset(x) else (adapter.on_epoch_begin, adapter.on_epoch_end)
            return DatasetFeed(adapter.get_tf_dataset(), adapter.num_batches, *events)
        return _numpy_feed(adapter)

    split = staticmethod(array_slicing.train_validation_split)
    unpack = staticmethod(data_adapter_utils.unpack_x_y_sample_weight)

    # Steps

    def step_function(self, kind: str) -> Callable[[Any], Any]:
        """Returns the model's own step of a kind: "train", "test" or "predict"."""
        model = self.model
        function = {"train": model.train_step, "test": model.test_step, "predict": model.predict_step}[kind]
        return watched_step(model, function) if kind == "train" else function

    # Events

    def verbosity(self, verbose: Any) -> Any:
        return verbose

    def first_epoch(self, initial_epoch: int, steps: int | None) -> tuple[int, int]:
        """Returns the epoch and the step to begin at, which `BackupAndRestore` may have set."""
        return self.model._initial_epoch or initial_epoch, 0

    def max_epochs(self, epochs: int) -> int:
        limit = getattr(keras.config, "max_epochs", lambda: None)()
        return min(epochs, limit) if limit else epochs

    def max_steps(self, steps: int | None) -> int | None:
        limit = getattr(keras.config, "max_steps_per_epoch", lambda: None)()
        return min(steps or limit, limit) if limit else steps

    # Results

    def check_compiled(self, method: str) -> None:
        self.model._assert_compile_called(method)

    def should_validate(self, epoch: int, frequency: Any) -> bool:
        return bool(self.model._should_eval(epoch, frequency))

    def reset_metrics(self) -> None:
        self.model.reset_metrics()

    def result(self, logs: Any) -> dict[str, Any]:
        """Returns the epoch's metrics as Python numbers."""
        return dict(pythonify_logs(self.model._get_metrics_result_or_logs(logs)))

    def in_order(self, logs: dict[str, Any]) -> Any:
        """Returns the metrics as `evaluate` does without `return_dict`."""
        return self.model._flatten_metrics_in_order(logs)

    def finish(self) -> None:
        """Writes averaged weights into the model, where its optimizer keeps an average."""
        if isinstance(self.model.optimizer, keras.optimizers.Optimizer):
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)


def _is_tf_dataset(x: Any) -> bool:
    return any(cls.__module__.startswith("tensorflow.python.") for cls in type(x).__mro__)


def _takes_shuffle(x: Any) -> bool:
    return not (_is_tf_dataset(x) and hasattr(x, "element_spec")) and not hasattr(x, "__next__")


def _dense_arrays(adapter: Any) -> tuple[Any, list[np.ndarray]] | None:
    """Returns the structure and the NumPy arrays of an adapter of dense arrays, else None."""
    if not isinstance(adapter, data_adapters.ArrayDataAdapter):
        return None
    inputs = adapter._inputs
    convert = getattr(array_slicing, "convert_to_sliceable", None)
    if convert is None:  # Keras before 3.5 keeps arrays, already converted
        structure, leaves = flatten(inputs)
        return (structure, leaves) if all(isinstance(leaf, np.ndarray) for leaf in leaves) else None
    structure, leaves = flatten(convert(inputs, target_backend="numpy"))
    dense = []
    for leaf in leaves:
        rows = leaf.convert_to_numpy(leaf[0 : len(leaf.array)])
        if not isinstance(rows, np.ndarray) or rows.dtype == object:
            return None
        dense.append(rows)
    return structure, dense


def _numpy_feed(adapter: Any) -> IteratorFeed:
    def batches() -> Any:
        adapter.on_epoch_begin()
        return iter(adapter.get_numpy_iterator())

    return IteratorFeed(batches, adapter.num_batches, adapter.on_epoch_end)
