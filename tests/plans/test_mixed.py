"""compile(precision=...): policies that are taken, measured, adopted, or given back."""

from __future__ import annotations

import math

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup import precision
from keras_speedup.flavor import FLAVOR, flatten_layers, keras
from keras_speedup.plans import mixed, rules

KERAS_3 = pytest.mark.flavors("tensorflow", "jax", "torch")


def policies(model):
    return [layer.compute_dtype for layer in flatten_layers(model)[1:] if layer.weights]


@pytest.fixture
def patient(monkeypatch):
    """Trials may cost anything, so that a short training has one."""
    monkeypatch.setattr(rules, "REGRET", math.inf)


@pytest.fixture
def fast(monkeypatch):
    """Any mixed policy counts as faster than float32."""
    monkeypatch.setattr(precision, "FASTER", math.inf)
    monkeypatch.setattr(mixed, "SLOWER", math.inf)


def compiled(make_model, kind="functional", layers=None, optimizer="sgd", **how):
    model = make_model(kind, layers) if layers else make_model(kind)
    how = {"jit_compile": False, **how}  # nothing runs beside the training, of which a trial would wait for the end
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **how)
    return model


def losses(model, samples, epochs=4, name="loss"):
    return model.fit(*samples, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history[name]


@KERAS_3
@pytest.mark.usefixtures("patient")
def test_auto_that_keeps_float32_says_so_with_the_ratio_and_changes_nothing(make_model, samples, kind, monkeypatch):
    monkeypatch.setattr(precision, "FASTER", 0.0)
    model, plain = (
        compiled(make_model, kind, optimizer="adam", precision="auto"),
        compiled(make_model, kind, None, "adam"),
    )
    plain.set_weights(model.get_weights())
    assert losses(model, samples) == losses(plain, samples)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert set(policies(model)) == {"float32"}
    reason = next(note for note in model.speedup_report.notes if note.startswith("precision"))
    assert "float32, because mixed_bfloat16 takes" in reason
    assert "times float32's time" in reason


@KERAS_3
@pytest.mark.usefixtures("patient", "fast")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_auto_moves_over_where_a_mixed_policy_is_faster_and_outputs_stay_float32(
    make_model, samples, kind, policy, monkeypatch
):
    monkeypatch.setattr(mixed, "native_precision", lambda: precision.Choice(policy, "in this test"))
    model = compiled(make_model, kind, precision="auto")
    history = losses(model, samples, epochs=6)
    assert len(history) == 6
    assert history[-1] < history[0]
    assert policies(model) == [policy.removeprefix("mixed_"), "float32"]
    outputs = model.predict(samples[0], verbose=0)
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs.sum(1), 1.0, atol=1e-6)
    assert precision.scales_loss(model.optimizer) is (policy == "mixed_float16")
    assert f"precision: {policy}, because {policy} takes" in str(model.speedup_report)


@KERAS_3
@pytest.mark.usefixtures("patient", "fast")
def test_layer_that_overflows_is_named_and_alone_kept_in_float32(make_model, samples, monkeypatch):
    class Large(keras.layers.Dense):
        def call(self, inputs):
            outputs = super().call(inputs)
            return outputs * (keras.ops.square(outputs * 0.0 + 300.0) * 1e-4)  # 9 times, where 9e4 can be held

    def layers():
        return [
            keras.layers.Dense(16, "relu"),
            Large(16, name="large"),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(4, "softmax"),
        ]

    monkeypatch.setattr(mixed, "native_precision", lambda: precision.Choice("mixed_float16", "in this test"))
    model = compiled(make_model, "sequential", layers, precision="auto")
    losses(model, samples)
    assert policies(model) == ["float16", "float32", "float16", "float32"]
    assert "mixed_float16 (large kept in float32)" in str(model.speedup_report)


@KERAS_3
@pytest.mark.usefixtures("patient", "fast")
def test_layer_that_fails_in_half_precision_is_named_and_alone_kept_in_float32(make_model, samples):
    class Picky(keras.layers.Dense):
        def call(self, inputs):
            if keras.backend.standardize_dtype(inputs.dtype) != "float32":
                raise TypeError("this layer takes float32")
            return super().call(inputs)

    def layers():
        return [Picky(16, name="picky"), keras.layers.Dense(8, "relu"), keras.layers.Dense(4, "softmax")]

    model = compiled(make_model, "functional", layers, precision="auto")
    losses(model, samples)
    assert policies(model) == ["float32", "bfloat16", "float32"]
    assert "mixed_bfloat16 (picky kept in float32)" in str(model.speedup_report)


@KERAS_3
@pytest.mark.usefixtures("patient", "fast")
def test_loss_that_does_not_follow_is_refused(make_model, samples, monkeypatch):
    monkeypatch.setattr(precision, "LOSS_TOLERANCE", 0.0)
    model = compiled(make_model, precision="auto")
    losses(model, samples)
    assert set(policies(model)) == {"float32"}
    assert "off float32's" in str(model.speedup_report)


@KERAS_3
def test_short_training_measures_no_other_precision(make_model, samples):
    model = compiled(make_model, precision="auto")
    losses(model, samples, epochs=2)
    assert "nothing else was measured" in str(model.speedup_report)


@KERAS_3
@pytest.mark.usefixtures("patient", "fast")
def test_auto_leaves_a_model_alone_that_is_mixed_already(make_model, samples):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = compiled(make_model, precision="auto")
    losses(model, samples)
    assert policies(model) == ["float16", "float32"]
    assert "layers had a mixed policy before" in str(model.speedup_report)


