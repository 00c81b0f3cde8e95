"""Which policy a machine gets, when the loss is scaled, and what makes a mixed policy be adopted."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_speedup as ks
from keras_speedup import precision
from keras_speedup.flavor import FLAVOR, KERAS_MAJOR, flatten_layers, keras
from keras_speedup.heads import make_outputs_float32
from keras_speedup.precision import Device, PrecisionTrial, best_precision, choose_precision

CPU, TPU = Device("CPU"), Device("TPU")


def gpu(major, minor):
    return Device("GPU", (major, minor))


@pytest.mark.parametrize(
    ("devices", "flags", "policy", "reason"),
    [
        ([CPU], [], "float32", "no units for half precision"),
        ([CPU], ["avx2", "avx512f"], "float32", "no units for half precision"),
        ([CPU], ["avx2", "amx_tile"], "float32", "no units for half precision"),
        ([CPU], ["avx512_bf16"], "mixed_bfloat16", "avx512_bf16"),
        ([CPU], ["amx_bf16", "avx512_bf16"], "mixed_bfloat16", "amx_bf16, avx512_bf16"),
        ([TPU] * 8, [], "mixed_bfloat16", "TPU"),
        ([gpu(6, 1)], ["amx_bf16"], "float32", "6.1 has no units"),
        ([gpu(7, 0)], [], "mixed_float16", "7.0 multiplies float16"),
        ([gpu(7, 5)], ["amx_bf16"], "mixed_float16", "7.5 multiplies float16"),
        ([gpu(8, 0)], [], "mixed_bfloat16", "8.0 multiplies bfloat16"),
        ([gpu(9, 0), gpu(9, 0)], [], "mixed_bfloat16", "9.0 multiplies bfloat16"),
        ([gpu(12, 0)], [], "mixed_bfloat16", "12.0 multiplies bfloat16"),
        ([gpu(9, 0), gpu(7, 5)], [], "mixed_float16", "7.5"),
        ([gpu(9, 0), gpu(6, 0)], [], "float32", "6.0"),
        ([Device("GPU")], ["amx_bf16"], "float32", "does not say"),
        ([gpu(9, 0), Device("GPU")], [], "float32", "does not say"),
    ],
)
def test_the_weakest_device_that_trains_decides(devices, flags, policy, reason):
    choice = best_precision(devices, flags)
    assert choice.policy == policy
    assert reason in choice.reason


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_set_precision_sets_the_global_policy_and_returns_it(name):
    assert ks.set_precision(name) == name
    assert keras.layers.Dense(1).dtype_policy.name == name


def test_auto_is_what_the_devices_and_flags_of_this_machine_say():
    expected = best_precision(precision.devices(), precision.cpu_flags()).policy
    assert ks.set_precision("auto") == expected == keras.layers.Dense(1).dtype_policy.name


@pytest.mark.parametrize("name", ["float16", "mixed", "AUTO", "", None, 16])
def test_an_unknown_precision_is_refused_with_the_ones_there_are(name):
    with pytest.raises(ValueError, match="precision must be one of 'auto', 'float32', .*got"):
        ks.set_precision(name)
    assert keras.layers.Dense(1).dtype_policy.name == "float32"


@pytest.mark.parametrize(
    ("described", "device"),
    [
        (SimpleNamespace(platform="gpu", compute_capability="9.0"), gpu(9, 0)),
        (SimpleNamespace(platform="cuda", compute_capability="12.1"), gpu(12, 1)),
        (SimpleNamespace(platform="rocm", compute_capability="gfx90a"), Device("GPU")),
        (SimpleNamespace(platform="gpu"), Device("GPU")),
        (SimpleNamespace(platform="tpu"), TPU),
        (SimpleNamespace(platform="cpu"), CPU),
    ],
)
def test_jax_describes_its_devices(described, device):
    assert precision._jax_device(described) == device


# Loss scaling


def model_of(*policies):
    sizes = [keras.layers.Dense(4, dtype=policy) for policy in policies]
    return keras.Sequential([keras.Input((3,)), *sizes])


@pytest.mark.parametrize(
    ("policies", "needed"),
    [
        (("float32", "float32"), False),
        (("mixed_float16", "float32"), True),
        (("float32", "mixed_float16"), True),
        (("mixed_bfloat16", "float32"), False),
    ],
)
def test_the_layers_decide_on_loss_scaling_and_not_the_models_own_policy(policies, needed):
    model = model_of(*policies)
    assert model.dtype_policy.name == "float32"
    assert precision.needs_loss_scaling(model) is needed


def test_a_frozen_float16_layer_needs_no_loss_scaling():
    model = model_of("mixed_float16", "float32")
    model.layers[0].trainable = False
    assert not precision.needs_loss_scaling(model)


def test_an_optimizer_is_scaled_once():
    once = precision.scaled(keras.optimizers.SGD(0.5))
    assert precision.scales_loss(once)
    assert precision.scaled(once) is once
    assert precision.scaled(None) is None


@pytest.mark.flavors("tensorflow", "jax", "torch")
def test_a_scale_that_the_user_chose_stays():
    mine = keras.optimizers.SGD(0.5, loss_scale_factor=128.0)
    assert precision.scaled(mine) is mine


def test_a_loss_that_overflows_float16_trains_with_scaling_and_no_weight_is_nan():
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    make_outputs_float32(model)
    model.compile(precision.scaled(keras.optimizers.SGD(1e-6)), "mse")
    x, y = np.ones((32, 3), "float32"), np.full((32, 1), 300.0, "float32")  # a loss of 9e4
    history = model.fit(x, y, batch_size=4, epochs=6, verbose=0).history["loss"]
    assert 6.6e4 < history[0] < 1e5
    assert history[-1] < history[0]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_a_step_that_applies_unscaled_gradients_is_named():
    variable = keras.Variable([1.0]) if KERAS_MAJOR == 3 else tf_variable()
    optimizer = precision.scaled(keras.optimizers.SGD(0.5))
    gradient = keras.ops.ones((1,)) if KERAS_MAJOR == 3 else variable * 1.0
    if FLAVOR == "jax":
        optimizer.build([variable])

    def apply():
        if FLAVOR == "jax":
            optimizer.stateless_apply([v.value for v in optimizer.variables], [gradient], [variable.value])
        else:
            optimizer.apply_gradients([(gradient, variable)])

    attributes = set(vars(optimizer))
    with (
        pytest.raises(ValueError, match=r"Gan.train_step applies gradients of a loss that was not scaled"),
        precision.only_scaled_losses(optimizer, "Gan.train_step"),
    ):
        apply()
    with precision.only_scaled_losses(optimizer, "Gan.train_step"):
        getattr(optimizer, "scale_loss" if KERAS_MAJOR == 3 else "get_scaled_loss")(gradient)
        apply()
    assert not {"apply", "apply_gradients", "stateless_apply"} & (set(vars(optimizer)) - attributes)


def tf_variable():
    import tensorflow as tf

    return tf.Variable([1.0])


def test_keras_own_step_passes_the_watch():
    model = model_of("mixed_float16", "float32")
    model.compile(precision.scaled(keras.optimizers.SGD(0.1)), "mse")
    with precision.only_scaled_losses(model.optimizer, "Sequential.train_step"):
        model.fit(np.ones((8, 3)), np.ones((8, 4)), batch_size=4, verbose=0)


# Adopting a mixed policy


def trial(policy, step_seconds, losses):
    return PrecisionTrial(policy, step_seconds, tuple(losses))


@pytest.mark.parametrize(
    ("step_seconds", "losses", "policy", "reason"),
    [
        (0.5, [2.0, 1.01], "mixed_float16", "takes 0.50 times float32's time, the loss is within 0.3%"),
        (0.96, [2.0, 1.0], "float32", "takes 0.96 times"),
        (1.3, [2.0, 1.0], "float32", "takes 1.30 times"),
        (0.5, [2.0, 1.4], "float32", "13.3% off"),
        (0.5, [2.0, math.nan], "float32", "not finite"),
        (0.5, [math.inf, 1.0], "float32", "not finite"),
    ],
)
def test_a_mixed_policy_is_adopted_when_faster_and_its_loss_follows(step_seconds, losses, policy, reason):
    choice = choose_precision(trial("float32", 1.0, [2.0, 1.0]), trial("mixed_float16", step_seconds, losses))
    assert choice.policy == policy
    assert reason in choice.reason


positive = st.floats(1e-6, 1e6)


@given(positive, positive, st.lists(st.tuples(positive, st.floats(allow_nan=True)), min_size=1))
def test_no_slower_and_no_infinite_policy_is_ever_adopted(plain, mixed, losses):
    ours, theirs = zip(*losses, strict=True)
    choice = choose_precision(trial("float32", plain, ours), trial("mixed_bfloat16", mixed, theirs))
    if mixed >= plain or not all(map(math.isfinite, theirs)):
        assert choice.policy == "float32"


@pytest.mark.flavors("tensorflow", "jax", "torch")
def test_a_policy_can_be_taken_on_trial_and_given_back():
    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(4, name=name) for name in "abc")])
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    before = keras.ops.convert_to_numpy(model(x))
    undo = precision.take_policy(model, "mixed_bfloat16", keep=["b"])
    assert make_outputs_float32(model) == ["c"]
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32", "float32"]
    assert not np.array_equal(keras.ops.convert_to_numpy(model(x)), before)
    undo()
    assert {layer.dtype_policy.name for layer in flatten_layers(model)} == {"float32"}
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), before)


@pytest.mark.flavors("legacy")
def test_keras_2_says_that_a_built_model_cannot_change():
    with pytest.raises(ValueError, match="has been built.*set_precision"):
        precision.take_policy(model_of("float32"), "mixed_bfloat16")


def test_devices_are_found_without_a_gpu_as_well():
    found = precision.devices()
    assert found
    assert {device.kind for device in found} <= {"CPU", "GPU", "TPU"}, FLAVOR
