"""Memory: growth where it is possible, figures everywhere, and a warning where it only rises."""

from __future__ import annotations

import sys

import pytest

import keras_speedup as ks
from keras_speedup.callbacks import memory
from keras_speedup.errors import SpeedupWarning
from keras_speedup.flavor import keras


def test_memory_in_use_is_logged(make_model, samples):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(*samples, epochs=2, callbacks=[ks.GPUMemoryGrowth()], verbose=0).history
    assert all(
        0 < used <= peak * 1.01 for used, peak in zip(history["memory_mb"], history["memory_peak_mb"], strict=True)
    )


def test_without_the_resource_module_of_unix_there_is_no_peak(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory.peak_bytes() == 0
    assert memory.memory_bytes()[0] >= 0


class LateTensorFlow:
    """TensorFlow with two GPUs that are in use already."""

    class config:
        LogicalDeviceConfiguration = staticmethod(lambda memory_limit: memory_limit)

        class experimental:
            @staticmethod
            def set_memory_growth(gpu, on):
                raise RuntimeError("Physical devices cannot be modified after being initialized")

        @staticmethod
        def list_physical_devices(kind):
            return ["GPU:0", "GPU:1"]

        @staticmethod
        def set_logical_device_configuration(gpu, limits):
            raise RuntimeError("Virtual devices cannot be modified after being initialized")


@pytest.mark.parametrize("limit_mb", [None, 1000])
def test_too_late_is_one_warning_with_the_line_to_add(limit_mb):
    with pytest.warns(SpeedupWarning, match=r"configure\(memory_growth=True\)") as caught:
        memory._turn_on(LateTensorFlow, limit_mb)
    assert len(caught) == 1


def test_growth_is_turned_on_for_every_gpu():
    done = []

    class Early(LateTensorFlow):
        class config(LateTensorFlow.config):
            class experimental:
                set_memory_growth = staticmethod(lambda gpu, on: done.append((gpu, on)))

    memory._turn_on(Early, None)
    assert done == [("GPU:0", True), ("GPU:1", True)]


def test_rising_memory_is_warned_of_with_figures(monkeypatch):
    use = iter(range(100 * 2**20, 300 * 2**20, 10 * 2**20))
    monkeypatch.setattr(memory, "memory_bytes", lambda: (next(use), 2**30, 0))
    callback = ks.GPUMemoryGrowth()
    callback.set_model(keras.Sequential())
    callback.on_train_begin()
    for epoch in range(5):
        callback.on_epoch_end(epoch, {})
    with pytest.warns(SpeedupWarning, match="from 100 to 150 MB"):
        callback.on_epoch_end(5, {})


@pytest.mark.parametrize(("use", "rising"), [([1, 2, 3], True), ([1, 2, 2], False), ([100, 101, 102], False)])
def test_noise_is_no_rise(use, rising):
    assert memory.rises(use) is rising


def test_odd_limit_is_refused():
    with pytest.raises(ValueError, match="limit_mb must be a positive number of megabytes, got -1"):
        ks.GPUMemoryGrowth(limit_mb=-1)
