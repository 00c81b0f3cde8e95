"""strategy: several devices or machines, found and not configured."""

from __future__ import annotations

import os
from typing import Any

from .flavor import FLAVOR, keras, tensorflow


def strategy(kind: str = "auto") -> Any:
    """Returns how to train on what there is: one device, several GPUs, or several machines.

    Args:
        kind: "auto": several machines where `TF_CONFIG` or Slurm names them, else every GPU of this one, else one
            device.

    Returns:
        A `tf.distribute.Strategy`; make and compile the model in its `scope()`. On JAX, a
        `keras.distribution.DataParallel` over all devices; set it with `keras.distribution.set_distribution`.

    Raises:
        ValueError: `kind` is not "auto".
        NotImplementedError: Keras on PyTorch has no strategy of this kind.

    Example:

    >>> import keras_speedup as ks
    >>> from keras_speedup.flavor import FLAVOR
    >>> FLAVOR == "torch" or ks.strategy("auto") is not None
    True
    """
    if kind != "auto":
        raise ValueError(f'strategy takes "auto", got {kind!r}.')
    if FLAVOR == "torch":
        raise NotImplementedError(
            "strategy works on TensorFlow and JAX; on PyTorch use torch's DistributedDataParallel."
        )
    if FLAVOR == "jax":
        return keras.distribution.DataParallel()
    tf = tensorflow("keras_speedup.strategy")
    if os.environ.get("TF_CONFIG"):
        return tf.distribute.MultiWorkerMirroredStrategy()
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver()
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()
