"""ThroughputLogger: samples a second, step times, compilation and the wait for input, as logs."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ..errors import SpeedupWarning
from ..flavor import FLAVOR, keras, tensorflow
from ..plans.meter import CallRecord, Meter


class ThroughputLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs how fast the model trains, true under any number of steps a call.

    The figures go into the epoch's `logs`, so that `History`, `CSVLogger`, TensorBoard and others have them. Validation
    and other callbacks are not counted as training time.

    | key                  | unit      | meaning                                                        |
    | -------------------- | --------- | -------------------------------------------------------------- |
    | `samples_per_second` | samples/s | real rows over training time: calls and waits for input        |
    | `steps_per_second`   | steps/s   | optimizer steps over the same                                  |
    | `step_ms_p50`        | ms        | median time of a step, without the wait for input              |
    | `step_ms_p95`        | ms        | its 95th percentile                                            |
    | `input_wait`         | 0 to 1    | share of training time spent waiting for input                 |
    | `compile_seconds`    | s         | time that tracing and compiling held the training up           |
    | `flops_per_second`   | FLOP/s    | where `flops` is given                                         |
    | `utilisation`        | 0 to 1    | of `peak_flops`, where both are given                          |

    Args:
        log_dir: Folder for TensorBoard scalars `throughput/<key>`; None writes none.
        every: "epoch", or a number of steps after which a row is written to `filename` and `log_dir` as well.
        flops: Floating-point operations of one training sample; "auto" takes the model's own figure where it has one.
        filename: A `.csv` or `.jsonl` file to which rows are appended, each one flushed.
        peak_flops: What the device can do, in FLOP/s.

    Raises:
        ValueError: `every` is neither "epoch" nor a positive integer, or the file has another ending.

    Example:

    >>> import numpy as np, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> model = ks.SpeedupSequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> logger = ks.ThroughputLogger()
    >>> history = model.fit(np.zeros((64, 8)), np.zeros((64, 1)), callbacks=[logger], verbose=0)
    >>> history.history["samples_per_second"][0] > 0
    True
    """

    every_batch = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        every: str | int = "epoch",
        flops: Any = "auto",
        filename: str | os.PathLike[str] | None = None,
        peak_flops: float | None = None,
    ):
        super().__init__()
        if every != "epoch" and (isinstance(every, (bool, str)) or every < 1):
            raise ValueError(f'every must be "epoch" or a positive number of steps, got {every!r}.')
        if filename is not None and Path(filename).suffix not in (".csv", ".jsonl"):
            raise ValueError(f"filename must end in .csv or .jsonl, got {str(filename)!r}.")
        self.log_dir, self.every, self.flops, self.filename = log_dir, every, flops, filename
        self.peak_flops = peak_flops
        self.async_safe = every == "epoch"  # rows of so many steps are written in their order
        self._writer: Any = None
        self._reset()

    def _reset(self) -> None:
        self._epoch = self._steps = self._written = 0
        self._meter: Meter | None = None
        self._own = Meter()
        self._began = 0.0
        self._last_row = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._reset()
        self._meter = getattr(self.model, "speedup_meter", None)
        if self._meter is None:
            warnings.warn(
                "ThroughputLogger sees no batch sizes of a plain Keras model: it logs steps and not samples. "
                "keras_speedup.speedup(model) gives both.",
                SpeedupWarning,
                stacklevel=2,
            )
        if self.log_dir is not None:
            if importlib.util.find_spec("tensorboard") is None:  # TensorFlow 2.21 no longer brings it
                raise ImportError(
                    "ThroughputLogger(log_dir=...) needs TensorBoard. Install it: pip install tensorboard"
                )
            tf = tensorflow("ThroughputLogger(log_dir=...)")
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._own.start_epoch(epoch)
        self._last_row = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._meter is None:
            self._own.calls.append(CallRecord(1, 0, perf_counter() - self._began, 0.0, 0.0, "keras"))
        if self.every == "epoch":
            return
        calls = self._calls()
        done = sum(call.steps for call in calls[self._last_row :])
        if done >= int(self.every):
            self._write(self._figures(calls[self._last_row :]), sum(call.steps for call in calls))
            self._last_row = len(calls)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        calls = self._calls()
        if not calls:
            return
        figures = self._figures(calls)
        self._steps += sum(call.steps for call in calls)
        if logs is not None:
            logs.update(figures)
        self._write(figures, 0)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _calls(self) -> Sequence[CallRecord]:
        return (self._meter or self._own).calls

    def _figures(self, calls: Sequence[CallRecord]) -> dict[str, float]:
        steps, samples = sum(call.steps for call in calls), sum(call.samples for call in calls)
        waited = sum(call.input_wait_seconds for call in calls)
        seconds = max(sum(call.seconds for call in calls) + waited, 1e-9)
        step_ms = np.repeat([1000 * call.seconds / call.steps for call in calls], [call.steps for call in calls])
        figures = {
            "steps_per_second": steps / seconds,
            "step_ms_p50": float(np.percentile(step_ms, 50)),
            "step_ms_p95": float(np.percentile(step_ms, 95)),
        }
        if self._meter is not None:
            figures["samples_per_second"] = samples / seconds
            figures["input_wait"] = waited / seconds
            figures["compile_seconds"] = sum(call.compile_seconds for call in calls)
        flops = self.flops if self.flops != "auto" else getattr(self.model, "speedup_flops_per_sample", None)
        if flops and self._meter is not None:
            figures["flops_per_second"] = flops * samples / seconds
            if self.peak_flops:
                figures["utilisation"] = figures["flops_per_second"] / self.peak_flops
        return figures

    def _write(self, figures: dict[str, float], steps_of_epoch: int) -> None:
        step = self._steps + steps_of_epoch
        if self._writer is not None:
            tf = tensorflow("ThroughputLogger(log_dir=...)")
            with self._writer.as_default():
                for name, value in figures.items():
                    tf.summary.scalar(f"throughput/{name}", value, step=step)
            self._writer.flush()
        if self.filename is None:
            return
        row = {"epoch": self._epoch, "step": step, "flavor": FLAVOR, **figures}
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists() or path.stat().st_size == 0
        # One line in one write: a process that is killed leaves whole lines.
        with path.open("a", newline="", encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                file.write(json.dumps(row) + "\n")
            else:
                writer = csv.DictWriter(file, list(row))
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
