"""ThroughputLogger: samples a second, step times, compilation and the wait for input, as logs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpeedupWarning
from ..flavor import keras, tensorflow
from ..plans.meter import CallRecord, Meter
from .clock import EventClock
from .figures import FURTHER, KEYS, figures
from .rows import RowFile


class ThroughputLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs how fast the model trains, true under any number of steps a call.

    The figures go into the epoch's `logs`, so that `History`, `CSVLogger`, TensorBoard and others that come after this
    callback have them. Validation and other callbacks are not counted as training time.

    | key                  | unit      | meaning                                                        |
    | -------------------- | --------- | -------------------------------------------------------------- |
    | `samples_per_second` | samples/s | real rows over training time: calls and waits for input        |
    | `steps_per_second`   | steps/s   | optimizer steps over the same                                  |
    | `step_ms_p50`        | ms        | median time of a step, without the wait for input              |
    | `step_ms_p95`        | ms        | its 95th percentile                                            |
    | `input_wait`         | 0 to 1    | share of training time spent waiting for input                 |
    | `compile_seconds`    | s         | time that tracing and compiling held the training up           |
    | `flops_per_second`   | FLOP/s    | where the FLOPs of a sample are known                          |
    | `utilisation`        | 0 to 1    | of the devices' peak, where `flops` gives it                   |

    The file and TensorBoard get these and

    | key                  | unit      | meaning                                                        |
    | -------------------- | --------- | -------------------------------------------------------------- |
    | `step_ms_max`        | ms        | the slowest step                                               |
    | `callbacks`          | 0 to 1    | share of the epoch spent in callbacks between steps            |

    A plain Keras model, and one of ours that Keras runs itself (`run_eagerly`, several replicas), tells less: its step
    times hold the wait for input and the time of other callbacks, `input_wait`, `compile_seconds`, `callbacks` and
    `samples_per_second` are missing. A warning says so.

    Args:
        log_dir: Folder for TensorBoard scalars: `epoch_<key>` over epochs, and `batch_<key>` over steps where `every`
            is a number. None writes none.
        every: "epoch", or a number of steps after which a row is written to `filename` and `log_dir` as well.
        flops: Floating-point operations of training on one sample (forward, backward and update), or a pair of these
            and the peak of all devices in FLOP/s. "auto" takes the model's own figure or pair, its attribute
            `speedup_flops_per_sample`, where it has one. None for no figure.
        filename: A `.csv` or `.jsonl` file to which rows are appended, each in one write, so that it is whole after a
            kill.

    Raises:
        ValueError: `every` is neither "epoch" nor a positive integer, `flops` is no positive number or pair, or the
            file has another ending or other columns.
        ImportError: `log_dir` is given and TensorFlow is not installed.

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

    async_safe = True  # Keras 3 on JAX and PyTorch waits for the device at every batch for any other callback
    every_batch = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        every: str | int = "epoch",
        flops: Any = "auto",
        filename: str | os.PathLike[str] | None = None,
    ):
        super().__init__()
        if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f'every must be "epoch" or a positive number of steps, got {every!r}.')
        if not _is_flops(flops):
            raise ValueError(f'flops must be "auto", None, the FLOPs of a sample or (these, peak), got {flops!r}.')
        self._tf = None if log_dir is None else tensorflow("ThroughputLogger(log_dir=...)")
        self._file = None if filename is None else RowFile(filename, ("epoch", "step", "plan", *KEYS))
        self.log_dir, self.every, self.flops, self.filename = log_dir, every, flops, filename
        self._writer: Any = None
        self._clock = EventClock()
        self._reset()

    def _reset(self) -> None:
        self._epoch = self._steps = self._written = 0
        self._meter: Meter | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._reset()
        self._clock.start_training()
        if self._tf is not None:
            self._writer = self._tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        meter = getattr(self.model, "speedup_meter", None)
        # A meter that still has calls is not running: Keras trains the model itself this time.
        self._meter = meter if meter is not None and not meter.calls else None
        self._epoch, self._written = epoch, 0
        self._clock.start_epoch()

    # Not `on_train_batch_end`: Keras 3 on JAX and PyTorch sends it from a pool of threads, late and in any order.
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._clock.begin_call(batch)
        if self.every == "epoch":
            return
        calls = self._calls()
        new = calls[self._written :]
        if sum(call.steps for call in new) >= int(self.every):
            self._written = len(calls)
            self._write("batch", self._figures(new), new, batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_training()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_training()
        calls = self._calls()
        if not calls:
            return
        if not self._is_metered() and self._steps == 0:
            self._say_what_is_missing()
        metered = self._meter if self._is_metered() else None
        found = self._figures(calls, metered.callback_seconds if metered else None)
        self._steps += self._clock.steps if not self._is_metered() else sum(call.steps for call in calls)
        if logs is not None:
            logs.update({key: value for key, value in found.items() if key not in FURTHER})
        self._write("epoch", found, calls, 0)

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _end_training(self) -> None:
        self._clock.end_epoch(self.model, (self.params or {}).get("steps"))

    def _is_metered(self) -> bool:
        return self._meter is not None and bool(self._meter.calls)

    def _calls(self) -> Sequence[CallRecord]:
        return self._meter.calls if self._meter and self._is_metered() else self._clock.calls

    def _figures(self, calls: Sequence[CallRecord], callback_seconds: float | None = None) -> dict[str, float]:
        own = getattr(self.model, "speedup_flops_per_sample", None) if self.flops == "auto" else self.flops
        flops = own if isinstance(own, tuple) else (own, None)
        return figures(calls, splits=self._is_metered(), callback_seconds=callback_seconds, flops=flops)

    def _say_what_is_missing(self) -> None:
        warnings.warn(
            "Keras itself runs the steps, as of a plain Keras model: ThroughputLogger sees no batch sizes, no wait "
            "for input and no compilation. keras_speedup.speedup(model) makes a model that tells; "
            "model.speedup_report says why one of ours is run by Keras.",
            SpeedupWarning,
            stacklevel=2,
        )

    def _write(self, kind: str, found: Mapping[str, float], calls: Sequence[CallRecord], steps_of_epoch: int) -> None:
        step = self._steps + steps_of_epoch
        if self._tf is not None and self._writer is not None:
            with self._writer.as_default():
                for name, value in found.items():
                    self._tf.summary.scalar(f"{kind}_{name}", value, step=self._epoch if kind == "epoch" else step)
            self._writer.flush()
        if self._file is not None:
            self._file.append({"epoch": self._epoch, "step": step, "plan": calls[-1].plan, **found})


def _is_flops(flops: Any) -> bool:
    """Returns whether `flops` is "auto", None, a positive number or a pair of these."""
    parts = flops if isinstance(flops, tuple) else (flops,)
    return flops in ("auto", None) or (
        len(parts) in (1, 2) and all(isinstance(part, (int, float)) and part > 0 for part in parts)
    )
