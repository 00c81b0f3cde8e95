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


def test_time_in_other_callbacks_is_not_training_time(make_model, samples):
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.batches = batch
            for _ in range(200_000):
                pass

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, callbacks=[Slow()], epochs=2, verbose=0)
    meter = model.speedup_meter
    assert meter.callback_seconds > 0
    assert meter.seconds < meter.seconds + meter.callback_seconds


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
def test_tensorboard_gets_scalars_under_their_names(make_model, samples, tmp_path):
    import tensorflow as tf

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, epochs=2, callbacks=[ks.ThroughputLogger(tmp_path)], verbose=0)
    (file,) = tmp_path.iterdir()
    tags = {value.tag for event in tf.compat.v1.train.summary_iterator(str(file)) for value in event.summary.value}
    assert tags == {f"throughput/{key}" for key in KEYS}


def test_plain_keras_gets_steps_and_is_told_what_is_missing(make_model, samples):
    model = make_model(plain=True)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(SpeedupWarning, match="plain Keras"):
        history = model.fit(*samples, callbacks=[ks.ThroughputLogger()], verbose=0).history
    assert history["steps_per_second"][0] > 0
    assert "samples_per_second" not in history


def test_flops_become_a_rate_and_a_utilisation(make_model, samples):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    logger = ks.ThroughputLogger(flops=1000, peak_flops=1e9)
    history = model.fit(*samples, callbacks=[logger], verbose=0).history
    assert history["flops_per_second"][0] == pytest.approx(1000 * history["samples_per_second"][0])
    assert history["utilisation"][0] == pytest.approx(history["flops_per_second"][0] / 1e9)


@pytest.mark.parametrize("arguments", [{"every": 0}, {"every": "batch"}, {"filename": "rows.txt"}])
def test_odd_argument_is_refused(arguments):
    with pytest.raises(ValueError, match="must"):
        ks.ThroughputLogger(**arguments)
    assert FLAVOR
