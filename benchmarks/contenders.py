"""How a workload is trained: one process, one contender, one workload; prints what was measured as one line of JSON.

python benchmarks/contenders.py WORKLOAD CONTENDER --seconds 4      # plain Keras says how many epochs that is
python benchmarks/contenders.py WORKLOAD CONTENDER --epochs 15      # the others train as many
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from workloads import BATCH_SIZE, WORKLOADS, Workload


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        says: What it is, for the table.
        needs: The packages without which it is left out.
        environment: What is set before Python starts.
        ours: Whether the model is keras_speedup's.
        data: What `fit` is given: "dataset" (`from_tensor_slices(...).batch(32)`), "tuned" (the usual tips), "arrays",
            "pipeline" (a `DataPipeline` of arrays) or "loader" (PyTorch's).
        way: "auto" (as compiled by default), "xla" or "expert" for Keras, "eager" or "compile" for PyTorch's own loop.
    """

    says: str
    needs: tuple[str, ...]
    environment: dict[str, str]
    ours: bool = False
    data: str = "dataset"
    way: str = "auto"


_TF, _JAX, _LEGACY = {"KERAS_BACKEND": "tensorflow"}, {"KERAS_BACKEND": "jax"}, {"TF_USE_LEGACY_KERAS": "1"}

CONTENDERS = {
    "plain": Contender("Keras, `from_tensor_slices(...).batch(32)`", ("tensorflow",), _TF),
    "plain_arrays": Contender("Keras, `fit(x, y, batch_size=32)`", ("tensorflow",), _TF, data="arrays"),
    "tips": Contender(
        "Keras with the usual tips: cache, shuffle, prefetch, XLA", ("tensorflow",), _TF, data="tuned", way="xla"
    ),
    "expert": Contender(
        "an expert's best of a grid over XLA and steps_per_execution",
        ("tensorflow",),
        _TF,
        data="tuned",
        way="expert",
    ),
    "speedup": Contender("keras_speedup, model and data", ("tensorflow",), _TF, ours=True, data="pipeline"),
    "speedup_dataset": Contender("keras_speedup's model on `plain`'s data", ("tensorflow",), _TF, ours=True),
    "speedup_arrays": Contender("keras_speedup's model on arrays", ("tensorflow",), _TF, ours=True, data="arrays"),
    "jax": Contender("Keras on JAX", ("jax", "tensorflow"), _JAX),
    "jax_expert": Contender(
        "Keras on JAX, the best steps_per_execution of a grid", ("jax", "tensorflow"), _JAX, data="tuned", way="expert"
    ),
    "jax_speedup": Contender("keras_speedup on JAX", ("jax", "tensorflow"), _JAX, ours=True, data="pipeline"),
    "torch_eager": Contender("PyTorch with a DataLoader", ("torch",), {}, data="loader", way="eager"),
    "torch_compile": Contender("PyTorch, `torch.compile`", ("torch",), {}, data="loader", way="compile"),
    "legacy": Contender("tf-keras", ("tf_keras",), _LEGACY),
    "legacy_speedup": Contender("keras_speedup on tf-keras", ("tf_keras",), _LEGACY, ours=True, data="pipeline"),
}


class Watch:
    """The marks of one training: its start, its first step, the end of each epoch; says when to stop."""

    def __init__(self, seconds: float | None, epochs: int | None, limit_seconds: float):
        self.seconds, self.epochs, self.limit_seconds = seconds, epochs, limit_seconds
        self.first_step: float | None = None
        self.began = self.epoch_began = perf_counter()
        self.epoch_seconds: list[float] = []
        self.epoch_ends: list[float] = []

    def step(self) -> None:
        if self.first_step is None:
            self.first_step = perf_counter() - self.began

    def start_epoch(self) -> None:
        self.epoch_began = perf_counter()

    def end_epoch(self) -> bool:
        """Marks the end of an epoch; returns whether to stop."""
        now = perf_counter()
        self.epoch_seconds.append(now - self.epoch_began)
        self.epoch_ends.append(now - self.began)
        elapsed, done = now - self.began, len(self.epoch_seconds)
        if self.epochs is not None:
            return done >= self.epochs or elapsed > self.limit_seconds
        return done >= 4 and elapsed >= (self.seconds or 0)


def as_callback(keras: Any, watch: Watch) -> Any:
    class Marks(keras.callbacks.Callback):  # type: ignore[misc]
        async_safe, every_batch = True, False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch.step()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            watch.start_epoch()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = watch.end_epoch()

    return Marks()


def fit_arguments(x: Any, y: Any, data: str) -> dict[str, Any]:
    """Returns the arrays as `fit` takes them; see `Contender.data`."""
    if data == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH_SIZE}
    if data == "pipeline":
        import keras_speedup as ks

        return {"x": ks.DataPipeline(batch_size=BATCH_SIZE).dataset(x, y)}
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices((x, y))
    if data == "dataset":
        return {"x": samples.batch(BATCH_SIZE)}
    batches = samples.cache().shuffle(len(y)).batch(BATCH_SIZE, num_parallel_calls=tf.data.AUTOTUNE)
    return {"x": batches.prefetch(tf.data.AUTOTUNE)}


