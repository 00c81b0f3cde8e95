"""Outputs in float32 under the mixed policies, for every way to write a model."""

from __future__ import annotations

import numpy as np
import pytest
from products import products_behind

import keras_speedup as ks
from keras_speedup import heads
from keras_speedup.errors import SpeedupWarning
from keras_speedup.flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras

layers = keras.layers
POLICIES = ("mixed_float16", "mixed_bfloat16")
FLOATS = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
IMAGES = np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype("float32")
#: Keras before 3.13 gives the layers inside a block another policy when it loads a model: what it predicts is rounded.
MINOR = tuple(int(part) for part in keras.__version__.split(".")[:2])
ROUNDING = 1e-6 if KERAS_MAJOR == 2 or MINOR >= (3, 13) else 2e-2
TOKENS = np.random.default_rng(0).integers(0, 9, (8, 5)).astype("int32")


def tokens_input():
    return keras.Input((5,), dtype="int32")


def softmax(tensor):
    """Softmax as users write it in this flavour's own library."""
    if FLAVOR == "torch":
        import torch

        return torch.softmax(tensor, -1)
    if FLAVOR == "jax":
        import jax

        return jax.nn.softmax(tensor)
    import tensorflow as tf

    return tf.nn.softmax(tensor)


def matmul(a, b):
    if KERAS_MAJOR == 3:
        return keras.ops.matmul(a, b)
    import tensorflow as tf

    return tf.matmul(a, b)


def softmax_operation(tensor):
    """Softmax as an operation of a functional model."""
    return keras.ops.softmax(tensor) if KERAS_MAJOR == 3 else softmax(tensor)


def subclassed(make_parts, call):
    """Returns a function that makes models of a new class with the given parts and `call`."""

    def make():
        model = Parts()
        model.parts = make_parts()
        for name, part in model.parts.items():
            setattr(model, name, part)
        model.run = call
        return model

    return make


class Parts(keras.Model):
    """A model whose `call` is given."""

    def call(self, inputs):
        return self.run(self, inputs)


