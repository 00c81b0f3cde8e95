"""The report, in a terminal, a notebook, JSON and a picture."""

from __future__ import annotations

import json

import keras_speedup as ks
from keras_speedup.plans.trial import PlanTrial

REPORT = ks.SpeedupReport(
    flavor="tensorflow",
    plan="xla-loop",
    steps_per_call=64,
    trials=(
        PlanTrial("graph", 1, 0.002, 0.0, None, "baseline", "every other plan is compared with it"),
        PlanTrial("xla-loop", 64, 0.0002, 1.5, 1e-7, "kept", "10 times as fast as <graph>"),
        PlanTrial("xla", 64, None, 0.5, None, "failed", "XLA cannot compile Unique"),
    ),
    notes=("one step a call: Mine must see every batch",),
    blockers=("Unique (layer 'dedupe', class Dedupe)",),
    choosing_seconds=0.25,
    gain=10.0,
    samples_per_second=(1000.0, 16000.0),
)


def test_terminal_shows_every_plan_and_why():
    text = str(REPORT)
    for part in ("xla-loop, 64 steps a call, 10.0 times", "2.000", "1e-07", "16,000 samples/s", "dedupe", "Mine"):
        assert part in text


def test_notebook_shows_a_table_with_escaped_text():
    html = REPORT._repr_html_()
    assert html.count("<tr>") == 4
    assert "&lt;graph&gt;" in html
    assert "nothing" in ks.SpeedupReport()._repr_html_()


def test_dict_is_json():
    assert json.loads(json.dumps(REPORT.to_dict()))["trials"][1]["status"] == "kept"


def test_plot_draws_the_plans_that_were_timed():
    from matplotlib.figure import Figure

    axes = REPORT.plot(Figure().subplots())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["graph", "xla-loop"]
