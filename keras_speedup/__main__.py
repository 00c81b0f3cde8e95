"""The command line: `python -m keras_speedup demo` and `python -m keras_speedup doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import keras_speedup as ks

from . import runtime
from .flavor import FLAVOR, keras, tensorflow
from .report import table

SEED = 7
BATCH_SIZE = 32
SIDES = ("plain", "speedup")
PACKAGES = "keras-speedup keras tf-keras tensorflow tensorflow-cpu jax torch numpy scikit-learn"


@dataclass(frozen=True)
class Side:
    """What one side of a comparison reached.

    Attributes:
        samples_per_second: Training rows a second in the steady state: the median over the later half of the epochs.
        accuracy: Share of the held-out images classified rightly, 0 to 1.
        fit_seconds: The whole call of `fit`, with everything that is compiled or measured in it.
    """

    samples_per_second: float
    accuracy: float
    fit_seconds: float


@dataclass(frozen=True)
class Comparison:
    """One workload, trained by plain Keras and by keras_speedup from the same seed; `ratio` is that of their speeds."""

    name: str
    plain: Side
    speedup: Side
    ratio: float
    plan: str


def mlp(layers: Any) -> list[Any]:
    hidden = [layers.Dense(units, activation="relu") for units in (128, 64)]
    return [layers.Flatten(), *hidden, layers.Dense(10, activation="softmax")]


def cnn(layers: Any) -> list[Any]:
    return [
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]


def lstm(layers: Any) -> list[Any]:
    return [layers.LSTM(32), layers.Dense(10, activation="softmax")]


class EpochClock(keras.callbacks.Callback):  # type: ignore[misc]
    """Times whole epochs from outside, alike for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch_seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch_seconds.append(perf_counter() - self.began)


WORKLOADS: tuple[Callable[[Any], list[Any]], ...] = (mlp, cnn, lstm)


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the 8x8 digits that scikit-learn ships, for training and held out, each training image in five places.

    An image is trained on as it is and moved by one pixel up, down, left and right, so that an epoch has 211 batches
    and not 43; the 449 held-out images are left alone.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16.0).astype("float32")
    order = np.random.default_rng(SEED).permutation(len(images))
    train, held_out = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    moves = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    x = np.concatenate([np.roll(images[train], move, axis=(1, 2)) for move in moves])
    y = np.tile(labels[train], len(moves))
    mixed = np.random.default_rng(SEED).permutation(len(x))
    return (x[mixed], y[mixed]), (images[held_out], labels[held_out])


def train(side: str, layers: Callable[[Any], list[Any]], data: Any, epochs: int) -> Any:
    """Trains one model on one side; returns what it reached, and the plan that ran it."""
    (x, y), held_out = data
    keras.utils.set_random_seed(SEED)
    base = keras.Sequential if side == "plain" else ks.SpeedupSequential
    model = base([keras.Input(x.shape[1:]), *layers(keras.layers)])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    clock = EpochClock()
    began = perf_counter()
    model.fit(*_training_data(side, x, y), epochs=epochs, shuffle=False, batch_size=None, verbose=0, callbacks=[clock])
    seconds = perf_counter() - began
    _, accuracy = model.evaluate(*held_out, batch_size=256, verbose=0)
    later = clock.epoch_seconds[epochs // 2 :]
    plan = model.speedup_report.plan if side == "speedup" else "fit"
    return Side(len(x) / median(later), float(accuracy), seconds), plan


def _training_data(side: str, x: Any, y: Any) -> tuple[Any, ...]:
    """Returns what `fit` is given: the rows in one order on both sides, so that both learn the same."""
    if importlib.util.find_spec("tensorflow") is None:
        return x, y  # Keras on JAX or PyTorch alone; 32 is Keras's own batch size
    if side == "speedup":
        return (ks.DataPipeline(batch_size=BATCH_SIZE, shuffle=False).dataset(x, y),)
    return (tensorflow().data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE),)


