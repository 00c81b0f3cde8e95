"""Every claim of speed, beside plain Keras, the usual tips, an expert's grid, Keras on JAX and PyTorch.

    python benchmarks/run.py --quick          # five workloads, three contenders, about 5 minutes on 2 cores
    python benchmarks/run.py                  # all of them, under an hour
    python benchmarks/run.py --workload cnn_28 --contender plain speedup --rounds 5

Each training has a process of its own. Plain Keras trains for `--seconds` first and so says how many epochs that is; in
each round every contender trains as many, in turn, in the other order every other round. Contenders whose packages are
not installed are left out, and said to be. Writes results.json, results.png and RESULTS.md beside this file (or into
`--out`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, mean, median, stdev
from time import perf_counter
from typing import Any

from contenders import CONTENDERS, runs
from workloads import WORKLOADS

HERE = Path(__file__).parent
QUICK_WORKLOADS = ("digits_mlp", "cnn_28", "lstm_tokens", "wide_and_deep", "serving")
QUICK_CONTENDERS = ("plain", "tips", "speedup")
PACKAGES = ("keras-speedup", "keras", "tf-keras", "tensorflow", "tensorflow-cpu", "jax", "torch", "numpy")
#: Lengths of plain Keras, in seconds, at which the whole `fit` is compared.
LENGTHS = (1, 5, 20, 60)
#: Student's t for a two-sided 95% interval, by the number of rounds.
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def measure(workload: str, contender: str, *how: str) -> dict[str, Any]:
    """Trains once, in a process of its own; returns what it measured, or `{"error": ...}`."""
    line = [sys.executable, str(HERE / "contenders.py"), workload, contender, *how]
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **CONTENDERS[contender].environment}
    began = perf_counter()
    try:
        done = subprocess.run(line, capture_output=True, text=True, env=settings, timeout=600)
    except subprocess.TimeoutExpired:
        return {"error": "did not end within 600 s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": perf_counter() - began}


def ratio(rounds: list[dict[str, Any]], plain: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Returns the ratio to plain Keras: geometric mean over the rounds, and its 95% interval where there are two."""
    logs = [math.log(mine[key] / theirs[key]) for mine, theirs in zip(rounds, plain, strict=False)]
    middle = mean(logs)
    found = {"ratio": math.exp(middle)}
    if len(logs) in STUDENT:
        half = STUDENT[len(logs)] * stdev(logs) / math.sqrt(len(logs))
        found |= {"low": math.exp(middle - half), "high": math.exp(middle + half)}
    return found


def whole_fits(mine: list[list[float]], plain: list[list[float]]) -> dict[str, float]:
    """Returns the ratio of the whole `fit`, tracing, compiling and choosing included, by plain Keras's seconds.

    Args:
        mine: For each round, the seconds from the start of `fit` to the end of each epoch.
        plain: The same of plain Keras.
    """
    found: dict[str, list[float]] = {}
    for ours, theirs in zip(mine, plain, strict=False):
        for length in LENGTHS:
            epoch = next((index for index, second in enumerate(theirs) if second >= length), None)
            if epoch is not None and epoch < len(ours):
                found.setdefault(str(length), []).append(theirs[epoch] / ours[epoch])
    return {length: geometric_mean(ratios) for length, ratios in found.items()}


def run_workload(name: str, contenders: list[str], arguments: argparse.Namespace, tick: Any) -> dict[str, Any]:
    """Returns, for each contender, what its rounds measured."""
    measured: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    tick(f"{name}: plain Keras for {arguments.seconds:g} s")
    first = measure(name, "plain", "--seconds", str(arguments.seconds))
    if "error" in first:
        return {"plain": {"error": first["error"]}}
    how = ("--epochs", str(first["epochs"]), "--limit-seconds", str(3 * arguments.seconds))
    for index in range(arguments.rounds):
        for contender in contenders if index % 2 == 0 else contenders[::-1]:
            tick(f"{name}: {contender}, round {index + 1} of {arguments.rounds}")
            measured[contender].append(measure(name, contender, *how))
    results: dict[str, Any] = {}
    for contender, rounds in measured.items():
        errors = [found["error"] for found in rounds if "error" in found]
        if errors:
            results[contender] = {"error": errors[0]}
            continue
        keys = ("samples_per_second", "fit_seconds", "first_step_seconds", "peak_bytes")
        middle = {key: median(found[key] for found in rounds) for key in keys}
        last = rounds[-1]
        results[contender] = {**middle, "metric": last["metric"], "plan": last["plan"], "epochs": last["epochs"]}
    for contender, found in results.items():
        if "error" not in found and "error" not in results["plain"]:
            found["speed"] = ratio(measured[contender], measured["plain"], "samples_per_second")
            ends = ([one["epoch_ends"] for one in measured[name]] for name in (contender, "plain"))
            found["fit"] = whole_fits(*ends)
    return results


def environment(arguments: argparse.Namespace, left_out: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python benchmarks/run.py", *sys.argv[1:]]).replace(f" --out {arguments.out}", ""),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores",
        "packages": found,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "left_out": left_out,
    }


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if "error" in found:
        return "failed"
    speed = found["speed"]
    spread = f" ({speed['low']:.2f} to {speed['high']:.2f})" if "low" in speed else ""
    return f"{found['samples_per_second']:,.0f}/s, **{speed['ratio']:.2f}**{spread}"