def keras_contender(workload: Workload, contender: Contender) -> tuple[Any, Any, Any]:
    """Returns Keras, a function that makes a compiled model, and the arguments of `fit` that are the data."""
    if contender.ours:
        import keras_speedup as ks
        from keras_speedup.flavor import keras

        base = ks.SpeedupModel
    else:
        import importlib

        keras = importlib.import_module("tf_keras" if "TF_USE_LEGACY_KERAS" in contender.environment else "keras")
        base = keras.Model

    def make(**how: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = workload.model(keras, base)
        model.compile(**workload.compile, **how)
        return model

    return keras, make, fit_arguments(*workload.data(), contender.data)


def best_of_grid(make: Callable[..., Any], data: dict[str, Any], compiled: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the compile settings of an expert with time: of a grid, those with the fastest epoch after the first."""
    found: list[tuple[float, dict[str, Any]]] = []
    for how in ({"jit_compile": jit, "steps_per_execution": steps} for jit in compiled for steps in (1, 8, 32, 128)):
        model = make(**how)
        try:
            model.fit(**data, verbose=0)
            for _ in range(2):
                began = perf_counter()
                model.fit(**data, verbose=0)
                found.append((perf_counter() - began, how))
        except Exception as error:  # what XLA cannot compile is no candidate
            print(f"{how}: {error!r:.200}", file=sys.stderr)
    return min(found, key=lambda pair: pair[0])[1]


def train_keras(workload: Workload, contender: Contender, watch: Watch) -> dict[str, Any]:
    keras, make, data = keras_contender(workload, contender)
    how: dict[str, Any] = {"jit_compile": True} if contender.way == "xla" else {}
    if contender.way == "expert":
        how = best_of_grid(make, data, ("auto",) if keras.backend.backend() == "jax" else (False, True))
    model = make(**how)
    watch.began = perf_counter()
    history = model.fit(**data, epochs=watch.epochs or 10**6, verbose=0, callbacks=[as_callback(keras, watch)]).history
    metric = (workload.compile.get("metrics") or ["loss"])[0]
    plan = model.speedup_report.plan if contender.ours else " ".join(f"{name}={value}" for name, value in how.items())
    return {"metric": float(history[metric][-1]), "plan": plan}


def serve_keras(workload: Workload, contender: Contender, watch: Watch) -> dict[str, Any]:
    """Calls `predict` on random numbers of rows, 50 calls an "epoch"."""
    keras, make, _ = keras_contender(workload, contender)
    model, (x, _), rng = make(), workload.data(), np.random.default_rng(0)
    served = 0
    watch.began, stop = perf_counter(), False
    while not stop:
        watch.start_epoch()
        for rows in rng.integers(1, 256, 50):
            model.predict(x[:rows], verbose=0)
            served += int(rows)
            watch.step()
        stop = watch.end_epoch()
    return {"metric": None, "plan": "", "rows": served / len(watch.epoch_seconds)}


def train_torch(workload: Workload, contender: Contender, watch: Watch) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    assert workload.torch is not None
    x, y = (torch.from_numpy(np.ascontiguousarray(array)) for array in workload.data())
    y = y.long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH_SIZE, shuffle=True)
    model = workload.torch(torch.nn)
    run = torch.compile(model) if contender.way == "compile" else model
    optimizer, loss = torch.optim.Adam(model.parameters()), torch.nn.CrossEntropyLoss()
    watch.began, stop = perf_counter(), False
    while not stop:
        watch.start_epoch()
        right = torch.zeros((), dtype=torch.long)
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = run(inputs)
            loss(outputs, targets).backward()
            optimizer.step()
            right += (outputs.argmax(1) == targets).sum()
            watch.step()
        accuracy = right.item() / len(y)
        stop = watch.end_epoch()
    return {"metric": accuracy, "plan": ""}


def runs(workload: Workload, contender: Contender) -> bool:
    """Returns whether the contender has this workload at all."""
    if contender.way in ("eager", "compile"):
        return workload.torch is not None and not workload.serves
    if workload.serves and (contender.way != "auto" or contender.data not in ("dataset", "pipeline")):
        return False
    flavor = contender.environment.get("KERAS_BACKEND", "legacy")
    return flavor in workload.flavors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--limit-seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    workload, contender = WORKLOADS[arguments.workload], CONTENDERS[arguments.contender]
    watch = Watch(arguments.seconds, arguments.epochs, arguments.limit_seconds)
    of_torch = contender.way in ("eager", "compile")
    measure = train_torch if of_torch else serve_keras if workload.serves else train_keras
    result = measure(workload, contender, watch)
    fit_seconds = perf_counter() - watch.began
    rows = result.pop("rows", None) or len(workload.data()[1])
    later = watch.epoch_seconds[len(watch.epoch_seconds) // 2 :]
    result |= {
        "samples_per_second": rows / median(later),
        "fit_seconds": fit_seconds,
        "first_step_seconds": watch.first_step,
        "epochs": len(watch.epoch_seconds),
        "epoch_ends": [round(second, 3) for second in watch.epoch_ends],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
