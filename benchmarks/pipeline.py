"""DataPipeline alone, beside tf.data as it is written, as it is tuned, PyTorch's DataLoader and Grain.

    python benchmarks/pipeline.py                       # arrays and photographs, a few minutes on 2 cores
    python benchmarks/pipeline.py --only arrays

Every contender passes over the same rows in the same process, in turn, the other way round every other time. Prints
rows a second (medians), the first pass by itself, and the ratio to the first contender. Packages that are not installed
are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import tensorflow as tf

import keras_speedup as ks
from keras_speedup.engines.feed import ArrayFeed, Cursor
from keras_speedup.flavor import keras
from keras_speedup.pipeline.arrays import array_source

BATCH_SIZE, SIDE = 32, 96
Pass = Callable[[], Iterable[Any]]


def arrays() -> tuple[int, dict[str, Pass]]:
    """100,000 rows of 64 numbers, shuffled."""
    rows = 100_000
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype("float32")
    y = np.arange(rows)
    plain = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10_000).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
    ours = ks.DataPipeline(batch_size=BATCH_SIZE).dataset(x, y)

    def as_fit_reads_it() -> Iterator[Any]:
        source = array_source(ours)
        feed = ArrayFeed(list(source.arrays), (0, 1), source.batch_size, order=source.epoch_order)
        cursor = Cursor(feed, lambda block: block)
        while (block := cursor.take(64)) is not None:
            yield block

    return rows, {
        "tf.data: shuffle(10000), batch, prefetch": lambda: plain,
        "DataPipeline, iterated": lambda: ours,
        "DataPipeline, as SpeedupModel.fit reads it": as_fit_reads_it,
    }


def write_photos(folder: Path, count: int) -> None:
    """Writes 320x320 pieces of the two photographs that scikit-learn ships, as JPEG files in a folder for each."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    pictures = load_sample_images().images
    for index in range(count):
        picture = pictures[index % 2]
        top, left = rng.integers(0, picture.shape[0] - 320), rng.integers(0, picture.shape[1] - 320)
        place = folder / ("china", "flower")[index % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture[top : top + 320, left : left + 320]).save(place / f"{index}.jpg", quality=90)


def photos(count: int = 2000) -> tuple[int, dict[str, Pass]]:
    """JPEG photographs of 320x320 to 96x96, with random flips and brightness."""
    folder = Path(tempfile.mkdtemp(prefix="photos-"))
    write_photos(folder, count)
    paths = sorted(map(str, folder.rglob("*.jpg")))
    labels = [int("flower" in path) for path in paths]

    def decode(path: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.cast(tf.image.resize(image, (SIDE, SIDE)), tf.uint8), label

    def augment(image: Any, label: Any) -> Any:
        image = tf.image.random_flip_left_right(tf.cast(image, tf.float32))
        return tf.image.random_brightness(image, 0.2), label

    files, auto = tf.data.Dataset.from_tensor_slices((paths, labels)), tf.data.AUTOTUNE
    plain = files.map(decode).map(augment).batch(BATCH_SIZE)
    tuned = files.map(decode, auto).cache().shuffle(count).batch(BATCH_SIZE).map(augment, auto).prefetch(auto)
    layers = [keras.layers.RandomFlip("horizontal"), keras.layers.RandomBrightness(0.2)]
    ours = ks.DataPipeline(layers, batch_size=BATCH_SIZE).dataset(folder, image_size=(SIDE, SIDE))
    found: dict[str, Pass] = {"tf.data: map, map, batch": lambda: plain, "tf.data, tuned": lambda: tuned}
    found["DataPipeline"] = lambda: ours
    found |= from_python(paths, labels)
    return len(paths), found


class Photos:
    """Photographs as PyTorch and Grain read them: decoded and augmented by Pillow and NumPy."""

    def __init__(self, paths: list[str], labels: list[int]):
        self.paths, self.labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)
        pixels = pixels[:, ::-1] if np.random.random() < 0.5 else pixels
        return np.ascontiguousarray(pixels + np.random.uniform(-51, 51), dtype=np.float32), self.labels[index]


def from_python(paths: list[str], labels: list[int]) -> dict[str, Pass]:
    found: dict[str, Pass] = {}
    if find_spec("torch"):
        from torch.utils.data import DataLoader

        loader = DataLoader(Photos(paths, labels), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)
        found["PyTorch's DataLoader, 2 workers"] = lambda: loader
    if find_spec("grain"):
        import grain
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # its workers ask for them
        source = grain.MapDataset.source(Photos(paths, labels)).shuffle(seed=0).batch(BATCH_SIZE)
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
        found["Grain, 2 workers"] = lambda: source.to_iter_dataset().mp_prefetch(options)
    return found


def measure(rows: int, contenders: dict[str, Pass], passes: int) -> None:
    """Passes over each contender in turn, and prints what that took."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(passes):
        for name in list(contenders)[:: 1 if index % 2 == 0 else -1]:
            began = perf_counter()
            for _ in contenders[name]():
                pass
            seconds[name].append(perf_counter() - began)
            print(f"pass {index + 1} of {passes}: {name}, {rows / seconds[name][-1]:,.0f}/s", file=sys.stderr)
    first = median(next(iter(seconds.values()))[1:])
    print("| contender | rows a second | ratio | first pass |\n| --- | --- | --- | --- |")
    for name, took in seconds.items():
        later = median(took[1:])
        print(f"| {name} | {rows / later:,.0f} | {first / later:.2f} | {rows / took[0]:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("arrays", "photos"))
    parser.add_argument("--passes", type=int, default=5)
    arguments = parser.parse_args()
    for name, make in {"arrays": arrays, "photos": photos}.items():
        if arguments.only in (None, name):
            print(f"\n{name}: {' '.join((make.__doc__ or '').split())}\n")
            measure(*make(), arguments.passes)


if __name__ == "__main__":
    main()
