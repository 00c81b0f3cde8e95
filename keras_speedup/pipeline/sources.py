"""Every kind of data a DataPipeline takes, told apart and read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..engines.feed import leaves_of
from ..flavor import keras
from .arrays import row_count, standardized
from .cache import source_key
from .images import image_files, image_samples
from .stages import Source


def find(tf: Any, data: tuple[Any, Any, Any], how: dict[str, Any], pipeline: Any) -> Source:
    """Returns the source for the arguments of `DataPipeline.dataset`.

    Args:
        tf: TensorFlow.
        data: `x`, `y` and `sample_weight`.
        how: `image_size`, `features` and `batched`.
        pipeline: The `DataPipeline`.
    """
    x, y, sample_weight = data
    if not _is_arrays(tf, x):
        if y is not None or sample_weight is not None:
            raise ValueError(f"y and sample_weight go with arrays; {type(x).__name__} must give them itself.")
        if isinstance(x, tf.data.Dataset):
            return _dataset(tf, x, how["batched"], pipeline)
        if _is_py_dataset(x):
            return _py_dataset(tf, x)
        if isinstance(x, (str, os.PathLike)) or _is_paths(x):
            return _files(tf, x, how["image_size"], how["features"], pipeline)
        return _generator(tf, x)
    floatx = keras.backend.floatx() if hasattr(keras.backend, "floatx") else keras.config.floatx()
    parts = [standardized(part, floatx) for part in (x, y, sample_weight) if part is not None]
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight was given without y.")
    arrays = tuple(parts) if len(parts) > 1 or isinstance(parts[0], tuple) else parts[0]
    rows = row_count(arrays)
    return Source(f"arrays of {rows:,} rows", arrays=arrays, count=rows)


def _is_arrays(tf: Any, x: Any) -> bool:
    if isinstance(x, (str, os.PathLike)) or _is_paths(x) or x is None:
        if x is None:
            raise ValueError("x must be data, got None.")
        return False
    if isinstance(x, tf.data.Dataset) or _is_py_dataset(x) or callable(x) or inspect.isgenerator(x):
        return False
    leaves = leaves_of(x)
    if isinstance(x, list) and leaves and all(np.isscalar(leaf) for leaf in leaves):
        return True
    return bool(leaves) and all(hasattr(leaf, "shape") or hasattr(leaf, "iloc") for leaf in leaves)


def _is_paths(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(path, (str, os.PathLike)) for path in x)


def _is_py_dataset(x: Any) -> bool:
    kinds = tuple(getattr(keras.utils, name) for name in ("PyDataset", "Sequence") if hasattr(keras.utils, name))
    return isinstance(x, kinds)


def _dataset(tf: Any, dataset: Any, batched: bool | None, pipeline: Any) -> Source:
    specs = tf.nest.flatten(dataset.element_spec)
    if batched is None:
        batched = _is_batched(specs, dataset)
    count = int(dataset.cardinality())
    count = count if count >= 0 else None  # type: ignore[assignment]
    if not batched:
        return Source("tf.data.Dataset of samples", dataset=dataset, count=count)
    plain = pipeline.shuffle is False or not all(isinstance(spec, tf.TensorSpec) for spec in specs)
    if plain:
        return Source("tf.data.Dataset of batches, as they are", dataset=dataset, count=count, batches=True)
    return Source("tf.data.Dataset of batches, taken apart to be shuffled", dataset=dataset.unbatch(), count=None)


def _is_batched(specs: list[Any], dataset: Any) -> bool:
    ranks = [spec.shape.rank for spec in specs if hasattr(spec, "shape")]
    if any(rank == 0 for rank in ranks):
        return False
    first = {spec.shape[0] for spec in specs if hasattr(spec, "shape") and spec.shape.rank}
    if first == {None}:
        return True
    if len(first) > 1:
        return False
    raise ValueError(
        f"Elements of the dataset all begin with a dimension of {first}: they may be samples or batches. Say which: "
        "dataset(..., batched=True) or batched=False."
    )


def _py_dataset(tf: Any, data: Any) -> Source:
    """Reads batches with the source's own number of workers, in order."""
    steps = len(data)
    if steps == 0:
        raise ValueError(f"The data is empty: {type(data).__name__} has no batches.")
    workers = max(1, int(getattr(data, "workers", 1) or 1))

    def batches() -> Any:
        with ThreadPoolExecutor(workers) as pool:
            yield from (_as_tuple(batch) for batch in pool.map(data.__getitem__, range(steps)))
        if hasattr(data, "on_epoch_end"):
            data.on_epoch_end()

    spec = _spec(tf, _as_tuple(data[0]), batch=True)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return Source(f"{type(data).__name__} of {steps} batches, {workers} workers", dataset=dataset, batches=True)


def _generator(tf: Any, x: Any) -> Source:
    make: Callable[[], Iterable[Any]]
    if callable(x):
        make = x
    elif hasattr(x, "__next__"):
        raise ValueError(
            "A generator can be read once only. Give the function that makes it: dataset(function), not "
            "dataset(function())."
        )
    elif hasattr(x, "__iter__"):
        make = lambda: x  # noqa: E731
    else:
        raise ValueError(
            f"x must be arrays, a dataset, a generator function, a folder or files, got {type(x).__name__}."
        )
    first = next(iter(make()), None)
    if first is None:
        raise ValueError("The data is empty: the generator gave no sample.")
    spec = _spec(tf, _as_tuple(first), batch=False)
    dataset = tf.data.Dataset.from_generator(lambda: map(_as_tuple, make()), output_signature=spec)
    return Source("generator of samples", dataset=dataset)


def _as_tuple(element: Any) -> Any:
    return tuple(element) if isinstance(element, (list, tuple)) else element


def _spec(tf: Any, element: Any, *, batch: bool) -> Any:
    def spec(leaf: Any) -> Any:
        value = np.asarray(leaf)
        dtype = tf.string if value.dtype.kind in "OUS" else tf.as_dtype(value.dtype)
        return tf.TensorSpec((None, *value.shape[1:]) if batch else value.shape, dtype)

    if isinstance(element, tuple):
        return tuple(_spec(tf, part, batch=batch) for part in element)
    if isinstance(element, dict):
        return {name: _spec(tf, part, batch=batch) for name, part in element.items()}
    return spec(element)


def _files(tf: Any, x: Any, image_size: Any, features: Any, pipeline: Any) -> Source:
    if features is not None:
        paths = [str(path) for path in ([x] if isinstance(x, (str, os.PathLike)) else x)]
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise ValueError(f"TFRecord file not found: {missing[0]}.")
        records = tf.data.TFRecordDataset(paths, num_parallel_reads=tf.data.AUTOTUNE)
        parse = lambda batch: tf.io.parse_example(batch, features)  # noqa: E731
        return Source(f"{len(paths)} TFRecord files", dataset=records, key=source_key(paths), map_batch=parse)
    folder = Path(x) if isinstance(x, (str, os.PathLike)) else None
    if folder is None or not folder.is_dir():
        raise ValueError(f"x must be a folder of class folders of images, or TFRecord files with features=, got {x!r}.")
    if image_size is None:
        raise ValueError("A folder of images needs image_size=(height, width), in pixels.")
    paths, labels, names = image_files(folder)
    dataset = image_samples(tf, paths, labels, image_size, pipeline)
    return Source(
        f"{len(paths):,} images in {len(names)} classes",
        dataset=dataset,
        count=None if pipeline.on_error == "skip" else len(paths),
        key=source_key(paths, tuple(image_size), labels),
    )
