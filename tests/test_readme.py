"""What the README promises: its example runs as written, its figures are those that were measured."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_speedup.flavor import FLAVOR, keras

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = ROOT / "benchmarks"


def test_the_example_runs_as_written(capsys):
    """On pictures whose every pixel has a class, which the example's layers can hold."""
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert example.startswith("import keras\n")
    # Keras 3.15 on PyTorch: no gradient of a sparse loss over more than one pixel (it is not contiguous).
    side = 1 if FLAVOR == "torch" else 4
    rng = np.random.default_rng(0)
    names = {"__name__": "readme"}
    for part, rows in (("train", 300), ("valid", 70)):
        names[f"x_{part}"] = rng.integers(0, 256, (rows, side, side, 3)).astype("uint8")
        names[f"y_{part}"] = rng.integers(0, 10, (rows, side, side))
    # In a process of Keras 2 beside an installed Keras 3, the user's `keras` is tf_keras.
    exec(example.replace("import keras\n", f"import {keras.__name__} as keras\n", 1), names)
    assert len(names["model"].history.history["val_accuracy"]) == 10
    assert names["model"].speedup_report.plan in capsys.readouterr().out


@pytest.mark.skipif(not (BENCHMARKS / "results.json").is_file(), reason="nothing has been measured yet")
def test_figures_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("benchmark_run", BENCHMARKS / "run.py")
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_run", run)
    spec.loader.exec_module(run)
    results = json.loads((BENCHMARKS / "results.json").read_text(encoding="utf-8"))
    assert run.figures(results) in README
    assert run.as_markdown(results) == (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
