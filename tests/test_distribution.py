"""How strategy("auto") sees one device, several, and several machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import keras_speedup as ks
from keras_speedup.distribution import machines_named_by
from keras_speedup.flavor import keras


def tf_config(*workers, **jobs):
    return json.dumps({"cluster": {"worker": list(workers), **jobs}, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("environment", "machines"),
    [
        ({}, None),
        ({"TF_CONFIG": ""}, None),
        ({"TF_CONFIG": "{}"}, None),
        ({"TF_CONFIG": tf_config("a:1")}, None),
        ({"TF_CONFIG": tf_config("a:1", "b:1")}, "TF_CONFIG"),
        ({"TF_CONFIG": tf_config("a:1", chief=["b:1"])}, "TF_CONFIG"),
        ({"TF_CONFIG": tf_config("a:1"), "SLURM_NTASKS": "2"}, None),
        ({"SLURM_NTASKS": "1"}, None),
        ({"SLURM_NTASKS": "2"}, "Slurm"),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_NTASKS": "many"}, None),
    ],
)
def test_several_machines_are_named_by_tf_config_or_slurm(environment, machines):
    assert machines_named_by(environment) == machines


@pytest.mark.parametrize("config", ["workers: 2", "[]", '{"cluster": 3}', '{"cluster": {"worker": 2}}'])
def test_a_broken_tf_config_is_shown_beside_a_right_one(config):
    with pytest.raises(ValueError, match=r'TF_CONFIG must be JSON such as \{"cluster"') as raised:
        machines_named_by({"TF_CONFIG": config})
    assert config in str(raised.value)


@pytest.mark.parametrize("kind", ["mirrored", "", None])
def test_only_auto_is_taken(kind):
    with pytest.raises(ValueError, match='strategy takes "auto", got'):
        ks.strategy(kind)


@pytest.mark.flavors("tensorflow", "legacy")
def test_one_device_gives_a_strategy_of_one_replica():
    strategy = ks.strategy("auto")
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert len(model.weights) == 2


@pytest.mark.flavors("jax")
def test_on_jax_all_devices_share_the_batch():
    strategy = ks.strategy()
    assert isinstance(strategy, keras.distribution.DataParallel)
    assert strategy.device_mesh.devices.size == len(keras.distribution.list_devices())


@pytest.mark.flavors("torch")
def test_on_torch_the_error_says_what_to_use():
    with pytest.raises(NotImplementedError, match="DistributedDataParallel"):
        ks.strategy()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_two(environment_of):
    """Runs two processes that each make the strategy and sum 1 over all replicas, and returns what they print."""
    code = (
        "import tensorflow as tf, keras_speedup as ks\n"
        "strategy = ks.strategy('auto')\n"
        "total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce('SUM', tf.constant(1.0)))\n"
        "print(type(strategy).__name__, strategy.num_replicas_in_sync, float(total))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment_of(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [out.strip() or err[-2000:] for out, err in ended]


@pytest.mark.flavors("tensorflow", "legacy")
def test_two_processes_named_by_tf_config_train_as_one():
    workers = [f"localhost:{port}" for port in free_ports(2)]

    def environment(index):
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})}

    assert run_two(environment) == ["CollectiveAllReduceStrategy 2 2.0"] * 2


@pytest.mark.flavors("tensorflow")
def test_two_tasks_of_a_slurm_step_train_as_one():
    names = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    step = {"SLURM_STEP_NODELIST": "localhost", **dict.fromkeys(names, "2")}
    assert run_two(lambda index: {**step, "SLURM_PROCID": str(index)}) == ["CollectiveAllReduceStrategy 2 2.0"] * 2
