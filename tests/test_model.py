"""Accelerated models beside plain Keras: same results, same events, whatever runs the steps."""

from __future__ import annotations

import numpy as np
import pytest

import keras_speedup as ks
from keras_speedup.errors import XlaUnsupportedError
from keras_speedup.flavor import FLAVOR, keras

layers = keras.layers
TENSORFLOW = ("tensorflow", "legacy")
PROBABILITIES = "sparse_categorical_crossentropy"


def normalized_layers():
    return [layers.Dense(16), layers.BatchNormalization(), layers.Dense(4, activation="softmax")]


def assert_same(history, other, tolerance=1e-5):
    assert history.keys() == other.keys()
    for name in history:
        np.testing.assert_allclose(history[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def assert_same_weights(model, other, tolerance=1e-5):
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def test_loss_history_equals_plain_keras(kind, make_pair, samples):
    plain, fast = make_pair(kind, optimizer="adam", metrics=["accuracy"])
    fast.compile("adam", PROBABILITIES, metrics=["accuracy"], jit_compile=False)
    settings = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0, "validation_split": 0.2}
    assert_same(plain.fit(*samples, **settings).history, fast.fit(*samples, **settings).history)
    assert_same_weights(plain, fast)


@pytest.mark.flavors(*TENSORFLOW)
@pytest.mark.parametrize("steps", ["auto", 3])
def test_loss_history_under_xla_equals_plain_keras(make_pair, samples, steps):
    plain, fast = make_pair()
    fast.compile("sgd", PROBABILITIES, jit_compile=True, steps_per_execution=steps)
    settings = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    assert_same(plain.fit(*samples, **settings).history, fast.fit(*samples, **settings).history, 1e-3)
    assert fast.speedup_report.plan == "xla"


def test_odd_last_batch_changes_no_weight(kind, make_pair, samples):
    plain, fast = make_pair(kind, normalized_layers, metrics=["accuracy"])
    x, y = samples[0][:103], samples[1][:103]
    settings = {"batch_size": 32, "epochs": 4, "shuffle": False, "verbose": 0}
    assert_same(plain.fit(x, y, **settings).history, fast.fit(x, y, **settings).history)
    assert_same_weights(plain, fast)
    assert_same(plain.evaluate(x, y, verbose=0, return_dict=True), fast.evaluate(x, y, verbose=0, return_dict=True))
    np.testing.assert_allclose(plain.predict(x, verbose=0), fast.predict(x, verbose=0), atol=1e-5)
    if FLAVOR in TENSORFLOW:
        assert len([key for key in fast._speedup._engine._steps if key[0] == "train"]) == 1


def test_the_example_of_the_readme_runs_in_any_order():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (70, 8, 8, 3)).astype("uint8")
    labels = rng.integers(0, 10, 70)
    steps = [layers.Rescaling(1 / 255), layers.RandomFlip("horizontal")]
    pipeline = ks.DataPipeline(steps, batch_size=16)
    train, valid = pipeline.dataset(images, labels), pipeline.dataset(images, labels, training=False)

    class Classifier(ks.SpeedupModel):
        def __init__(self):
            super().__init__()
            self.flat = layers.Flatten()
            self.hidden = layers.Dense(32, activation="relu")
            self.head = layers.Dense(10, activation="softmax")

        def call(self, inputs):
            return self.head(self.hidden(self.flat(inputs)))

    def functional():
        inputs = keras.Input((8, 8, 3))
        return ks.SpeedupModel(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(inputs)))

    def sequential():
        return ks.SpeedupSequential([layers.Flatten(), layers.Dense(32), layers.Dense(10, activation="softmax")])

    for make in (functional, Classifier, sequential, functional, Classifier):
        model = make()
        model.compile("adam", PROBABILITIES, metrics=["accuracy"])
        logs = [ks.ThroughputLogger(), ks.GPUMemoryGrowth()]
        history = model.fit(train, validation_data=valid, epochs=2, verbose=0, callbacks=logs).history
        assert np.isfinite(history["val_loss"]).all()
        assert min(history["samples_per_second"]) > 0
        assert min(history["memory_mb"]) > 0
        assert isinstance(model, ks.SpeedupModel | ks.SpeedupSequential)
        assert "plan" in str(model.speedup_report)


