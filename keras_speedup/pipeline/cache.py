"""Where the samples that the deterministic layers made are kept: memory, disk, or nowhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from ..engines.shadow import cache_folder, free_memory_bytes

#: A cache takes at most this share of what is free.
SHARE = 0.5


@dataclass(frozen=True)
class CacheChoice:
    """What was chosen, and why.

    Attributes:
        kind: "memory", "disk", or None for no cache.
        reason: Why, in words.
        rows_that_fit: How many samples a shuffle buffer may hold.
    """

    kind: str | None
    reason: str
    rows_that_fit: int

    def __str__(self) -> str:
        return f"{self.kind or 'none'}: {self.reason}"


def choose_cache(tf: Any, wanted: str | None, dataset: Any, count: int | None) -> CacheChoice:
    """Returns where a dataset of `count` samples is kept.

    Args:
        tf: TensorFlow.
        wanted: "auto", "memory", "disk" or None.
        dataset: The samples; the first is read to learn its size.
        count: How many there are; None where it is unknown.
    """
    size = _sample_bytes(tf, dataset)
    free = free_memory_bytes() or 4 * 2**30
    fit = max(1, int(SHARE / 2 * free / size))
    if wanted != "auto":
        return CacheChoice(wanted, "as asked", fit)
    if count is None:
        return CacheChoice(None, "the number of samples is not known", fit)
    return decide(size * count, free, shutil.disk_usage(tempfile.gettempdir()).free, fit)


def decide(total_bytes: int, free_memory: int, free_disk: int, rows_that_fit: int = 1) -> CacheChoice:
    """Returns memory, disk or none for `total_bytes` of samples.

    Example:

    >>> decide(2**20, free_memory=2**30, free_disk=2**40).kind
    'memory'
    """
    megabytes = f"{total_bytes / 2**20:,.0f} MB"
    if total_bytes <= SHARE * free_memory:
        return CacheChoice("memory", f"{megabytes}, {free_memory / 2**20:,.0f} MB are free", rows_that_fit)
    if total_bytes <= SHARE * free_disk:
        return CacheChoice("disk", f"{megabytes} are too much for memory", rows_that_fit)
    return CacheChoice(None, f"{megabytes} fit neither into memory nor on disk", rows_that_fit)


def cached(tf: Any, dataset: Any, choice: CacheChoice, key: str | None, layers: list[Any]) -> Any:
    """Returns the dataset behind its cache."""
    if choice.kind == "memory":
        return dataset.cache()
    if choice.kind == "disk":
        return _on_disk(tf, dataset, key, layers)
    return dataset


def source_key(paths: list[str], *facts: Any) -> str:
    """Returns a key that changes with the files' names, sizes and times, and with `facts`."""
    entries = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([entries, facts], default=str).encode()).hexdigest()


def _on_disk(tf: Any, dataset: Any, key: str | None, layers: list[Any]) -> Any:
    """Returns the dataset read from disk; written whole to a folder of its own first, which is then given its name."""
    if key is None:  # nothing tells whether the data is the same in another run
        folder = tempfile.mkdtemp(prefix="keras_speedup-")
        return dataset.cache(os.path.join(folder, "samples"))
    config = json.dumps([layer.get_config() for layer in layers], default=str, sort_keys=True)
    name = hashlib.sha256(f"{key}{config}{tf.__version__}".encode()).hexdigest()[:32]
    place = cache_folder() / "samples" / name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = tempfile.mkdtemp(dir=place.parent, prefix=".draft-")
        try:
            dataset.save(draft)
            os.rename(draft, place)
        except OSError:  # another process was first, or the disk is full
            shutil.rmtree(draft, ignore_errors=True)
            if not place.exists():
                return dataset
    return tf.data.Dataset.load(str(place))


def _sample_bytes(tf: Any, dataset: Any) -> int:
    for element in dataset.take(1):
        size = 0
        for leaf in tf.nest.flatten(element):
            shape = getattr(leaf, "shape", None)
            count = shape.num_elements() if shape is not None else None
            size += (count or 1) * max(int(leaf.dtype.size or 16), 1)
        return max(size, 1)
    raise ValueError("The data is empty: expected at least one sample, got none.")