@pytest.mark.flavors("legacy")
@pytest.mark.usefixtures("patient", "fast")
def test_keras_2_stays_as_it_is_under_auto(make_model, samples):
    model = compiled(make_model, precision="auto")
    losses(model, samples)
    assert set(policies(model)) == {"float32"}
    assert "Keras 2 settles it when a layer is built" in str(model.speedup_report)


@KERAS_3
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_named_policy_is_taken_and_given_back(make_model, samples, kind, policy):
    model = compiled(make_model, kind, precision=policy)
    half = policy.removeprefix("mixed_")
    losses(model, samples, epochs=1)
    assert policies(model) == [half, "float32"]
    assert model.predict(samples[0], verbose=0).dtype == np.float32
    model.compile("sgd", "sparse_categorical_crossentropy", precision="float32")
    losses(model, samples, epochs=1)
    assert set(policies(model)) == {"float32"}


@pytest.mark.flavors("legacy")
def test_keras_2_takes_a_named_policy_before_the_model_is_built(samples, make_model):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4, activation="softmax")]
    model = ks.SpeedupSequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy", precision="mixed_bfloat16")
    losses(model, samples, epochs=1)
    assert policies(model) == ["bfloat16", "float32"]
    with pytest.raises(ValueError, match="has been built.*set_precision"):
        compiled(make_model, precision="mixed_bfloat16")


@pytest.mark.parametrize("name", ["float16", "mixed", 16])
def test_unknown_precision_is_refused_and_the_model_left_alone(make_model, name):
    model = make_model()
    with pytest.raises(ValueError, match="precision must be one of 'auto', 'float32', .*got"):
        model.compile("sgd", "mse", precision=name)
    assert set(policies(model)) == {"float32"}


@KERAS_3
def test_precision_is_saved_with_the_model(make_model, samples, tmp_path):
    for asked, expected in (("auto", ["float32", "float32"]), ("mixed_bfloat16", ["bfloat16", "float32"])):
        model = compiled(make_model, precision=asked)
        losses(model, samples, epochs=1)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert policies(loaded) == expected
        assert loaded.get_compile_config().get("precision") == ("auto" if asked == "auto" else None)
        np.testing.assert_allclose(
            loaded.predict(samples[0], verbose=0), model.predict(samples[0], verbose=0), atol=1e-6
        )


# Loss scaling


@KERAS_3
def test_steps_that_overflow_are_counted(samples):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = ks.SpeedupSequential([keras.Input((12,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    model.fit(samples[0], np.full(203, 300.0, "float32"), batch_size=32, epochs=3, verbose=0)
    assert "overflowed float16 and changed nothing" in str(model.speedup_report)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@KERAS_3
def test_gradients_that_are_accumulated_are_not_taken_for_overflows(samples):
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = ks.SpeedupSequential([keras.Input((12,)), keras.layers.Dense(4), keras.layers.Dense(4, "softmax")])
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2), "sparse_categorical_crossentropy")
    losses(model, samples, epochs=2)
    assert "overflowed" not in str(model.speedup_report)


def scaled_step(scale):
    """Returns a model class with a training step of its own, which scales its loss or does not."""
    if FLAVOR == "jax":
        import jax

        def gradients(model, state, x, y):
            def loss_of(trainable):
                outputs, others = model.stateless_call(trainable, state[1], x, training=True)
                loss = model.compute_loss(x, y, outputs)
                values = list(zip(model.optimizer.variables, state[2], strict=True))
                with keras.StatelessScope(state_mapping=values):
                    return (model.optimizer.scale_loss(loss) if scale else loss), (loss, others)

            return jax.value_and_grad(loss_of, has_aux=True)(state[0])

        class Own(ks.SpeedupModel):
            def train_step(self, state, data):
                (_, (loss, others)), found = gradients(self, state, *data)
                trainable, optimizer = self.optimizer.stateless_apply(state[2], found, state[0])
                return {"own": loss}, (trainable, others, optimizer, state[3])

    elif FLAVOR == "torch":

        class Own(ks.SpeedupModel):
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                loss = self.compute_loss(x, y, self(x, training=True))
                (self.optimizer.scale_loss(loss) if scale else loss).backward()
                weights = list(self.trainable_weights)
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
                return {"own": loss.detach()}

    else:
        import tensorflow as tf

        class Own(ks.SpeedupModel):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    outputs = self(x, training=True)
                    loss = self.compute_loss(x, y, outputs)
                    name = "scale_loss" if FLAVOR == "tensorflow" else "get_scaled_loss"
                    whole = getattr(self.optimizer, name)(loss) if scale else loss
                found = tape.gradient(whole, self.trainable_variables)
                if scale and FLAVOR == "legacy":
                    found = self.optimizer.get_unscaled_gradients(found)
                self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
                return {"own": loss}

    keras.mixed_precision.set_global_policy("mixed_float16")
    inputs = keras.Input((12,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = Own(inputs, keras.layers.Dense(4, "softmax")(hidden))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_step_of_the_users_own_trains_with_a_scaled_loss(samples):
    model = scaled_step(scale=True)
    history = losses(model, samples, epochs=5, name="own")
    assert precision.scales_loss(model.optimizer)
    assert history[-1] < history[0]


def test_step_of_the_users_own_that_does_not_scale_is_refused_before_it_trains(samples):
    model = scaled_step(scale=False)
    before = model.get_weights()
    with pytest.raises(ValueError, match="Own.train_step applies gradients of a loss that was not scaled"):
        losses(model, samples, epochs=1)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
