"""A trace of exactly these steps."""

from __future__ import annotations

import pytest

import keras_speedup as ks


@pytest.mark.parametrize("steps", ["auto", 1, 4])
def test_calls_end_exactly_at_the_steps_asked_for(make_model, samples, tmp_path, steps):
    seen = []

    class Profiler(ks.StepProfiler):
        def _begin(self):
            self._running = True
            seen.append(("begin", self._step))

        def _end(self):
            self._running = False
            seen.append(("end", self._step))

    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    model.fit(*samples, epochs=4, callbacks=[Profiler(tmp_path, steps=(10, 15))], verbose=0)
    assert seen == [("begin", 10), ("end", 15)]


@pytest.mark.flavors("tensorflow", "legacy", "jax")
def test_trace_is_written_and_put_in_words(make_model, samples, tmp_path):
    profiler = ks.StepProfiler(tmp_path, steps=(2, 5))
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, epochs=2, callbacks=[profiler], verbose=0)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert "waiting for input" in profiler.summary


@pytest.mark.parametrize("steps", [(5, 5), (-1, 3), (7, 2)])
def test_odd_steps_are_refused(tmp_path, steps):
    with pytest.raises(ValueError, match="two numbers in order"):
        ks.StepProfiler(tmp_path, steps=steps)