def test_class_made_functional_by_its_own_constructor_leaves_the_base_class_alone():
    class Wrapped(ks.SpeedupModel):
        def __init__(self):
            inputs = keras.Input((4,))
            super().__init__(inputs, layers.Dense(2)(inputs))

    class Net(ks.SpeedupModel):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(2)

        def call(self, inputs):
            return self.head(inputs)

    for model in (Wrapped(), Net(), Wrapped()):
        model.compile("sgd", "mse")
        model.fit(np.zeros((8, 4)), np.zeros((8, 2)), verbose=0)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_outputs_are_float32_under_a_mixed_policy(kind, make_model, samples, policy):
    ks.set_precision(policy)
    model = make_model(kind)
    model.compile("sgd", PROBABILITIES)
    model.fit(*samples, verbose=0)
    outputs = model.predict(samples[0], verbose=0)
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs.sum(1), 1.0, atol=1e-6)
    heads = [layer for layer in model._flatten_layers() if isinstance(layer, layers.Dense)]
    assert [layer.compute_dtype for layer in heads] == [policy.removeprefix("mixed_"), "float32"]


def test_float32_outputs_can_be_turned_off(samples):
    ks.set_precision("mixed_bfloat16")
    inputs = keras.Input((12,))
    model = ks.SpeedupModel(inputs, layers.Dense(4)(inputs), float32_outputs=False)
    assert model.layers[-1].compute_dtype == "bfloat16"


