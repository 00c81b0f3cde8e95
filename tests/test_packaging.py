"""What a user gets who installs the package and imports it."""

from __future__ import annotations

import configparser
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_speedup as ks
from keras_speedup.flavor import FLAVOR

ROOT = Path(__file__).parent.parent

PUBLIC = {
    *("SpeedupModel", "SpeedupSequential", "speedup", "SpeedupReport"),
    *("set_precision", "DataPipeline", "lint", "Finding", "configure", "diagnose", "Diagnosis", "strategy"),
    *("ThroughputLogger", "GPUMemoryGrowth", "StepProfiler"),
}

#: Importing the Keras of this process with its backend, as a user's script does.
IMPORT_KERAS = {
    "tensorflow": "import tensorflow, keras",
    "legacy": "import tensorflow; tensorflow.keras.layers",
    "jax": "import jax, keras",
    "torch": "import torch, keras",
}[FLAVOR]

#: Raises a RuntimeError where the backend's devices are in use already.
NO_DEVICE_YET = {
    "tensorflow": "import tensorflow as tf; tf.config.threading.set_inter_op_parallelism_threads(2)",
    "legacy": "import tensorflow as tf; tf.config.threading.set_inter_op_parallelism_threads(2)",
    "jax": "import jax; jax.config.update('jax_num_cpu_devices', 2)",
    "torch": "import torch; torch.set_num_interop_threads(2); assert not torch.cuda.is_initialized()",
}[FLAVOR]


def python(*lines):
    """Runs the lines in a fresh process of this flavour."""
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)


def setup_cfg():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    return settings


def test_all_holds_the_public_names_and_nothing_more():
    assert set(ks.__all__) == PUBLIC
    assert len(ks.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_documented_with_an_example(name):
    documentation = inspect.getdoc(getattr(ks, name))
    assert ">>>" in documentation


def test_import_adds_little_to_importing_keras_and_initialises_no_device():
    result = python(
        "import sys, time",
        "began = time.process_time()",
        IMPORT_KERAS,
        "keras_seconds = time.process_time() - began",
        "before, began = set(sys.modules), time.process_time()",
        "import keras_speedup",
        "share = (time.process_time() - began) / keras_seconds",
        "print(share, *sorted({name.split('.')[0] for name in set(sys.modules) - before}))",
        NO_DEVICE_YET,
    )
    assert result.returncode == 0, result.stderr
    share, *added = result.stdout.split()
    assert float(share) < 0.1  # of processor time, so that a busy machine does not count
    assert not {"matplotlib", "pandas", "sklearn", "IPython", "tensorflow", "jax", "torch"} & set(added)


@pytest.mark.flavors("jax", "torch")
def test_without_tensorflow_all_but_the_pipeline_works_and_that_says_what_to_install():
    result = python(
        "import sys",
        "sys.modules['tensorflow'] = None",
        "import numpy as np, keras, keras_speedup as ks",
        "model = ks.SpeedupSequential([keras.Input((3,)), keras.layers.Dense(1)])",
        "model.compile('sgd', 'mse')",
        "x, y = np.ones((70, 3), 'float32'), np.ones((70, 1), 'float32')",
        "model.fit(x, y, epochs=2, verbose=0)",
        "assert model.predict(x, verbose=0).shape == (70, 1)",
        "ks.DataPipeline().dataset(x, y)",
    )
    assert result.returncode == 1
    assert "needs TensorFlow, which is not installed" in result.stderr.strip().splitlines()[-1]
    assert 'pip install "keras-speedup[tensorflow]"' in result.stderr


@pytest.mark.flavors("tensorflow")
def test_keras_on_tensorflow_without_tensorflow_is_one_import_error_with_the_command():
    result = python("import sys", "sys.modules['tensorflow'] = None", "import keras_speedup")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    assert 'pip install "keras-speedup[tensorflow]"' in last


def test_the_changelog_tells_of_the_version_in_setup_cfg():
    version = setup_cfg()["metadata"]["version"]
    newest = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_ci_runs_the_test_command_of_the_readme():
    readme, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    assert 'pip install ".[test]" && tox' in readme
    assert 'pip install ".[test]" && tox' in script


def test_readme_names_every_extra():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = set(setup_cfg()["options.extras_require"]) - {"test"}
    assert [extra for extra in sorted(extras) if f"[{extra}" not in readme and f"`{extra}`" not in readme] == []
