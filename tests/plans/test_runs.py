"""Scripts that are run twice, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from keras_speedup.flavor import FLAVOR

MODEL = """
import sys
import numpy as np
import keras_speedup as ks
from keras_speedup.flavor import keras, tensorflow
keras.utils.set_random_seed(5)
if "deterministic" in sys.argv:
    tensorflow().config.experimental.enable_op_determinism()
layers = keras.layers
model = ks.SpeedupSequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(4)])
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(640, 12)).astype("float32")
"""

DETERMINISTIC = """
model.fit(x, x[:, :4], epochs=8, verbose=0)
import hashlib
print(hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest())
"""

REMEMBERED = """
import pathlib
class UntilChosen(keras.callbacks.Callback):
    every_batch = False
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = bool(list(pathlib.Path(sys.argv[1]).rglob("plans/*.json"))) and epoch >= 30
model.fit(x, x[:, :4], epochs=20_000, verbose=0, callbacks=[UntilChosen()])
report = model.speedup_report
print(report.plan, [trial.status for trial in report.trials], report.notes)
"""


def output_of(script, *arguments, cache="off"):
    settings = {**os.environ, "KERAS_SPEEDUP_CACHE": str(cache)}
    line = [sys.executable, "-c", MODEL + script, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, env=settings, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.flavors("tensorflow", "legacy")
def test_two_runs_end_with_equal_bits_where_operations_are_deterministic():
    assert output_of(DETERMINISTIC, "deterministic") == output_of(DETERMINISTIC, "deterministic")


@pytest.mark.flavors("tensorflow", "legacy", "jax")
def test_second_run_takes_the_chosen_plan_and_tries_nothing(tmp_path):
    first, second = (output_of(REMEMBERED, tmp_path, cache=tmp_path) for _ in range(2))
    plan = first.split()[0]
    assert "'baseline'" in first
    assert f"an earlier run chose {plan}: nothing is tried again" in second
    assert "baseline" not in second
    assert "refused" not in second
    assert second.split()[0] in (plan, "jit-loop" if FLAVOR == "jax" else "graph-loop")  # until it is compiled
