"""SpeedupReport: what was tried to train a model faster, what was kept, and what it gained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from .plans.trial import PlanTrial


@dataclass(frozen=True)
class SpeedupReport:
    """What was tried to train a model faster, what was kept, and what it gained.

    Attributes:
        flavor: The Keras in use: "tensorflow", "jax", "torch" or "legacy"; empty before `fit`.
        plan: The plan that runs the steps now.
        steps_per_call: Optimizer steps in one call of it.
        trials: Every plan that was tried, in order.
        notes: What else there is to know, such as a callback that must see every batch.
        blockers: Operations that XLA cannot compile, each with its layer.
        choosing_seconds: What choosing has cost the training, in seconds.
        gain: How many times faster a step is than on the plain graph; None where it was not measured.
        samples_per_second: Training rows a second, one figure for each epoch of the last `fit`.

    Example:

    >>> import keras_speedup as ks
    >>> print(ks.SpeedupReport())
    keras_speedup: nothing has been trained yet.
    """

    flavor: str = ""
    plan: str = ""
    steps_per_call: int = 1
    trials: tuple[PlanTrial, ...] = ()
    notes: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    choosing_seconds: float = 0.0
    gain: float | None = None
    samples_per_second: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.plan and not self.notes:
            return "keras_speedup: nothing has been trained yet."
        lines = [self._headline(), *self._facts()]
        if self.trials:
            lines += ["", *table(_HEADER, map(_row, self.trials))]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self.plan and not self.notes:
            return f"<p>{escape(str(self))}</p>"
        facts = "".join(f"<li>{escape(fact)}</li>" for fact in self._facts())
        slowest = max((trial.step_seconds or 0.0 for trial in self.trials), default=0.0)
        rows = "".join(
            "<tr>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in _row(trial))
            + f"<td>{_bar(trial, slowest)}</td></tr>"
            for trial in self.trials
        )
        head = "".join(f"<th>{escape(name)}</th>" for name in (*_HEADER, ""))
        return f"<p><b>{escape(self._headline())}</b></p><ul>{facts}</ul><table><tr>{head}</tr>{rows}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain values, ready for JSON."""
        return asdict(self)

    def plot(self, ax: Any = None) -> Any:
        """Draws the step time of every plan that was timed, in milliseconds; returns matplotlib's axes.

        Args:
            ax: Axes to draw on; new ones where it is None.
        """
        timed = {trial.plan: trial.step_seconds for trial in self.trials if trial.step_seconds is not None}
        return draw_bars(ax, timed, "milliseconds a step", self.plan)

    def _headline(self) -> str:
        if not self.plan:
            return "keras_speedup: nothing was accelerated"
        gain = "" if self.gain is None else f", {self.gain:.1f} times the plain graph"
        return f"keras_speedup: plan {self.plan}, {self.steps_per_call} steps a call{gain}"

    def _facts(self) -> list[str]:
        facts = list(self.notes)
        if self.samples_per_second:
            facts.append(f"{self.samples_per_second[-1]:,.0f} samples/s in the last epoch")
        if self.trials:
            facts.append(f"choosing cost {self.choosing_seconds:.2f} s")
        facts += [f"XLA cannot compile {blocker}" for blocker in self.blockers]
        return facts


_HEADER = ("plan", "steps", "ms a step", "compile s", "difference", "", "why")


def _row(trial: PlanTrial) -> tuple[str, ...]:
    return (
        trial.plan,
        str(trial.steps_per_call),
        "" if trial.step_seconds is None else f"{1000 * trial.step_seconds:.3f}",
        f"{trial.compile_seconds:.1f}" if trial.compile_seconds else "",
        "" if trial.difference is None else f"{trial.difference:.0e}",
        trial.status,
        trial.reason,
    )


def _bar(trial: PlanTrial, slowest: float) -> str:
    if not trial.step_seconds or not slowest:
        return ""
    width = max(1, round(120 * trial.step_seconds / slowest))
    return f'<div style="background:#4a9;height:0.8em;width:{width}px"></div>'


def draw_bars(ax: Any, seconds: Mapping[str, float], label: str, marked: str = "") -> Any:
    """Draws named times as bars, in milliseconds, the marked one green; returns matplotlib's axes."""
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(6, 2.5))
    colors = ["tab:green" if name == marked else "tab:gray" for name in seconds]
    ax.barh(list(seconds), [1000 * value for value in seconds.values()], color=colors)
    ax.set_xlabel(label)
    ax.invert_yaxis()
    return ax


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table for a terminal, columns padded to their widest cell."""
    body = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in body) for i in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body]
