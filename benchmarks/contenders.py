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
        ours: Whether the model and the data are keras_speedup's.
        way: "plain", "tips" or "expert" for Keras, "eager" or "compile" for PyTorch's own loop.
    """

    says: str
    needs: tuple[str, ...]
    environment: dict[str, str]
    ours: bool = False
    way: str = "plain"


_TF, _JAX, _LEGACY = {"KERAS_BACKEND": "tensorflow"}, {"KERAS_BACKEND": "jax"}, {"TF_USE_LEGACY_KERAS": "1"}

CONTENDERS = {
    "plain": Contender("Keras, `from_tensor_slices(...).batch(32)`", ("tensorflow",), _TF),
    "tips": Contender("Keras with the usual tips: cache, shuffle, prefetch, XLA", ("tensorflow",), _TF, way="tips"),
    "expert": Contender("the best of a grid over XLA and steps_per_execution", ("tensorflow",), _TF, way="expert"),
    "speedup": Contender("keras_speedup", ("tensorflow",), _TF, ours=True),
    "jax": Contender("Keras on JAX", ("jax", "tensorflow"), _JAX),
    "jax_speedup": Contender("keras_speedup on JAX", ("jax", "tensorflow"), _JAX, ours=True),
    "torch_eager": Contender("PyTorch with a DataLoader", ("torch",), {}, way="eager"),
    "torch_compile": Contender("PyTorch, `torch.compile`", ("torch",), {}, way="compile"),
    "legacy": Contender("tf-keras", ("tf_keras",), _LEGACY),
    "legacy_speedup": Contender("keras_speedup on tf-keras", ("tf_keras",), _LEGACY, ours=True),
}


class Watch:
    """The marks of one training: its start, its first step, the end of each epoch; says when to stop."""

    def __init__(self, seconds: float | None, epochs: int | None, limit_seconds: float):
        self.seconds, self.epochs, self.limit_seconds = seconds, epochs, limit_seconds
        self.first_step: float | None = None
        self.began = self.epoch_began = perf_counter()
        self.epoch_seconds: list[float] = []

    def step(self) -> None:
        if self.first_step is None:
            self.first_step = perf_counter() - self.began

    def start_epoch(self) -> None:
        self.epoch_began = perf_counter()

    def end_epoch(self) -> bool:
        """Marks the end of an epoch; returns whether to stop."""
        now = perf_counter()
        self.epoch_seconds.append(now - self.epoch_began)
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


def dataset(x: Any, y: Any, way: str) -> Any:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y))
    if way == "plain":
        return data.batch(BATCH_SIZE)
    rows = len(y)
    return data.cache().shuffle(rows).batch(BATCH_SIZE, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def keras_contender(workload: Workload, contender: Contender) -> tuple[Any, Any, Any]:
    """Returns Keras, a function that makes a compiled model, and the data as `fit` takes it."""
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

    x, y = workload.data()
    if contender.ours:
        return keras, make, ks.DataPipeline(batch_size=BATCH_SIZE).dataset(x, y)
    return keras, make, dataset(x, y, contender.way)


def best_of_grid(make: Callable[..., Any], data: Any) -> dict[str, Any]:
    """Returns the compile settings of an expert with time: the fastest second epoch of a grid."""
    found: list[tuple[float, dict[str, Any]]] = []
    for jit in (False, True):
        for steps in (1, 8, 64):
            model = make(jit_compile=jit, steps_per_execution=steps)
            try:
                model.fit(data, verbose=0)
                began = perf_counter()
                model.fit(data, verbose=0)
            except Exception as error:  # what XLA cannot compile is no candidate
                print(f"jit_compile={jit}, steps_per_execution={steps}: {error!r:.200}", file=sys.stderr)
                continue
            found.append((perf_counter() - began, {"jit_compile": jit, "steps_per_execution": steps}))
    return min(found, key=lambda pair: pair[0])[1]


def train_keras(workload: Workload, contender: Contender, watch: Watch) -> dict[str, Any]:
    keras, make, data = keras_contender(workload, contender)
    how: dict[str, Any] = {"jit_compile": True} if contender.way == "tips" else {}
    if contender.way == "expert":
        how = best_of_grid(make, data)
    model = make(**how)
    watch.began = perf_counter()
    history = model.fit(data, epochs=watch.epochs or 10**6, verbose=0, callbacks=[as_callback(keras, watch)]).history
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
    if workload.serves and contender.way != "plain":
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
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