def show_progress(done: int, total: int, label: str) -> None:
    """Prints a bar on standard error."""
    bar = "#" * (30 * done // total)
    print(f"[{bar:.<30}] {100 * done // total:3d}%  {label}", file=sys.stderr, flush=True)


def compare(epochs: int, rounds: int, data: Any) -> list[Comparison]:
    """Trains each workload on both sides in turn, `rounds` times; the figures are medians over the rounds."""
    results: list[Comparison] = []
    for layers in WORKLOADS:
        reached: dict[str, list[Side]] = {side: [] for side in SIDES}
        plan = ""
        for index in range(rounds):
            for side in SIDES if index % 2 == 0 else SIDES[::-1]:
                name = "plain Keras" if side == "plain" else "keras_speedup"
                done = len(results) * 2 * rounds + sum(map(len, reached.values()))
                label = f"{layers.__name__}, {name}, round {index + 1} of {rounds}"
                show_progress(done, len(WORKLOADS) * 2 * rounds, label)
                result, used = train(side, layers, data, epochs)
                reached[side].append(result)
                plan = used if side == "speedup" else plan
        plain, speedup = (Side(*map(median, zip(*map(astuple, reached[side]), strict=True))) for side in SIDES)
        ratio = speedup.samples_per_second / plain.samples_per_second
        results.append(Comparison(layers.__name__, plain, speedup, ratio, plan))
    return results


def environment(epochs: int, rounds: int) -> dict[str, Any]:
    """Returns what the figures depend on."""
    installed = {str(found.metadata["Name"]).lower().replace("_", "-"): found.version for found in distributions()}
    return {
        "flavor": FLAVOR,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": runtime.usable_cores(),
        "packages": {name: installed[name] for name in PACKAGES.split() if name in installed},
        "batch_size": BATCH_SIZE,
        "epochs": epochs,
        "rounds": rounds,
        "seed": SEED,
    }


def format_results(results: Sequence[Comparison]) -> str:
    """Returns the results as a table for a terminal."""
    header = ("workload", "plain Keras", "keras_speedup", "ratio", "accuracy", "fit, seconds", "plan")
    rows = []
    for result in results:
        plain, fast = result.plain, result.speedup
        speeds = [f"{side.samples_per_second:9,.0f}/s" for side in (plain, fast)]
        accuracy = f"{plain.accuracy:.1%} / {fast.accuracy:.1%}"
        seconds = f"{plain.fit_seconds:.1f} / {fast.fit_seconds:.1f}"
        rows.append((result.name, *speeds, f"{result.ratio:.2f}x", accuracy, seconds, result.plan))
    below = "samples a second in the steady state; accuracy and seconds: plain Keras / keras_speedup"
    return "\n".join([*table(header, rows), "", below])


def plot(results: Sequence[Comparison], path: Path) -> None:
    """Draws samples per second of both sides, workload by workload."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(results))
    bars = ((-0.2, "plain", "plain Keras", "#9aa5b1"), (0.2, "speedup", "keras_speedup", "#d9480f"))
    for shift, side, label, color in bars:
        heights = [getattr(result, side).samples_per_second for result in results]
        axes.bar(places + shift, heights, 0.38, label=label, color=color)
    for place, result in zip(places, results, strict=True):
        height = result.speedup.samples_per_second
        axes.annotate(f"{result.ratio:.1f}x", (place + 0.2, height), ha="center", va="bottom", fontweight="bold")
    axes.set_xticks(places, [result.name for result in results])
    axes.set_ylabel("samples a second")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def demo(arguments: argparse.Namespace) -> int:
    """Trains the same models with plain Keras and with keras_speedup, and shows both."""
    needed = ["sklearn", *(["matplotlib"] if arguments.plot else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f'demo needs {" and ".join(missing)}. Install: pip install "keras-speedup[demo]"', file=sys.stderr)
        return 2
    results = compare(arguments.epochs, arguments.rounds, digits())
    if arguments.plot:
        plot(results, arguments.plot)
    about = environment(arguments.epochs, arguments.rounds)
    if arguments.json:
        print(json.dumps({"environment": about, "workloads": list(map(asdict, results))}, indent=2))
        return 0
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items() if name != "keras-speedup")
    print(f"scikit-learn's digits, batches of {BATCH_SIZE}, {about['cpu_cores']} cores, flavour {FLAVOR}: {packages}\n")
    print(format_results(results))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Prints what this machine, these packages and these settings allow; returns 1 when something is broken."""
    checks = runtime.doctor()
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        print(runtime.format_checks(checks))
    return int(any(check.status == "broken" for check in checks))


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of {least} or more, got {text!r}")
        return int(text)

    return number


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, .svg or .pdf, got {text!r}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.absolute().parent)!r}")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m keras_speedup", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    show = commands.add_parser("demo", help=demo.__doc__, description=demo.__doc__)
    show.add_argument("--plot", type=_picture, metavar="FILE.png", help="draw samples a second of both sides")
    show.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    show.add_argument("--epochs", type=_at_least(2), default=20, help="epochs of each training (default 20)")
    show.add_argument("--rounds", type=_at_least(1), default=2, help="trainings of each side, in turn (default 2)")
    show.set_defaults(run=demo)
    check = commands.add_parser("doctor", help=doctor.__doc__, description=doctor.__doc__)
    check.add_argument("--json", action="store_true", help="print one JSON array on standard output")
    check.set_defaults(run=doctor)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
