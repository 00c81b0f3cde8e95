"""What earlier runs chose: whole or not at all, and never trusted when it is another's."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_speedup.plans import memory
from keras_speedup.plans.memory import PlanMemory

CHOICE = {"plan": "xla-loop", "steps_per_call": 64}


def test_choice_comes_back_for_the_same_facts_alone(tmp_path):
    PlanMemory(["a"], tmp_path / "plans").save(CHOICE)
    assert PlanMemory(["a"], tmp_path / "plans").load()["plan"] == "xla-loop"
    assert PlanMemory(["b"], tmp_path / "plans").load() is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"key": "other", "plan": "x", "steps_per_call": 1}', '{"plan": 3}']
)
def test_damaged_or_foreign_entry_is_ignored(tmp_path, content):
    kept = PlanMemory(["a"], tmp_path)
    os.chmod(tmp_path, 0o700)
    (tmp_path / f"{kept.key}.json").write_text(content)
    assert kept.load() is None


@pytest.mark.parametrize("choice", [{"plan": "x", "steps_per_call": 0}, {"plan": "x", "steps_per_call": "4"}])
def test_entry_with_an_impossible_value_is_ignored(tmp_path, choice):
    kept = PlanMemory(["a"], tmp_path)
    os.chmod(tmp_path, 0o700)
    (tmp_path / f"{kept.key}.json").write_text(json.dumps({**choice, "key": kept.key}))
    assert kept.load() is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner on this system")
def test_folder_that_others_may_write_is_refused(tmp_path):
    kept = PlanMemory(["a"], tmp_path / "plans")
    kept.save(CHOICE)
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "plans", 0o777)
    assert kept.load() is None
    kept.save({**CHOICE, "plan": "graph"})
    os.chmod(tmp_path / "plans", 0o700)
    assert kept.load()["plan"] == "xla-loop"


def test_many_writers_leave_one_whole_entry(tmp_path):
    kept = PlanMemory(["a"], tmp_path / "plans")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: kept.save({"plan": "p" * 500, "steps_per_call": n + 1}), range(64)))
    assert kept.load()["plan"] == "p" * 500
    assert [path.suffix for path in (tmp_path / "plans").iterdir()] == [".json"]


def test_number_of_entries_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "MOST", 5)
    for number in range(12):
        PlanMemory([number], tmp_path / "plans").save(CHOICE)
    assert len(list((tmp_path / "plans").iterdir())) == 5


def test_memory_can_be_turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_SPEEDUP_CACHE", "off")
    kept = PlanMemory(["a"])
    kept.save(CHOICE)
    assert kept.load() is None
    monkeypatch.setenv("KERAS_SPEEDUP_CACHE", str(tmp_path))
    kept.save(CHOICE)
    assert kept.load()["steps_per_call"] == 64
