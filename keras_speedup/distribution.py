"""strategy: several devices or machines, found and not configured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
    machines = machines_named_by(os.environ)
    if machines == "TF_CONFIG":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if machines == "Slurm":
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=_slurm_resolver(tf))
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()


def machines_named_by(environment: Mapping[str, str]) -> str | None:
    """Returns "TF_CONFIG" or "Slurm", whichever names several machines or processes to train on, or None.

    Args:
        environment: As `os.environ`.

    Raises:
        ValueError: `TF_CONFIG` is not what TensorFlow reads.

    Example:

    >>> machines_named_by({"SLURM_NTASKS": "4"})
    'Slurm'
    >>> machines_named_by({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'})
    """
    config = environment.get("TF_CONFIG")
    if config:
        try:
            cluster = json.loads(config).get("cluster", {})
            workers = sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:port", "host2:port"]}, "task": {"type": '
                f'"worker", "index": 0}}}}, got {config!r} ({error}).'
            ) from error
        return "TF_CONFIG" if workers > 1 else None
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    return "Slurm" if tasks.isdigit() and int(tasks) > 1 else None


def _slurm_resolver(tf: Any) -> Any:
    resolvers = tf.distribute.cluster_resolver
    if tf.config.list_physical_devices("GPU"):
        return resolvers.SlurmClusterResolver()
    # TensorFlow 2.21 counts a node's tasks by its GPUs (test_two_tasks_of_a_slurm_step): give each task one on paper.
    slurm = resolvers.SlurmClusterResolver(gpus_per_node=4096, gpus_per_task=1, auto_set_gpu=False)
    cluster = slurm.cluster_spec()
    job, index = slurm.get_task_info()
    return resolvers.SimpleClusterResolver(
        cluster, task_type=job, task_id=index, num_accelerators={"GPU": 0}, rpc_layer="grpc"
    )
