"""Throughput: real samples, under every number of steps a call."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.errors import SpeedupWarning
from keras_speedup.flavor import FLAVOR, keras

KEYS = {"samples_per_second", "steps_per_second", "step_ms_p50", "step_ms_p95", "input_wait", "compile_seconds"}


class Counting(keras.callbacks.Callback):
    """Notes what the meter counted in each epoch."""

    def __init__(self):
        super().__init__()
        self.counted = []

    def on_epoch_end(self, epoch, logs=None):
        meter = self.model.speedup_meter
        self.counted.append((sum(call.steps for call in meter.calls), meter.samples))


@pytest.mark.parametrize("steps", ["auto", 1, 4])
def test_samples_and_steps_are_counted_exactly(make_model, samples, steps):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    counting = Counting()
    logger = ks.ThroughputLogger()
    callbacks = [logger, counting]
    history = model.fit(*samples, epochs=3, validation_split=0.2, callbacks=callbacks, verbose=0).history
    assert counting.counted == [(6, 162)] * 3
    assert set(history) >= KEYS
    for p50, p95, wait in zip(*(history[key] for key in ("step_ms_p50", "step_ms_p95", "input_wait")), strict=True):
        assert 0 < p50 <= p95
        assert 0 <= wait <= 1
    again = model.fit(*samples, epochs=1, callbacks=callbacks, verbose=0).history
    assert set(again) >= KEYS


def test_throughput_agrees_with_a_clock_outside(make_model):
    x, y = np.zeros((6400, 12), "float32"), np.zeros(6400, "int64")
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(x, y, epochs=2, verbose=0)
    logger, began = ks.ThroughputLogger(), time.perf_counter()
    history = model.fit(x, y, epochs=1, callbacks=[logger], verbose=0).history
    assert history["samples_per_second"][0] >= 6400 / (time.perf_counter() - began)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_rows_are_appended_to_a_file(make_model, samples, tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    for _ in range(2):
        model.fit(*samples, epochs=2, callbacks=[ks.ThroughputLogger(filename=path)], verbose=0)
    with path.open() as file:
        rows = list(csv.DictReader(file)) if suffix == ".csv" else [json.loads(line) for line in file]
    assert [int(row["epoch"]) for row in rows] == [0, 1, 0, 1]
    assert all(float(row["samples_per_second"]) > 0 for row in rows)


def test_rows_come_every_so_many_steps(make_model, samples, tmp_path):
    path = tmp_path / "rows.jsonl"
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=1)
    model.fit(*samples, callbacks=[ks.ThroughputLogger(every=3, filename=path)], verbose=0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3, 6, 7]


def test_file_is_whole_after_a_kill(tmp_path):
    path = tmp_path / "rows.jsonl"
    script = f"""
        import numpy as np, keras_speedup as ks
        from keras_speedup.flavor import keras
        model = ks.SpeedupSequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        logger = ks.ThroughputLogger(filename={str(path)!r})
        model.fit(np.zeros((64, 4)), np.zeros((64, 1)), epochs=1000000, callbacks=[logger], verbose=0)
    """
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=root, stderr=subprocess.DEVNULL)
    while not path.exists() or path.read_text().count("\n") < 20:
        assert process.poll() is None
    process.kill()
    process.wait()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(len(rows)))


@pytest.mark.flavors("tensorflow", "legacy")
def test_tensorboard_gets_scalars_under_the_names_its_users_know(make_model, samples, tmp_path):
    import tensorflow as tf

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=1)
    model.fit(*samples, epochs=2, callbacks=[ks.ThroughputLogger(tmp_path, every=3)], verbose=0)
    (file,) = tmp_path.iterdir()
    events = list(tf.compat.v1.train.summary_iterator(str(file)))
    found = {(value.tag, event.step) for event in events for value in event.summary.value}
    assert {f"epoch_{key}" for key in KEYS} <= {tag for tag, _ in found}
    assert sorted(step for tag, step in found if tag == "epoch_samples_per_second") == [0, 1]
    assert sorted(step for tag, step in found if tag == "batch_samples_per_second") == [3, 6, 10, 13]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_plain_keras_gets_exact_steps_and_is_told_what_is_missing(make_model, samples, tmp_path, steps, validation):
    if FLAVOR == "torch" and steps > 1:
        pytest.skip("Keras on PyTorch allows one step an execution")
    path = tmp_path / "rows.csv"
    model = make_model(plain=True)
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    logger = ks.ThroughputLogger(filename=path)
    with pytest.warns(SpeedupWarning, match="plain Keras") as caught:
        history = model.fit(*samples, epochs=3, validation_split=validation, callbacks=[logger], verbose=0).history
    assert sum(issubclass(warning.category, SpeedupWarning) for warning in caught) == 1
    assert {"steps_per_second", "step_ms_p50", "step_ms_p95"} == set(history) & KEYS
    batches = 6 if validation else 7
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [batches, 2 * batches, 3 * batches]
    assert {row["samples_per_second"] for row in rows} == {""}


def test_model_of_ours_that_keras_runs_is_measured_by_its_events(make_model, samples):
    model = make_model()
    logger = ks.ThroughputLogger()
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.warns(SpeedupWarning, match="run by Keras"):
        history = model.fit(*samples, epochs=2, callbacks=[logger], verbose=0).history
    assert history["steps_per_second"][1] > 0
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert model.fit(*samples, callbacks=[logger], verbose=0).history["input_wait"][0] >= 0


def test_time_in_other_callbacks_is_a_share_of_its_own(make_model, samples, tmp_path):
    class Slow(keras.callbacks.Callback):
        seconds = 0.0

        def on_train_batch_end(self, batch, logs=None):
            began = time.perf_counter()
            sum(range(100_000))
            self.seconds += time.perf_counter() - began

    path, slow = tmp_path / "rows.jsonl", Slow()
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, callbacks=[slow, ks.ThroughputLogger(filename=path)], verbose=0)
    assert model.speedup_meter.callback_seconds >= slow.seconds
    assert 0 < json.loads(path.read_text())["callbacks"] < 1


def test_infinite_data_is_cut_into_epochs(make_model, samples):
    def forever():
        while True:
            yield samples[0][:32], samples[1][:32]

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(forever(), steps_per_epoch=5, epochs=2, callbacks=[ks.ThroughputLogger()], verbose=0).history
    for samples_rate, steps_rate in zip(history["samples_per_second"], history["steps_per_second"], strict=True):
        assert samples_rate / steps_rate == pytest.approx(32)


def test_class_weights_and_padding_count_real_rows_once(make_model, samples):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    counting = Counting()
    model.fit(*samples, class_weight={0: 0.5, 1: 2.0, 2: 1.0, 3: 1.0}, callbacks=[counting], verbose=0)
    assert counting.counted == [(7, 203)]


def test_flops_become_a_rate_and_a_utilisation(make_model, samples):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(*samples, callbacks=[ks.ThroughputLogger(flops=(1000, 1e9))], verbose=0).history
    assert history["flops_per_second"][0] == pytest.approx(1000 * history["samples_per_second"][0])
    assert history["utilisation"][0] == pytest.approx(history["flops_per_second"][0] / 1e9)
    model.speedup_flops_per_sample = 500
    history = model.fit(*samples, callbacks=[ks.ThroughputLogger()], verbose=0).history
    assert history["flops_per_second"][0] == pytest.approx(500 * history["samples_per_second"][0])
    assert "utilisation" not in history
    history = model.fit(*samples, callbacks=[ks.ThroughputLogger(flops=None)], verbose=0).history
    assert "flops_per_second" not in history


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": "batch"},
        {"every": 1.5},
        {"filename": "rows.txt"},
        {"flops": -1},
        {"flops": "many"},
        {"flops": (1, 2, 3)},
    ],
)
def test_odd_argument_is_refused(arguments):
    with pytest.raises(ValueError, match="must"):
        ks.ThroughputLogger(**arguments)
