"""Images from a folder of class folders, decoded in parallel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")


def image_files(folder: Path) -> tuple[list[str], list[int], list[str]]:
    """Returns the paths of the images, the index of each one's class, and the classes' names, all sorted.

    Raises:
        ValueError: There is no image in a folder of its class.
    """
    names = sorted(part.name for part in folder.iterdir() if part.is_dir())
    found = [
        (str(path), index)
        for index, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not found:
        raise ValueError(f"No images ({', '.join(_SUFFIXES)}) in class folders below {folder}.")
    paths, labels = zip(*found, strict=True)
    return list(paths), list(labels), names


def image_samples(tf: Any, paths: list[str], labels: list[int], size: tuple[int, int], pipeline: Any) -> Any:
    """Returns a dataset of `(image, label)`: uint8 of shape `(height, width, 3)`, and int64."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError('Folders of images need Pillow. Install it: pip install "keras-speedup[images]"') from error
    height, width = size
    skip = pipeline.on_error == "skip"

    def fallback(path: bytes) -> tuple[np.ndarray, np.bool_]:
        """Decodes what TensorFlow cannot, such as CMYK, or an orientation in EXIF, or says why it is no image."""
        name = path.decode()
        try:
            with Image.open(io.BytesIO(Path(name).read_bytes())) as image:
                turned = (
                    ImageOps.exif_transpose(image).convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
                )
                return np.asarray(turned, np.uint8), np.bool_(True)
        except Exception as error:
            if skip:
                if name not in pipeline._skipped:
                    pipeline._skipped.append(name)
                return np.zeros((height, width, 3), np.uint8), np.bool_(False)
            raise ValueError(f"{name} cannot be decoded: {error}. on_error='skip' leaves such files out.") from None

    def load(path: Any, label: Any) -> Any:
        image, is_whole = tf.numpy_function(fallback, [path], [tf.uint8, tf.bool])
        image.set_shape([height, width, 3])
        is_whole.set_shape([])
        return image, label, is_whole

    dataset = tf.data.Dataset.from_tensor_slices((paths, np.asarray(labels, np.int64)))
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=pipeline.deterministic)
    if skip:
        dataset = dataset.filter(lambda image, label, is_whole: is_whole)
    return dataset.map(lambda image, label, is_whole: (image, label), num_parallel_calls=tf.data.AUTOTUNE)