class Block(layers.Layer):
    """A residual block, as a layer of a user with layers inside."""

    def __init__(self, size=6, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.inner = layers.Dense(size, activation="relu")
        self.outer = layers.Dense(size)

    def build(self, input_shape):
        self.inner.build(input_shape)
        self.outer.build((*input_shape[:-1], self.size))
        super().build(input_shape)

    def call(self, inputs):
        return inputs + self.outer(self.inner(inputs))

    def get_config(self):
        return {**super().get_config(), "size": self.size}


class Projected(keras.Model):
    """Ends in a matrix product with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.first = layers.Dense(5)
        self.kernel_out = self.add_weight(shape=(5, 3), name="kernel_out")

    def call(self, inputs):
        return matmul(self.first(self.hidden(inputs)), self.kernel_out)


def functional(inputs, outputs):
    return keras.Model(inputs, outputs)


def chain(*steps, inputs=None):
    inputs = tensor = keras.Input((6,)) if inputs is None else inputs
    for step in steps:
        tensor = step(tensor)
    return functional(inputs, tensor)


def sequential(*steps, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *steps])


def dense(size=4, activation=None, **kwargs):
    return layers.Dense(size, activation=activation, **kwargs)


def two_outputs():
    inputs = keras.Input((6,))
    hidden = dense(8, "relu")(inputs)
    return functional(inputs, [dense(4, "softmax")(hidden), dense(1)(hidden)])


def dict_outputs():
    inputs = keras.Input((6,))
    hidden = dense(8, "relu")(inputs)
    return functional(
        inputs, {"odds": dense(4, "softmax", name="odds")(hidden), "value": dense(1, name="value")(hidden)}
    )


def sum_of_two():
    inputs = keras.Input((6,))
    return functional(inputs, dense(4)(inputs) + dense(4)(dense(5)(inputs)))


def shared_with_inner_path():
    inputs = keras.Input((6,))
    shared = dense(6)(inputs)
    return functional(inputs, [shared, dense(4, "softmax")(dense(8)(shared))])


def nested():
    trunk = sequential(dense(8, "relu"), dense(6))
    head = sequential(dense(5), dense(4), layers.Softmax())
    return chain(trunk, head)


def nested_in_subclass():
    return subclassed(
        lambda: {"trunk": chain(dense(8), dense(6)), "end": sequential(dense(5), dense(4, "softmax"))},
        lambda self, inputs: self.end(self.trunk(inputs)),
    )()


def attention():
    inputs = tokens_input()
    embedded = layers.Embedding(9, 8)(inputs)
    attended = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    normal = layers.LayerNormalization()(layers.Add()([embedded, attended]))
    return functional(inputs, dense(4, "softmax")(layers.GlobalAveragePooling1D()(normal)))


def convolutional():
    return sequential(
        layers.Conv2D(4, 3),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(4, 1),
        layers.GlobalAveragePooling2D(),
        layers.Softmax(),
        shape=(6, 6, 2),
    )


#: name: (makes the model, its inputs, whether each row of its first output sums to 1)
TABLE = {
    "sequential": (lambda: sequential(dense(8, "relu"), dense(4, "softmax")), FLOATS, True),
    "sequential, softmax a layer": (lambda: sequential(dense(8), dense(4), layers.Activation("softmax")), FLOATS, True),
    "sequential, not built": (lambda: keras.Sequential([dense(8), dense(4), layers.Softmax()]), FLOATS, True),
    "sequential, reshaped": (lambda: sequential(dense(8), layers.Reshape((2, 4)), layers.Flatten()), FLOATS, False),
    "sequential, normalized logits": (
        lambda: sequential(dense(8), dense(4), layers.BatchNormalization(), layers.Softmax()),
        FLOATS,
        True,
    ),
    "functional": (lambda: chain(dense(8, "relu"), dense(4, "softmax")), FLOATS, True),
    "functional, two outputs": (two_outputs, FLOATS, True),
    "functional, dict outputs": (dict_outputs, FLOATS, True),
    "functional, x + y": (sum_of_two, FLOATS, False),
    "functional, softmax an operation": (lambda: chain(dense(8), dense(4), softmax_operation), FLOATS, True),
    "functional, output feeds a path": (shared_with_inner_path, FLOATS, False),
    "functional, models nested": (nested, FLOATS, True),
    "functional, block of layers last": (lambda: chain(dense(6), Block(), Block()), FLOATS, False),
    "functional, explicit float32": (lambda: chain(dense(8), dense(4, "softmax", dtype="float32")), FLOATS, True),
    "convolutional, pooled": (convolutional, IMAGES, True),
    "attention over tokens": (attention, TOKENS, True),
    "recurrent, dense at each step": (
        lambda: chain(
            layers.Embedding(9, 4),
            layers.LSTM(4, return_sequences=True),
            layers.TimeDistributed(dense()),
            inputs=tokens_input(),
        ),
        TOKENS,
        False,
    ),
    "recurrent, last": (
        lambda: chain(layers.Embedding(9, 4), layers.Bidirectional(layers.GRU(3)), inputs=tokens_input()),
        TOKENS,
        False,
    ),
    "subclassed": (
        subclassed(lambda: {"a": dense(8, "relu"), "b": dense(4, "softmax")}, lambda self, x: self.b(self.a(x))),
        FLOATS,
        True,
    ),
    "subclassed, head made first": (
        subclassed(lambda: {"a": dense(4, "softmax"), "b": dense(8)}, lambda self, x: self.a(self.b(x))),
        FLOATS,
        True,
    ),
    "subclassed, the backend's softmax": (
        subclassed(lambda: {"a": dense(8), "b": dense(4)}, lambda self, x: softmax(self.b(self.a(x)))),
        FLOATS,
        True,
    ),
    "subclassed, dict and raw sum": (
        subclassed(
            lambda: {"a": dense(4), "b": dense(4), "c": dense(3)},
            lambda self, x: {"a": self.a(x), "c": self.c(self.b(x) + self.a(x))},
        ),
        FLOATS,
        False,
    ),
    "subclassed, x + y with the input": (
        subclassed(lambda: {"a": dense(8), "b": dense(6)}, lambda self, x: x + self.b(self.a(x))),
        FLOATS,
        False,
    ),
    "subclassed, weight of its own": (Projected, FLOATS, False),
    "subclassed, blocks of layers": (
        subclassed(lambda: {"a": Block(), "b": Block(), "c": dense()}, lambda self, x: self.c(self.b(self.a(x)))),
        FLOATS,
        False,
    ),
    "subclassed, models nested": (nested_in_subclass, FLOATS, True),
}


def flat(outputs):
    if isinstance(outputs, dict):
        return [outputs[name] for name in sorted(outputs)]
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def dtype_of(tensor):
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")


def values(tensor):
    return keras.ops.convert_to_numpy(tensor) if KERAS_MAJOR == 3 else np.asarray(tensor)


def zeros_like(outputs):
    if isinstance(outputs, dict):
        return {name: zeros_like(value) for name, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        return [zeros_like(value) for value in outputs]
    return np.zeros(tuple(outputs.shape), "float32")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TABLE)
def test_outputs_their_softmax_and_their_matrix_product_are_float32(name, policy):
    make, inputs, sums_to_one = TABLE[name]
    keras.mixed_precision.set_global_policy(policy)
    model = make()
    heads.make_outputs_float32(model, inputs)
    outputs = flat(model(inputs))
    assert {dtype_of(output) for output in outputs} == {"float32"}
    if sums_to_one:
        np.testing.assert_allclose(values(outputs[0]).sum(-1), 1, atol=1e-6)
    found = products_behind(model, inputs)
    assert found and set(found) == {"float32"}
    assert any(layer.compute_dtype == policy.removeprefix("mixed_") for layer in flatten_layers(model))
    assert {layer.variable_dtype for layer in flatten_layers(model) if layer.weights} == {"float32"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TABLE)
def test_it_trains_saves_loads_and_predicts_the_same(name, policy, tmp_path):
    if FLAVOR == "jax" and (name, policy) == ("attention over tokens", "mixed_float16"):
        pytest.skip("JAX has no float16 attention on a CPU")
    make, inputs, _ = TABLE[name]
    keras.mixed_precision.set_global_policy(policy)
    model = make()
    names = heads.make_outputs_float32(model, inputs)
    targets = zeros_like(model(inputs))
    model.compile("sgd", dict.fromkeys(targets, "mse") if isinstance(targets, dict) else "mse")
    history = model.fit(inputs, targets, batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    before = flat(model(inputs))
    if isinstance(model, (Parts, Projected)):
        again = make()
        assert list(map(kind_of, heads.make_outputs_float32(again, inputs))) == list(map(kind_of, names))
        again(inputs)
        model.save_weights(tmp_path / "model.weights.h5")
        again.load_weights(tmp_path / "model.weights.h5")
    else:
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Block": Block})
        changed = heads.make_outputs_float32(again, inputs)
        assert changed == [] or any(isinstance(layer, Block) for layer in model.layers)
    for one, other in zip(before, flat(again(inputs)), strict=True):
        assert dtype_of(one) == dtype_of(other) == "float32"
        np.testing.assert_allclose(values(one), values(other), atol=ROUNDING)


def kind_of(name):
    return name.rstrip("_0123456789")


def half_layers(model):
    return {layer.name for layer in flatten_layers(model) if layer.weights and layer.compute_dtype != "float32"}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_layers_before_the_heads_stay_in_half_precision(policy):
    keras.mixed_precision.set_global_policy(policy)
    inputs = keras.Input((6,))
    shared = dense(6, name="shared")(dense(8, name="hidden")(inputs))
    model = functional(inputs, [shared, dense(name="scores")(dense(8, name="path")(shared))])
    assert sorted(heads.make_outputs_float32(model)) == ["scores", "shared"]
    assert half_layers(model) - {model.name} == {"hidden", "path"}
    assert {str(getattr(output.dtype, "name", output.dtype)) for output in model.outputs} == {"float32"}


def test_a_model_made_under_float32_is_left_alone_whatever_the_policy_is_now():
    model = sequential(dense(8), dense())
    keras.mixed_precision.set_global_policy("mixed_float16")
    assert not heads.computes_in_half(model)
    assert heads.make_outputs_float32(model) == []


def test_heads_of_a_mixed_model_change_when_the_policy_is_float32_again():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = sequential(dense(8), dense(name="scores"))
    model(FLOATS)
    keras.mixed_precision.set_global_policy("float32")
    assert heads.make_outputs_float32(model) == ["scores"]
    assert heads.make_outputs_float32(model) == []


@pytest.mark.parametrize("make", [Projected, nested_in_subclass, TABLE["subclassed"][0]])
def test_finding_the_heads_leaves_the_layers_and_the_random_state_as_they_were(make):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.utils.set_random_seed(3)
    model = make()
    model(FLOATS)
    before = [weight.numpy() if KERAS_MAJOR == 2 else np.asarray(weight) for weight in model.weights]
    nodes = [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in flatten_layers(model)]
    heads.make_outputs_float32(model, FLOATS)
    assert nodes == [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in flatten_layers(model)]
    assert not any("call" in vars(layer) for layer in flatten_layers(model))
    after = [weight.numpy() if KERAS_MAJOR == 2 else np.asarray(weight) for weight in model.weights]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.flavors("tensorflow", "jax", "torch")
def test_a_policy_map_of_its_own_is_respected():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    if not hasattr(keras.dtype_policies, "DTypePolicyMap"):
        pytest.skip("Keras before 3.4 has no policy maps")
    mine = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    model = sequential(dense(8), dense(name="scores", dtype=mine))
    assert heads.make_outputs_float32(model) == []
    assert model.get_layer("scores").compute_dtype == "bfloat16"


def test_pure_half_precision_is_no_mixed_policy_and_is_left_alone():
    model = sequential(dense(8, dtype="bfloat16"), dense(dtype="bfloat16"))
    assert heads.make_outputs_float32(model) == []


def test_a_call_that_cannot_be_traced_is_named_and_changes_nothing():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")

    class Broken(keras.Model):
        def call(self, inputs):
            raise RuntimeError("no values, no model")

    model = Broken()
    model.scores = dense()
    with pytest.warns(SpeedupWarning, match="outputs of Broken were not found.*no values, no model"):
        assert heads.make_outputs_float32(model, FLOATS) == []


def test_cast_outputs_keeps_structure_and_other_dtypes():
    half = keras.backend.cast(FLOATS, "bfloat16") if KERAS_MAJOR == 2 else keras.ops.cast(FLOATS, "bfloat16")
    outputs = heads.cast_outputs({"a": half, "b": (FLOATS, TOKENS, [half])})
    assert dtype_of(outputs["a"]) == dtype_of(outputs["b"][2][0]) == "float32"
    assert outputs["b"][0] is FLOATS and outputs["b"][1] is TOKENS


# Through SpeedupModel


@pytest.mark.parametrize("policy", POLICIES)
def test_speedup_models_need_no_word_about_it(kind, policy, make_model, tmp_path):
    keras.mixed_precision.set_global_policy(policy)
    model = make_model(kind, lambda: [dense(16, "relu"), dense(4), layers.Softmax()])
    x = np.random.default_rng(0).normal(size=(32, 12)).astype("float32")
    found = products_behind(model, x)
    assert found and set(found) == {"float32"}
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(x, np.zeros(32, int), batch_size=16, verbose=0)
    assert model.predict(x, verbose=0).dtype == np.float32
    assert half_layers(model)


def test_float32_outputs_can_be_turned_off():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    inputs = keras.Input((6,))
    model = ks.SpeedupModel(inputs, dense()(dense(8)(inputs)), float32_outputs=False)
    assert dtype_of(model(FLOATS)) == "bfloat16"


@pytest.mark.parametrize("name", ["functional", "sequential", "subclassed"])
def test_speedup_puts_the_head_of_a_finished_model_in_float32(name):
    make, inputs, _ = TABLE[name]
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = make()
    model(inputs)
    fast = ks.speedup(model)
    assert set(products_behind(fast, inputs)) == {"float32"}
    assert dtype_of(fast(inputs)) == "float32"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_speedup_model_predicts_the_same_whatever_the_policy_is_when_it_is_loaded(policy, make_model, tmp_path):
    keras.mixed_precision.set_global_policy(policy)
    model = make_model("functional", lambda: [dense(16, "relu"), dense(4, "softmax")])
    model.save(tmp_path / "model.keras")
    keras.mixed_precision.set_global_policy("float32")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.compute_dtype for layer in again.layers[1:]] == [policy.removeprefix("mixed_"), "float32"]
    x = np.random.default_rng(0).normal(size=(32, 12)).astype("float32")
    np.testing.assert_allclose(values(model(x)), values(again(x)), atol=ROUNDING)


@pytest.mark.flavors("tensorflow", "jax")
def test_float8_passes_through_untouched():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = sequential(dense(16), dense(4, name="scores"))
    for layer in model.layers:
        layer.quantize("float8")
    before = [layer.dtype_policy.name for layer in model.layers]
    assert heads.make_outputs_float32(model) == []
    assert [layer.dtype_policy.name for layer in model.layers] == before == ["float8_from_mixed_bfloat16"] * 2
