"""Settings that are real, and the doctor's checks with machines that are not there."""

from __future__ import annotations

import pytest

import keras_speedup as ks
from keras_speedup import runtime
from keras_speedup.flavor import FLAVOR


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_thread_mode": "fast"}, "gpu_thread_mode must be"),
        ({"intra_op_threads": -1}, "intra_op_threads must be a number of threads"),
        ({"inter_op_threads": True}, "inter_op_threads must be"),
    ],
)
def test_odd_setting_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ks.configure(**arguments)


@pytest.mark.flavors("tensorflow", "legacy")
def test_too_late_says_what_and_where():
    import tensorflow as tf

    tf.constant(1.0)
    with pytest.raises(RuntimeError, match="too late for intra_op_threads"):
        ks.configure(intra_op_threads=3)


def test_memory_growth_can_always_be_asked_for():
    ks.configure(memory_growth=True, compile_cache=False)


def test_this_machine_is_not_broken():
    checks = runtime.doctor()
    assert {check.status for check in checks} <= {"ok", "warning"}
    text = runtime.format_checks(checks)
    assert all(check.name in text for check in checks)


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (lambda: runtime.check_packages(["tensorflow", "tensorflow_cpu"]), "broken", "overwrite"),
        (lambda: runtime.check_packages(["tensorflow", "keras"]), "ok", "tensorflow"),
        (lambda: runtime.check_devices(gpus=0, driver=True, has_cuda=False), "broken", "without CUDA"),
        (lambda: runtime.check_devices(gpus=0, driver=True, has_cuda=True), "broken", "sees no GPU"),
        (lambda: runtime.check_devices(gpus=2, driver=True, has_cuda=True), "ok", "2 accelerators"),
        (lambda: runtime.check_devices(gpus=0, driver=False, has_cuda=False), "ok", "CPU"),
        (lambda: runtime.check_memory_growth({"TF_FORCE_GPU_ALLOW_GROWTH": "1"}), "warning", "ignored"),
        (lambda: runtime.check_memory_growth({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}), "ok", "true"),
        (lambda: runtime.check_onednn({"TF_ENABLE_ONEDNN_OPTS": "0"}), "warning", "turned off"),
        (lambda: runtime.check_onednn({}), "ok", "on"),
        (lambda: runtime.check_threads({"OMP_NUM_THREADS": "64"}, cores=2), "warning", "64 on 2 cores"),
        (lambda: runtime.check_threads({"OMP_NUM_THREADS": "2"}, cores=2), "ok", "2 cores"),
        (lambda: runtime.check_limits(cores=2, host_cores=64), "warning", "2 of the host's 64"),
        (lambda: runtime.check_settings({"TF_USE_CUDA_STREAM_EXECUTOR": "1"}), "warning", "never reads it"),
        (lambda: runtime.check_settings({"KMP_AFFINITY": "x"}, "jax"), "warning", "KMP_AFFINITY does nothing"),
        (lambda: runtime.check_settings({"KMP_AFFINITY": "x"}, "torch"), "ok", "none"),
        (lambda: runtime.check_settings({"CUDA_LAUNCH_BLOCKING": "1"}), "warning", "waits for every kernel"),
        (lambda: runtime.check_settings({"CUDA_LAUNCH_BLOCKING": "0"}), "ok", "none"),
        (lambda: runtime.check_devices(0, True, True, "-1"), "warning", "hides every GPU"),
        (lambda: runtime.check_settings({}), "ok", "none"),
        (lambda: runtime.check_cache({"KERAS_SPEEDUP_CACHE": "off"}), "ok", "off"),
    ],
)
def test_each_fault_is_found(check, status, words):
    found = check()
    assert found.status == status
    assert words in f"{found.detail} {found.fix}"
    assert bool(found.fix) is (status != "ok")
    assert FLAVOR


def test_check_that_fails_is_a_finding_and_ends_no_other():
    def check_something():
        raise OSError("no such device")

    found = runtime._guarded(check_something)
    assert (found.name, found.status) == ("something", "broken")
    assert "no such device" in found.detail


@pytest.mark.flavors("jax", "torch")
@pytest.mark.parametrize("argument", ["gpu_thread_count", "autoclustering"])
def test_setting_of_another_flavor_is_refused_and_not_ignored(argument):
    with pytest.raises(ValueError, match=f"{argument} is no setting of Keras on {FLAVOR}"):
        ks.configure(**{argument: 1})


@pytest.mark.flavors("jax")
@pytest.mark.parametrize("argument", ["intra_op_threads", "deterministic"])
def test_setting_that_jax_takes_elsewhere_is_refused_with_the_way(argument):
    with pytest.raises(ValueError, match=f"{argument} is no setting of Keras on jax: (limit|start) the process"):
        ks.configure(**{argument: 1})


@pytest.mark.flavors("torch")
def test_determinism_leaves_the_random_numbers_alone():
    import numpy as np
    import torch

    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    try:
        ks.configure(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert np.array_equal(before[0], np.random.get_state()[1]) and torch.equal(before[1], torch.get_rng_state())
