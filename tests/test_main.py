"""The command line: what the demo and the doctor print, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from keras_speedup import __main__ as command

SIDE_KEYS = {"samples_per_second", "accuracy", "fit_seconds"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished process of a short demo, and its picture."""
    pytest.importorskip("sklearn")
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    line = [
        sys.executable,
        "-m",
        "keras_speedup",
        "demo",
        "--json",
        "--epochs",
        "2",
        "--rounds",
        "1",
        "--plot",
        str(picture),
    ]
    return subprocess.run(line, capture_output=True, text=True), picture


def test_json_prints_one_object_and_nothing_else_on_standard_output(demo):
    process, _ = demo
    assert process.returncode == 0, process.stderr
    shown = json.loads(process.stdout)
    assert set(shown) == {"environment", "workloads"}
    assert [workload["name"] for workload in shown["workloads"]] == ["mlp", "cnn", "lstm"]
    for workload in shown["workloads"]:
        assert set(workload) == {"name", "plain", "speedup", "ratio", "plan"}
        assert set(workload["plain"]) == set(workload["speedup"]) == SIDE_KEYS
        assert workload["ratio"] == workload["speedup"]["samples_per_second"] / workload["plain"]["samples_per_second"]


def test_both_sides_learn_the_same(demo):
    for workload in json.loads(demo[0].stdout)["workloads"]:
        assert workload["plain"]["accuracy"] == pytest.approx(workload["speedup"]["accuracy"], abs=0.01)
        assert workload["plain"]["accuracy"] > 0.5


def test_progress_and_messages_go_to_standard_error(demo):
    assert "lstm, keras_speedup, round 1 of 1" in demo[0].stderr


def test_plot_draws_a_picture(demo):
    assert demo[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_table_shows_both_sides_the_ratio_and_the_plan():
    sides = command.Side(1000.0, 0.9711, 2.5), command.Side(3500.0, 0.9733, 1.25)
    rows = command.format_results([command.Comparison("mlp", *sides, ratio=3.5, plan="xla-loop")]).splitlines()
    shown = ["mlp", "1,000/s", "3,500/s", "3.50x", "97.1%", "/", "97.3%", "2.5", "/", "1.2", "xla-loop"]
    assert rows[1].split() == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--epochs", "1"], "expected a whole number of 2 or more, got '1'"),
        (["demo", "--rounds", "none"], "expected a whole number of 1 or more, got 'none'"),
        (["demo", "--plot", "picture.txt"], "ends in .png, .svg or .pdf, got 'picture.txt'"),
        (["demo", "--plot", "no/such/folder/picture.png"], "there is no folder"),
        (["dmeo"], "invalid choice: 'dmeo'"),
        ([], "required: command"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_doctor_prints_a_line_for_each_check_and_fails_only_where_something_is_broken(capsys):
    code = command.main(["doctor"])
    shown = capsys.readouterr().out
    assert shown.strip()
    assert code == int("broken" in shown)


def test_doctor_prints_its_checks_for_programs(capsys):
    code = command.main(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)
    assert {"name", "status", "detail", "fix"} == set(checks[0])
    assert code == int(any(check["status"] == "broken" for check in checks))
