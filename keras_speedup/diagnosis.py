"""diagnose: which of input, launch overhead, compute, memory or communication holds a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from itertools import islice
from statistics import median
from time import perf_counter
from timeit import repeat
from typing import Any

import numpy as np

from .callbacks.memory import memory_bytes
from .report import draw_bars, table


@dataclass(frozen=True)
class Fix:
    """What to do about a bottleneck.

    Attributes:
        advice: What to write.
        expected_gain: How many times faster the training should be with it.
    """

    advice: str
    expected_gain: float


@dataclass(frozen=True)
class Diagnosis:
    """Where the time of a training step goes.

    Attributes:
        bottleneck: "input", "overhead", "compute", "memory" or "communication".
        input_seconds: Time to get one batch from the data alone.
        step_seconds: Time of one step on a batch that is there already, one step a call.
        device_seconds: Time of one step where many run in one call.
        memory_share: Share of the device's memory in use at the most; None where it is unknown.
        fixes: What to do, the most useful first.

    Example:

    >>> import keras_speedup as ks
    >>> print(ks.Diagnosis("input", 0.01, 0.002, 0.002, None, ()))
    bottleneck: input
    probe              ms
    a batch of input   10.00
    a step, one a call  2.00
    a step, many a call  2.00
    """

    bottleneck: str
    input_seconds: float
    step_seconds: float
    device_seconds: float
    memory_share: float | None
    fixes: tuple[Fix, ...]

    def __str__(self) -> str:
        return "\n".join([f"bottleneck: {self.bottleneck}", *table(("probe", "ms"), self._rows()), *self._advice()])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{value}</td></tr>" for name, value in self._rows())
        advice = "".join(f"<li>{escape(line)}</li>" for line in self._advice())
        return f"<p><b>bottleneck: {self.bottleneck}</b></p><table>{rows}</table><ol>{advice}</ol>"

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis as plain values, ready for JSON."""
        return asdict(self)

    def plot(self, ax: Any = None) -> Any:
        """Draws the three probes, in milliseconds; returns matplotlib's axes."""
        return draw_bars(ax, self._probes(), "milliseconds")

    def _probes(self) -> dict[str, float]:
        names = ("a batch of input", "a step, one a call", "a step, many a call")
        return dict(zip(names, (self.input_seconds, self.step_seconds, self.device_seconds), strict=True))

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, f"{1000 * seconds:.2f}") for name, seconds in self._probes().items()]

    def _advice(self) -> list[str]:
        return [f"{fix.advice} (about {fix.expected_gain:.1f} times as fast)" for fix in self.fixes]


def decide(input_seconds: float, step_seconds: float, device_seconds: float, memory_share: float | None) -> Diagnosis:
    """Returns the diagnosis for what the probes measured.

    Example:

    >>> decide(0.010, 0.002, 0.002, None).bottleneck
    'input'
    """
    fixes = []
    whole = max(step_seconds, input_seconds)
    if input_seconds > step_seconds:
        bottleneck = "input"
        gain = input_seconds / step_seconds
        fixes.append(
            Fix("hand the data to keras_speedup.DataPipeline(cache='auto'); lint(dataset) names what is wrong", gain)
        )
    elif memory_share is not None and memory_share > 0.9:
        bottleneck = "memory"
        fixes.append(Fix("a smaller batch, or set_precision('auto') for half the activations", 1.0))
    elif step_seconds > 1.5 * device_seconds:
        bottleneck = "overhead"
        gain = whole / max(device_seconds, input_seconds)
        fixes.append(Fix("keras_speedup.speedup(model): many steps in one call (steps_per_execution='auto')", gain))
    else:
        bottleneck = "compute"
        fixes.append(Fix("keras_speedup.speedup(model) tries XLA (jit_compile='auto'); set_precision('auto')", 1.2))
    return Diagnosis(bottleneck, input_seconds, step_seconds, device_seconds, memory_share, tuple(fixes))


def diagnose(model: Any, data: Any, steps: int = 50) -> Diagnosis:
    """Returns what holds the training of `model` on `data`, from short probes on a copy.

    The model, its optimizer and the data are afterwards as before.

    Args:
        model: A compiled Keras model that has been built.
        data: A `tf.data.Dataset`, or another iterable of batches that can be read more than once.
        steps: Batches that a probe reads or trains on at the most.

    Raises:
        ValueError: The model is not compiled, or the data can be read only once.

    Example:

    >>> import numpy as np, tensorflow as tf, keras_speedup as ks
    >>> from keras_speedup.flavor import keras
    >>> model = ks.SpeedupSequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> data = tf.data.Dataset.from_tensor_slices((np.zeros((640, 8)), np.zeros(640))).batch(32)
    >>> ks.diagnose(model, data, steps=20).bottleneck in ("input", "overhead", "compute")
    True
    """
    if getattr(model, "optimizer", None) is None:
        raise ValueError("diagnose needs a compiled model; call compile() first.")
    if iter(data) is data:
        raise ValueError("The data can be read only once, and probes would lose its batches; give a dataset or list.")
    batches: Iterator[Any] = iter(data)
    first = next(batches)
    began = perf_counter()
    read = sum(1 for _ in islice(batches, steps))
    input_seconds = (perf_counter() - began) / max(read, 1)
    weights = model.get_weights()
    optimizer = [np.array(variable.numpy()) for variable in _variables(model.optimizer)]
    try:
        single, many = _step_times(model, first, steps)
    finally:
        model.set_weights(weights)
        for variable, value in zip(_variables(model.optimizer), optimizer, strict=False):
            variable.assign(value)
    _, peak, limit = memory_bytes()
    return decide(input_seconds, single, many, peak / limit if limit else None)


def _step_times(model: Any, batch: Any, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step on a batch that is there already: one a call, and many a call."""
    from .model import speedup

    parts: list[Any] = [np.asarray(part) for part in (batch if isinstance(batch, tuple) else (batch,))]
    x, y = (*parts, None)[:2]
    arguments: dict[str, Any] = {"batch_size": len(x), "shuffle": False, "verbose": 0}
    repeated = [None if part is None else np.concatenate([part] * steps) for part in (x, y)]
    model.train_on_batch(x, y)
    times = repeat(lambda: model.train_on_batch(x, y), repeat=min(steps, 10), number=1)
    fast = speedup(model)
    fast.fit(*repeated, **arguments)
    fast.fit(*repeated, **arguments)
    # Keras runs some models itself; no call is measured then, and a step takes what it takes one a call.
    many = fast.speedup_meter.seconds / steps or median(times)
    return median(times), min(median(times), many)


def _variables(optimizer: Any) -> list[Any]:
    found = optimizer.variables
    return list(found() if callable(found) else found)
