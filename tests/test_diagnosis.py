"""Which of input, overhead, compute and memory holds a training, and nothing changed by looking."""

from __future__ import annotations

import json

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.diagnosis import decide


@pytest.mark.parametrize(
    ("probes", "bottleneck", "gain"),
    [
        ((0.010, 0.002, 0.002, None), "input", 5.0),
        ((0.0001, 0.002, 0.0004, None), "overhead", 5.0),
        ((0.0001, 0.002, 0.0019, None), "compute", None),
        ((0.0001, 0.002, 0.0019, 0.95), "memory", None),
    ],
)
def test_bottleneck_follows_from_the_probes(probes, bottleneck, gain):
    found = decide(*probes)
    assert found.bottleneck == bottleneck
    assert found.fixes
    assert gain is None or found.fixes[0].expected_gain == pytest.approx(gain)
    assert bottleneck in str(found)
    assert bottleneck in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["bottleneck"] == bottleneck


def test_model_and_optimizer_are_as_before(make_model, samples):
    model = make_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(*samples, verbose=0)
    before, steps = model.get_weights(), int(model.optimizer.iterations)
    batches = [(samples[0][at : at + 32], samples[1][at : at + 32]) for at in range(0, 192, 32)]
    found = ks.diagnose(model, batches, steps=8)
    assert found.bottleneck in ("input", "overhead", "compute")
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert int(model.optimizer.iterations) == steps


def test_data_that_can_be_read_once_is_refused(make_model, samples):
    model = make_model()
    with pytest.raises(ValueError, match="compiled"):
        ks.diagnose(model, [])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="only once"):
        ks.diagnose(model, iter([samples]))