class Dedupe(layers.Layer):
    """Uses an operation whose result's shape depends on the data."""

    def call(self, inputs):
        import tensorflow as tf

        values, _ = tf.unique(tf.reshape(tf.cast(inputs > 0, tf.int32), [-1]))
        return inputs + tf.cast(tf.size(values), inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.flavors(*TENSORFLOW)
def test_operation_that_xla_cannot_compile_is_named_with_its_layer(samples):
    def make():
        return ks.SpeedupSequential([keras.Input((12,)), Dedupe(name="dedupe"), layers.Dense(4, activation="softmax")])

    model = make()
    model.compile("adam", PROBABILITIES)
    assert np.isfinite(model.fit(*samples, epochs=4, verbose=0).history["loss"]).all()
    assert "Unique (layer 'dedupe', class Dedupe)" in model.speedup_report.blockers
    strict = make()
    strict.compile("adam", PROBABILITIES, jit_compile=True)
    before = strict.get_weights()
    with pytest.raises(XlaUnsupportedError, match=r"Unique \(layer 'dedupe', class Dedupe\)"):
        strict.fit(*samples, epochs=1, verbose=0)
    for one, two in zip(before, strict.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.flavors(*TENSORFLOW)
def test_string_lookup_inside_the_model_is_named(samples):
    lookup = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot", name="lookup")
    import tensorflow as tf

    inputs = keras.Input((1,), dtype="string")
    model = ks.SpeedupModel(inputs, layers.Dense(4, activation="softmax")(lookup(inputs)))
    model.compile("adam", PROBABILITIES)
    words = tf.constant((list("abca") * 60)[:203])[:, None]
    model.fit(tf.data.Dataset.from_tensor_slices((words, samples[1])).batch(32), epochs=5, verbose=0)
    assert any("lookup" in blocker for blocker in model.speedup_report.blockers)


def test_odd_choices_are_refused_before_training(make_model, samples):
    model = make_model()
    with pytest.raises(ValueError, match="jit_compile must be"):
        model.compile("sgd", "mse", jit_compile="yes")
    with pytest.raises(ValueError, match="steps_per_execution must be"):
        model.compile("sgd", "mse", steps_per_execution=0)
    with pytest.raises(ValueError, match="compile"):
        model.fit(*samples)
    model.compile("sgd", PROBABILITIES)
    for size in (0, -4, 2.5, True):
        with pytest.raises(ValueError, match=f"batch_size must be a positive integer, got {size}"):
            model.fit(*samples, batch_size=size)
    with pytest.raises(ValueError, match="cardinality|samples"):
        model.fit(samples[0], samples[1][:5])
    with pytest.raises(ValueError, match="empty"):
        model.fit(samples[0][:0], samples[1][:0])


@pytest.mark.flavors("tensorflow", "jax", "torch")
def test_layer_of_the_other_keras_is_refused():
    foreign = type("Dense", (), {"__module__": "tf_keras.src.layers.core.dense", "name": "foreign", "call": None})()
    with pytest.raises(TypeError, match="tf_keras"):
        ks.SpeedupSequential([foreign])
    with pytest.raises(TypeError, match="TF_USE_LEGACY_KERAS=1"):
        ks.DataPipeline([foreign])


def test_model_is_saved_and_loaded_with_its_compile_settings(kind, make_model, samples, tmp_path):
    model = Saved() if kind == "subclassed" else make_model(kind)
    model.compile("adam", PROBABILITIES, steps_per_execution=2)
    model.fit(*samples, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, ks.SpeedupModel | ks.SpeedupSequential)
    np.testing.assert_allclose(loaded.predict(samples[0], verbose=0), model.predict(samples[0], verbose=0), atol=1e-6)
    assert loaded._speedup.choices == model._speedup.choices
    loaded.fit(*samples, verbose=0)


@keras.saving.register_keras_serializable(package="test_model")
class Saved(ks.SpeedupModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = layers.Dense(4, activation="softmax")

    def call(self, inputs):
        return self.head(inputs)


def test_to_keras_is_a_plain_model_that_predicts_the_same(kind, make_model, samples):
    model = make_model(kind)
    plain = model.to_keras()
    assert not any("keras_speedup" in cls.__module__ for cls in type(plain).__mro__)
    np.testing.assert_allclose(plain.predict(samples[0], verbose=0), model.predict(samples[0], verbose=0), atol=1e-6)


def test_speedup_keeps_weights_optimizer_and_settings_and_the_original_works(kind, make_model, samples):
    model = make_model(kind, plain=True)
    model.compile("adam", PROBABILITIES, metrics=["accuracy"])
    expected = model.fit(*samples, verbose=0).history
    fast = ks.speedup(model)
    np.testing.assert_allclose(fast.predict(samples[0], verbose=0), model.predict(samples[0], verbose=0), atol=1e-6)
    history = fast.fit(*samples, epochs=3, verbose=0).history
    assert sorted(history) == sorted(expected)
    assert int(fast.optimizer.iterations) == 4 * 7
    model.fit(*samples, verbose=0)
    assert ks.speedup(fast) is fast
    with pytest.raises(TypeError, match="speedup takes a model"):
        ks.speedup("model")


def test_run_eagerly_is_honoured_and_reported(make_model, samples):
    model = make_model()
    model.compile("sgd", PROBABILITIES, run_eagerly=True)
    model.fit(*samples, verbose=0)
    assert "run_eagerly" in str(model.speedup_report)


def test_report_is_empty_but_valid_before_fit(make_model):
    report = make_model().speedup_report
    assert report.to_dict()["trials"] == ()
    assert "nothing" in str(report)


def test_predict_with_every_number_of_rows(make_pair, samples):
    plain, fast = make_pair()
    for rows in (1, 2, 3, 7, 31, 32, 33, 100, 203):
        outputs = fast.predict(samples[0][:rows], verbose=0)
        assert outputs.shape == (rows, 4)
        np.testing.assert_allclose(outputs, plain.predict(samples[0][:rows], verbose=0), atol=1e-5)
    if FLAVOR == "jax":
        step = next(step for key, step in fast._speedup._engine._steps.items() if key[0] == "predict")
        assert step.jitted._cache_size() <= 6
    if FLAVOR in TENSORFLOW:
        assert len([key for key in fast._speedup._engine._steps if key[0] == "predict"]) == 1


def test_dict_inputs_and_several_outputs(samples):
    def make(base):
        keras.utils.set_random_seed(3)
        one, two = keras.Input((4,), name="one"), keras.Input((8,), name="two")
        joined = layers.Concatenate()([one, two])
        outputs = {"a": layers.Dense(1, name="a")(joined), "b": layers.Dense(4, activation="softmax", name="b")(joined)}
        model = base({"one": one, "two": two}, outputs)
        model.compile("sgd", loss={"a": "mse", "b": PROBABILITIES})
        return model

    x = {"one": samples[0][:, :4], "two": samples[0][:, 4:]}
    y = {"a": samples[0][:, :1], "b": samples[1]}
    plain, fast = make(keras.Model), make(ks.SpeedupModel)
    settings = {"epochs": 3, "shuffle": False, "verbose": 0}
    assert_same(plain.fit(x, y, **settings).history, fast.fit(x, y, **settings).history, 1e-4)
    predicted = fast.predict(x, verbose=0)
    np.testing.assert_allclose(predicted["b"], plain.predict(x, verbose=0)["b"], atol=1e-5)


def test_class_weight_and_sample_weight_keep_their_meaning(make_pair, samples):
    weights = np.random.default_rng(1).random(203).astype("float32")
    for extra in ({"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}}, {"sample_weight": weights}):
        plain, fast = make_pair(weighted_metrics=["accuracy"])
        settings = dict(batch_size=32, epochs=3, verbose=0, shuffle=False, **extra)
        assert_same(plain.fit(*samples, **settings).history, fast.fit(*samples, **settings).history)


@pytest.mark.flavors(*TENSORFLOW)
def test_dropout_draws_the_same_numbers_on_uncompiled_plans(make_pair, samples):
    def dropping():
        keras.utils.set_random_seed(5)
        return [layers.Dense(16), layers.Dropout(0.5), layers.Dense(4, activation="softmax")]

    plain, fast = make_pair("functional", dropping)
    settings = {"batch_size": 32, "epochs": 4, "verbose": 0, "shuffle": False}
    keras.utils.set_random_seed(9)
    expected = plain.fit(*samples, **settings).history
    keras.utils.set_random_seed(9)
    if FLAVOR == "tensorflow":
        assert_same(expected, fast.fit(*samples, **settings).history)
    else:  # Keras 2 draws from one stream of the process, which the trace of a step takes part in
        assert np.isfinite(fast.fit(*samples, **settings).history["loss"]).all()


def test_shuffled_arrays_are_seen_whole_and_in_a_new_order_each_epoch():
    seen = []

    class Watch(ks.SpeedupSequential):
        pass

    x = np.arange(67, dtype="float32")[:, None]
    model = Watch([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    feed = model._speedup._ready().host.feed(x, x, batch_size=8, shuffle=True)
    for _ in range(3):
        stream, rows = feed.stream(), []
        while blocks := stream.read(3):
            rows += [row for block in blocks for row in np.asarray(block.leaves[0])[:, 0]]
        seen.append(rows)
    assert all(sorted(rows) == list(range(67)) for rows in seen)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.flavors(*TENSORFLOW)
def test_loss_is_scaled_where_a_layer_computes_in_float16(samples):
    inputs = keras.Input((12,))
    hidden = layers.Dense(8, dtype="mixed_float16")(inputs)
    model = ks.SpeedupModel(inputs, layers.Dense(4, activation="softmax", dtype="float32")(hidden))
    model.compile("sgd", PROBABILITIES)
    model.fit(*samples, epochs=2, verbose=0)
    assert "LossScale" in type(model.optimizer).__name__
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_arguments_may_be_given_by_position_as_in_keras(make_model, samples):
    model = make_model()
    model.compile("sgd", PROBABILITIES)
    history = model.fit(samples[0], samples[1], 50, 2, 0)
    assert int(model.optimizer.iterations) == 2 * 5
    assert len(history.history["loss"]) == 2
    assert np.isfinite(model.evaluate(samples[0], samples[1], 50, 0))
    assert model.predict(samples[0], 50, 0).shape == (203, 4)
    with pytest.raises(TypeError, match="epoch"):
        model.fit(*samples, epoch=2)


def test_each_shape_of_data_finds_its_own_plan(make_model, samples):
    model = make_model()
    model.compile("sgd", PROBABILITIES)
    for size in (8, 32, 8):
        model.fit(*samples, batch_size=size, epochs=8, verbose=0)
        assert model.speedup_report.trials[0].status == "baseline"
    assert len({key for key in model._speedup._tuners if key.startswith("train")}) == 2
