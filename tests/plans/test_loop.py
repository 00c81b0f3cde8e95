"""Events and results of whole trainings beside plain Keras: callbacks, schedules, endless and short data."""

from __future__ import annotations

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.errors import SpeedupWarning
from keras_speedup.flavor import FLAVOR, keras

layers = keras.layers
CALLBACKS = keras.callbacks
SETTINGS = {"batch_size": 32, "shuffle": False, "verbose": 0}


class Events(CALLBACKS.Callback):
    """Notes every event with the batch and the loss that it was given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch begin", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("end", batch, round(float(logs["loss"]), 3)))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("epoch end", epoch, sorted(logs)))

    def on_train_end(self, logs=None):
        self.seen.append(("train end",))


def both(make_pair, fit, **compile_args):
    """Returns what `fit` returns for plain Keras and for ours."""
    return [fit(model) for model in make_pair(**compile_args)]


@pytest.mark.parametrize("steps", ["auto", 1])
def test_callback_sees_every_batch_with_its_loss(make_pair, samples, steps):
    plain, fast = make_pair()
    fast.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
    seen = []
    for model in (plain, fast):
        events = Events()
        model.fit(*samples, epochs=3, validation_split=0.2, callbacks=[events], **SETTINGS)
        seen.append(events.seen)
    assert seen[0] == seen[1]
    assert "Events" in str(fast.speedup_report)


def test_weights_are_those_of_the_batch_inside_a_batch_hook(make_pair, samples):
    class Weights(CALLBACKS.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.noted.append(float(np.sum(self.model.get_weights()[0])))

    def fit(model):
        callback = Weights()
        callback.noted = []
        model.fit(*samples, epochs=2, callbacks=[callback], **SETTINGS)
        return callback.noted

    expected, found = both(make_pair, fit)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(set(found)) == 14


def test_checkpoints_are_saved_at_the_same_batches(make_pair, samples, tmp_path):
    names = []
    for name, model in zip(("plain", "fast"), make_pair(), strict=True):
        folder = tmp_path / name
        folder.mkdir()
        path = str(folder / "{epoch:02d}-{batch:03d}.weights.h5")
        checkpoint = CALLBACKS.ModelCheckpoint(path, save_freq=4, save_weights_only=True)
        model.fit(*samples, epochs=3, callbacks=[checkpoint], **SETTINGS)
        names.append(sorted(file.name for file in folder.iterdir()))
    assert names[0] == names[1]
    assert len(names[0]) == 5


def test_schedules_and_early_stopping_act_at_the_same_epoch(make_pair, samples):
    def fit(model):
        stop = CALLBACKS.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True)
        slower = CALLBACKS.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.05)
        schedule = CALLBACKS.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        history = model.fit(*samples, validation_split=0.3, epochs=15, callbacks=[stop, slower, schedule], **SETTINGS)
        return history.history, model.get_weights()

    (expected, plain), (found, fast) = both(make_pair, fit)
    assert expected.keys() == found.keys()
    assert len(expected["loss"]) == len(found["loss"])
    for one, two in zip(plain, fast, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3)


def test_training_can_be_stopped_between_batches(make_pair, samples):
    class Stop(CALLBACKS.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.stop_training = True

    def fit(model):
        model.fit(*samples, epochs=5, callbacks=[Stop()], **SETTINGS)
        return int(model.optimizer.iterations)

    assert both(make_pair, fit) == [3, 3]


def test_first_epoch_and_validation_frequency(make_pair, samples):
    def fit(model):
        events = Events()
        settings = {"epochs": 7, "initial_epoch": 2, "validation_freq": 2, "validation_split": 0.2}
        model.fit(*samples, callbacks=[events], **settings, **SETTINGS)
        return [event for event in events.seen if event[0].startswith("epoch")]

    expected, found = both(make_pair, fit)
    assert expected == found
    assert found[0] == ("epoch begin", 2)


def test_training_goes_on_where_it_was_interrupted(make_model, samples, tmp_path):
    class Interrupt(CALLBACKS.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def make():
        keras.utils.set_random_seed(0)
        model = make_model()
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    suffix = {} if FLAVOR == "legacy" else {"delete_checkpoint": False}
    backup = CALLBACKS.BackupAndRestore(str(tmp_path / "backup"), **suffix)
    with pytest.raises(KeyboardInterrupt):
        make().fit(*samples, epochs=5, callbacks=[backup, Interrupt()], **SETTINGS)
    again, whole = make(), make()
    events = Events()
    backup = CALLBACKS.BackupAndRestore(str(tmp_path / "backup"), **suffix)
    again.fit(*samples, epochs=5, callbacks=[backup, events], **SETTINGS)
    whole.fit(*samples, epochs=5, **SETTINGS)
    assert [event[1] for event in events.seen if event[0] == "epoch begin"] == [2, 3, 4]
    for one, two in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def batches(samples, rows=203):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((samples[0][:rows], samples[1][:rows])).batch(32)


def test_endless_data_is_cut_into_epochs_of_so_many_steps(make_pair, samples):
    def fit(model):
        model.fit(batches(samples, 192).repeat(), steps_per_epoch=7, epochs=5, verbose=0)
        return int(model.optimizer.iterations), model.get_weights()

    (plain_steps, plain), (fast_steps, fast) = both(make_pair, fit)
    assert plain_steps == fast_steps == 35
    for one, two in zip(plain, fast, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_data_that_ends_too_early_is_warned_of(make_model, samples):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.warns(SpeedupWarning, match=r"ended after 7 of the 10 steps"):
        model.fit(batches(samples), steps_per_epoch=10, epochs=1, verbose=0)


def test_generator_of_unknown_length_is_read_to_its_end_each_epoch(make_pair, samples):
    tf = pytest.importorskip("tensorflow")

    def rows():
        for at in range(0, 203, 32):
            yield samples[0][at : at + 32], samples[1][at : at + 32]

    spec = (tf.TensorSpec((None, 12)), tf.TensorSpec((None,), tf.int64))
    plain, fast = make_pair()
    expected = plain.fit(*samples, epochs=3, **SETTINGS).history
    found = fast.fit(tf.data.Dataset.from_generator(rows, output_signature=spec), epochs=3, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)


def test_sequences_of_batches_are_told_of_each_epochs_end(make_pair, samples):
    base = keras.utils.PyDataset if hasattr(keras.utils, "PyDataset") else keras.utils.Sequence

    class Data(base):
        ended = 0

        def __len__(self):
            return 7

        def __getitem__(self, index):
            rows = slice(32 * index, 32 * index + 32)
            return samples[0][rows], samples[1][rows]

        def on_epoch_end(self):
            self.ended += 1

    plain, fast = make_pair()
    one, two = Data(), Data()
    expected = plain.fit(one, epochs=3, shuffle=False, verbose=0).history
    found = fast.fit(two, epochs=3, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
    assert two.ended >= 3


@pytest.mark.flavors("tensorflow", "legacy")
def test_custom_step_with_two_optimizers_keeps_its_meaning(samples):
    import tensorflow as tf

    def build(base):
        class Gan(base):
            def __init__(self):
                super().__init__()
                self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(12)])
                self.critic = keras.Sequential([keras.Input((12,)), layers.Dense(1)])

            def compile(self, **kwargs):
                super().compile(**kwargs)
                self.makes, self.judges = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.02)

            def call(self, inputs):
                return self.critic(inputs)

            def train_step(self, data):
                x = data[0] if isinstance(data, tuple) else data
                with tf.GradientTape() as tape:
                    judged = tf.reduce_mean(self.critic(x)) - tf.reduce_mean(self.critic(self.generator(x[:, :3])))
                weights = self.critic.trainable_variables
                self.judges.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
                with tf.GradientTape() as tape:
                    made = -tf.reduce_mean(self.critic(self.generator(x[:, :3])))
                weights = self.generator.trainable_variables
                self.makes.apply_gradients(zip(tape.gradient(made, weights), weights, strict=True))
                return {"judged": judged, "made": made}

        model = Gan()
        model.compile()
        return model

    plain, fast = build(keras.Model), build(ks.SpeedupModel)
    fast.generator.set_weights(plain.generator.get_weights())
    fast.critic.set_weights(plain.critic.get_weights())
    data = tf.data.Dataset.from_tensor_slices(samples[0]).batch(32)
    expected, found = (model.fit(data, epochs=4, verbose=0).history for model in (plain, fast))
    for name in ("judged", "made"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)


def test_progress_bar_counts_every_step(make_model, samples, capsys):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(*samples, epochs=2, verbose=1)
    assert capsys.readouterr().out.count("7/7") >= 2
    model.evaluate(*samples, verbose=1)
    assert "7/7" in capsys.readouterr().out
