"""What is trained: each workload is data, a model in any Keras, and how it is compiled.

Everything is made from what scikit-learn ships or from seeds, so that nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH_SIZE = 32
TOKENS, WORDS = 32, 2000


@dataclass(frozen=True)
class Workload:
    """One thing to train.

    Attributes:
        data: Returns `(x, y)` as arrays.
        model: Given Keras and a base class that takes `(inputs, outputs)`, returns a model.
        compile: What `compile` is given; `metrics` are named, the first is the final metric that is reported.
        flavors: The flavours that can run it.
        serves: Whether `predict` is measured on random numbers of rows, and not `fit`.
        torch: Given `torch.nn`, returns the same model for PyTorch's own loop, where there is one.
    """

    data: Callable[[], tuple[Any, Any]]
    model: Callable[[Any, Any], Any]
    compile: dict[str, Any] = field(default_factory=dict)
    flavors: tuple[str, ...] = ("tensorflow", "jax", "torch", "legacy")
    serves: bool = False
    torch: Callable[[Any], Any] | None = None


CLASSIFIER = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def digits(copies: int = 5) -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(np.tile(np.arange(1347), copies))
    return (images[order] / 16).astype("float32"), labels[order]


def digits_28() -> tuple[Any, Any]:
    x, y = digits(2)
    large = np.repeat(np.repeat(x.reshape(-1, 8, 8), 3, axis=1), 3, axis=2)
    return np.pad(large, ((0, 0), (2, 2), (2, 2)))[..., None], y


def tokens(rows: int = 2048) -> tuple[Any, Any]:
    """Words as rare as in a text (Zipf's law); the class is which of two words comes more often."""
    rng = np.random.default_rng(0)
    x = np.minimum(rng.zipf(1.3, (rows, TOKENS)), WORDS - 1).astype("int32")
    return x, ((x == 2).sum(1) > (x == 3).sum(1) + 2).astype("int32")


def next_tokens() -> tuple[Any, Any]:
    x, _ = tokens(1024)
    return x, np.roll(x, -1, axis=1)


def photos() -> tuple[Any, Any]:
    """96x96 pieces of the two photographs that scikit-learn ships; the class is the photograph."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    pictures, x, y = load_sample_images().images, [], []
    for index in range(192):
        top, left = rng.integers(0, 427 - 96), rng.integers(0, 640 - 96)
        x.append(pictures[index % 2][top : top + 96, left : left + 96])
        y.append(index % 2)
    return np.stack(x), np.array(y)


def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    numbers, kinds = rng.normal(size=(16384, 13)).astype("float32"), rng.integers(0, 1000, (16384, 8), dtype="int32")
    clicked = (numbers[:, 0] + kinds[:, 0] / 500 - 1 + rng.normal(size=16384) > 0).astype("float32")
    return {"numbers": numbers, "kinds": kinds}, clicked[:, None]


def itself() -> tuple[Any, Any]:
    x, _ = digits_28()
    return x, x


def chain(
    shape: tuple[int, ...], layers: Callable[[Any], list[Any]], dtype: str = "float32"
) -> Callable[[Any, Any], Any]:
    """Returns a maker of models that run `layers` one after another."""

    def make(keras: Any, base: Any) -> Any:
        inputs = outputs = keras.Input(shape, dtype=dtype)
        for layer in layers(keras.layers):
            outputs = layer(outputs)
        return base(inputs, outputs)

    return make


def mlp(layers: Any) -> list[Any]:
    return [
        layers.Dense(128, activation="relu"),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]


def cnn(layers: Any) -> list[Any]:
    return [
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10, activation="softmax"),
    ]


def recurrent(name: str) -> Callable[[Any], list[Any]]:
    return lambda layers: [
        layers.Embedding(WORDS, 32),
        getattr(layers, name)(32),
        layers.Dense(2, activation="softmax"),
    ]


def autoencoder(layers: Any) -> list[Any]:
    return [
        layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
    ]


def transformer(causal: bool) -> Callable[[Any, Any], Any]:
    def make(keras: Any, base: Any) -> Any:
        layers = keras.layers
        inputs = keras.Input((TOKENS,), dtype="int32")
        hidden = layers.Embedding(WORDS, 64)(inputs)
        for _ in range(1 if causal else 2):
            attended = layers.MultiHeadAttention(4, 16)(hidden, hidden, use_causal_mask=causal)
            hidden = layers.LayerNormalization()(layers.add([hidden, attended]))
            wide = layers.Dense(64)(layers.Dense(256, activation="gelu")(hidden))
            hidden = layers.LayerNormalization()(layers.add([hidden, wide]))
        if not causal:
            hidden = layers.GlobalAveragePooling1D()(hidden)
        return base(inputs, layers.Dense(WORDS if causal else 2, activation="softmax")(hidden))

    return make


def resnet18(keras: Any, base: Any) -> Any:
    layers = keras.layers

    def block(x: Any, filters: int, stride: int) -> Any:
        y = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(y))
        if stride > 1:
            x = layers.BatchNormalization()(layers.Conv2D(filters, 1, strides=stride, use_bias=False)(x))
        return layers.Activation("relu")(layers.add([x, y]))

    inputs = keras.Input((96, 96, 3))
    x = layers.RandomFlip("horizontal")(layers.Rescaling(1 / 255)(inputs))
    x = layers.Conv2D(64, 7, strides=2, padding="same", use_bias=False)(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(layers.Activation("relu")(layers.BatchNormalization()(x)))
    for filters, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        x = block(x, filters, stride)
    return base(inputs, layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def wide_and_deep(keras: Any, base: Any) -> Any:
    layers = keras.layers
    inputs = {"numbers": keras.Input((13,), name="numbers"), "kinds": keras.Input((8,), dtype="int32", name="kinds")}
    deep = layers.Flatten()(layers.Embedding(1000, 16)(inputs["kinds"]))
    deep = layers.Concatenate()([deep, inputs["numbers"]])
    for units in (128, 64):
        deep = layers.Dense(units, activation="relu")(deep)
    wide = layers.Flatten()(layers.Embedding(1000, 1)(inputs["kinds"]))
    return base(inputs, layers.Dense(1, activation="sigmoid")(layers.Concatenate()([deep, wide])))


def gan(keras: Any, base: Any) -> Any:
    """A GAN on the digits with a `train_step` of its own, which steps two optimizers."""
    import tensorflow as tf

    layers, loss = keras.layers, keras.losses.BinaryCrossentropy()

    class Gan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.maker = keras.Sequential(
                [keras.Input((16,)), layers.Dense(64, activation="relu"), layers.Dense(64, activation="sigmoid")]
            )
            self.judge = keras.Sequential(
                [keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(1, activation="sigmoid")]
            )
            self.maker_optimizer, self.judge_optimizer = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
            self.maker_optimizer.build(self.maker.trainable_variables)
            self.judge_optimizer.build(self.judge.trainable_variables)

        def call(self, inputs: Any) -> Any:
            return self.judge(inputs)

        def train_step(self, data: Any) -> Any:
            real = data[0]
            rows = tf.shape(real)[0]
            noise, ones = tf.random.normal((rows, 16)), tf.ones((rows, 1))
            with tf.GradientTape(persistent=True) as tape:
                made = self.maker(noise)
                judged = self.judge(tf.concat([real, made], 0))
                judge_loss = loss(tf.concat([ones, tf.zeros_like(ones)], 0), judged)
                maker_loss = loss(ones, judged[rows:])
            for part, optimizer, value in (
                (self.judge, self.judge_optimizer, judge_loss),
                (self.maker, self.maker_optimizer, maker_loss),
            ):
                variables = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
            return {"loss": judge_loss, "maker_loss": maker_loss}

    return Gan()


def torch_mlp(nn: Any) -> Any:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def torch_cnn(nn: Any) -> Any:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Flatten(3),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(1600, 10),
    )


def torch_recurrent(name: str) -> Callable[[Any], Any]:
    def make(nn: Any) -> Any:
        class Recurrent(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.words, self.cell = nn.Embedding(WORDS, 32), getattr(nn, name)(32, 32, batch_first=True)
                self.head = nn.Linear(32, 2)

            def forward(self, inputs: Any) -> Any:
                return self.head(self.cell(self.words(inputs))[0][:, -1])

        return Recurrent()

    return make


WORKLOADS = {
    "digits_mlp": Workload(digits, chain((64,), mlp), CLASSIFIER, torch=torch_mlp),
    "cnn_28": Workload(digits_28, chain((28, 28, 1), cnn), CLASSIFIER, torch=torch_cnn),
    "lstm_tokens": Workload(
        tokens, chain((TOKENS,), recurrent("LSTM"), "int32"), CLASSIFIER, torch=torch_recurrent("LSTM")
    ),
    "gru_tokens": Workload(
        tokens, chain((TOKENS,), recurrent("GRU"), "int32"), CLASSIFIER, torch=torch_recurrent("GRU")
    ),
    "transformer": Workload(tokens, transformer(causal=False), CLASSIFIER),
    "gpt_block": Workload(next_tokens, transformer(causal=True), CLASSIFIER),
    "resnet18_photos": Workload(photos, resnet18, CLASSIFIER),
    "wide_and_deep": Workload(
        table, wide_and_deep, {"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["accuracy"]}
    ),
    "autoencoder": Workload(itself, chain((28, 28, 1), autoencoder), {"optimizer": "adam", "loss": "mse"}),
    "gan": Workload(digits, gan, {"optimizer": "adam"}, flavors=("tensorflow", "legacy")),
    "serving": Workload(digits, chain((64,), mlp), CLASSIFIER, serves=True),
}
