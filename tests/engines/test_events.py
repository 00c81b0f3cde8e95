"""Which callbacks must see every batch."""

from __future__ import annotations

import pytest

import keras_speedup as ks
from keras_speedup.engines.events import names_of_those, needs_every_batch
from keras_speedup.flavor import keras

callbacks = keras.callbacks


class Counts(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class Says(Counts):
    every_batch = False


class Checkpoint(callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(
    ("callback", "needs"),
    [
        (callbacks.EarlyStopping(), False),
        (callbacks.History(), False),
        (callbacks.ProgbarLogger(), False),
        (callbacks.ModelCheckpoint("a.keras"), False),
        (callbacks.ModelCheckpoint("a.keras", save_freq=3), True),
        (callbacks.TerminateOnNaN(), True),
        (callbacks.LambdaCallback(on_epoch_end=lambda *_: None), False),
        (callbacks.LambdaCallback(on_train_batch_end=lambda *_: None), True),
        (callbacks.LambdaCallback(on_train_batch_begin=lambda *_: None), True),
        (Counts(), True),
        (Says(), False),
        (Checkpoint("a.keras"), True),
        (ks.GPUMemoryGrowth(), False),
        (ks.ThroughputLogger(), False),
        (ks.StepProfiler("logs"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_callbacks_that_act_at_batches_need_every_one(callback, needs):
    assert needs_every_batch(callback, "train") is needs


def test_those_that_need_every_batch_are_named():
    assert names_of_those([Counts(), callbacks.History(), Says()], "train") == ["Counts"]