def geometric_means(workloads: dict[str, Any], contender: str, key: str = "speed") -> float | None:
    ratios = [found[contender][key]["ratio"] for found in workloads.values() if key in found.get(contender, {})]
    return geometric_mean(ratios) if ratios else None


def figures(results: dict[str, Any]) -> str:
    """Returns keras_speedup beside plain Keras, as the README shows it."""
    lines = [
        "| workload | plain Keras | keras_speedup | ratio | whole `fit` | final metric | plan |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results["workloads"].items():
        plain, fast = found.get("plain", {}), found.get("speedup", {"error": ""})
        if "error" in plain or "error" in fast:
            continue
        metric = "" if fast["metric"] is None else f"{plain['metric']:.3g} / {fast['metric']:.3g}"
        whole = ", ".join(f"{value:.2f}x at {length} s" for length, value in fast["fit"].items())
        lines.append(
            f"| {name} | {plain['samples_per_second']:,.0f}/s | {fast['samples_per_second']:,.0f}/s "
            f"| {fast['speed']['ratio']:.2f}x | {whole} | {metric} | {fast['plan']} |"
        )
    return "\n".join(lines)


def as_markdown(results: dict[str, Any]) -> str:
    """Returns RESULTS.md."""
    about, workloads = results["environment"], results["workloads"]
    contenders = [name for name in CONTENDERS if any(name in found for found in workloads.values())]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    lines = [
        "# Results",
        "",
        f"`{about['command']}`, {about['date']}, Python {about['python']}, {about['machine']}; {packages}.",
        "",
        "Training rows a second in the steady state (the median of the later half of the epochs; for `serving`, rows",
        "predicted), and in bold the ratio to plain Keras in the same round, with its 95% interval over the rounds.",
        f"Plain Keras trains for {about['seconds']:g} s, the others for as many epochs; {about['rounds']} rounds.",
        "",
        *(f"- `{name}`: {CONTENDERS[name].says}" for name in contenders),
        *(f"- `{name}` was left out: {why}" for name, why in about["left_out"].items()),
        "",
        f"| workload | {' | '.join(contenders)} |",
        "| --- |" + " --- |" * len(contenders),
    ]
    for name, found in workloads.items():
        lines.append(f"| {name} | {' | '.join(cell(found.get(contender)) for contender in contenders)} |")
    means = [geometric_means(workloads, contender) for contender in contenders]
    lines.append(f"| geometric mean | {' | '.join(f'**{value:.2f}**' if value else '' for value in means)} |")
    lines += ["", "## keras_speedup beside plain Keras", "", figures(results), ""]
    if missed := results.get("missed"):
        lines += ["## What is missed, and why", "", *(f"- {text}" for text in missed), ""]
    failed = [
        f"- {name}, `{contender}`: {found['error']}"
        for name, all_of_them in workloads.items()
        for contender, found in all_of_them.items()
        if "error" in found
    ]
    return "\n".join([*lines, *(["## Failed", "", *failed, ""] if failed else [])])


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    workloads = results["workloads"]
    contenders = [name for name in CONTENDERS if name != "plain" and any(name in found for found in workloads.values())]
    figure = Figure(figsize=(8, 1.2 + 0.18 * len(workloads) * (len(contenders) + 1)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(len(contenders), 1)
    for index, contender in enumerate(contenders):
        places = [
            (place + index * height, found[contender]["speed"]["ratio"])
            for place, found in enumerate(workloads.values())
            if "speed" in found.get(contender, {})
        ]
        axes.barh([place for place, _ in places], [value for _, value in places], height, label=contender)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(workloads))], list(workloads))
    axes.set_xscale("log")
    axes.set_xlabel("samples a second, plain Keras = 1")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, metavar="NAME")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--seconds", type=float, help="of plain Keras (default 10, quick 5)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--update", action="store_true", help="keep what results.json has of other contenders")
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or (5.0 if arguments.quick else 10.0)
    workloads = arguments.workload or (QUICK_WORKLOADS if arguments.quick else WORKLOADS)
    wanted = arguments.contender or (QUICK_CONTENDERS if arguments.quick else CONTENDERS)
    wanted = ["plain", *(name for name in wanted if name != "plain")]
    missing = {name: [need for need in CONTENDERS[name].needs if find_spec(need) is None] for name in wanted}
    left_out = {name: f"{' and '.join(needs)} not installed" for name, needs in missing.items() if needs}
    contenders = [name for name in wanted if name not in left_out]
    for name, why in left_out.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    plan = {name: [one for one in contenders if runs(WORKLOADS[name], CONTENDERS[one])] for name in workloads}
    total, done = sum(1 + arguments.rounds * len(names) for names in plan.values()), 0

    def tick(label: str) -> None:
        nonlocal done
        full = 30 * done // total
        print(f"[{'#' * full}{'.' * (30 - full)}] {done:3d}/{total}  {label}", file=sys.stderr, flush=True)
        done += 1

    results: dict[str, Any] = {"environment": environment(arguments, left_out), "workloads": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.update:
        before = json.loads((arguments.out / "results.json").read_text(encoding="utf-8"))
        results = {**before, "environment": results["environment"]}
        results["environment"]["command"] = f"{before['environment']['command']}; {results['environment']['command']}"
    for name, names in plan.items():
        results["workloads"].setdefault(name, {}).update(run_workload(name, names, arguments, tick))
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "RESULTS.md").write_text(as_markdown(results), encoding="utf-8")
    if find_spec("matplotlib") is not None:
        draw(results, arguments.out / "results.png")
    print(figures(results))


if __name__ == "__main__":
    main()
