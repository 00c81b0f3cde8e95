"""A trace of exactly these steps."""

from __future__ import annotations

import pytest

import keras_speedup as ks
from keras_speedup.flavor import FLAVOR, keras

SUFFIX = ".pt.trace.json" if FLAVOR == "torch" else ".xplane.pb"


class Noted(ks.StepProfiler):
    """Notes at which steps it began and ended, and traces nothing."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _begin(self):
        self._running = True
        self.seen.append(("begin", self._step))

    def _end(self):
        self._running = False
        self.summary = "over"
        self.seen.append(("end", self._step))


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("steps", ["auto", 1, 4])
@pytest.mark.parametrize("traced", [(10, 15), (0, 1), (5, 7), (3, 14)])
def test_calls_end_exactly_at_the_steps_asked_for(make_model, samples, tmp_path, steps, traced, validation):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    profiler = Noted(tmp_path, steps=traced)
    for _ in range(2):  # an instance can be used again
        profiler.seen.clear()
        model.fit(*samples, epochs=4, validation_split=validation, callbacks=[profiler], verbose=0)
        assert profiler.seen == [("begin", traced[0]), ("end", traced[1])]


def test_plain_keras_is_traced_at_exact_steps_one_by_one(make_model, samples, tmp_path):
    model = make_model(plain=True)
    model.compile("sgd", "sparse_categorical_crossentropy")
    profiler = Noted(tmp_path, steps=(6, 9))
    model.fit(*samples, epochs=2, callbacks=[profiler], verbose=0)
    assert profiler.seen == [("begin", 6), ("end", 9)]


def test_trace_is_written_and_put_in_words(make_model, samples, tmp_path):
    profiler = ks.StepProfiler(tmp_path, steps=(2, 9))
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, epochs=2, callbacks=[profiler], verbose=0)
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(SUFFIX)]
    assert profiler.summary.startswith("7 steps in ")
    assert "waiting for input" in profiler.summary


def test_nothing_is_left_running_after_an_exception(make_model, samples, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise OverflowError

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    profiler = ks.StepProfiler(tmp_path / "first", steps=(2, 100))
    with pytest.raises(OverflowError):
        model.fit(*samples, epochs=2, callbacks=[profiler, Fails()], verbose=0)
    again = ks.StepProfiler(tmp_path / "second", steps=(2, 100))
    with pytest.raises(OverflowError):
        model.fit(*samples, epochs=2, callbacks=[again, Fails()], verbose=0)
    model.fit(*samples, callbacks=[again], verbose=0)  # ends its own old trace before it begins anew
    assert [path for path in (tmp_path / "second").rglob("*") if path.name.endswith(SUFFIX)]


@pytest.mark.parametrize("steps", [(5, 5), (-1, 3), (7, 2)])
def test_odd_steps_are_refused(tmp_path, steps):
    with pytest.raises(ValueError, match="two numbers in order"):
        ks.StepProfiler(tmp_path, steps=steps)
