"""DataPipeline: every sample once, the right order of stages, the same numbers as by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras_speedup as ks
from keras_speedup.flavor import FLAVOR, keras, tensorflow
from keras_speedup.pipeline.arrays import array_source

tf = tensorflow()
layers = keras.layers


def rows_of(dataset):
    return np.concatenate([np.ravel(batch[1]) for batch in dataset.as_numpy_iterator()]).tolist()


def numbers(rows):
    return np.arange(rows, dtype="float32")[:, None], np.arange(rows)


SOURCES = {
    "arrays": numbers,
    "samples": lambda rows: (tf.data.Dataset.from_tensor_slices(numbers(rows)),),
    "batches": lambda rows: (tf.data.Dataset.from_tensor_slices(numbers(rows)).batch(7),),
    "generator": lambda rows: (lambda: zip(*numbers(rows), strict=True),),
}


@pytest.mark.parametrize("source", sorted(SOURCES))
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("cache", ["memory", None])
def test_every_epoch_sees_every_sample_once_in_a_new_order(source, rows, cache):
    data = ks.DataPipeline(batch_size=8, cache=cache, seed=1).dataset(*SOURCES[source](rows))
    epochs = [rows_of(data) for _ in range(3)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 31 or (epochs[0] != epochs[1] and epochs[1] != epochs[2])


def test_order_is_the_same_for_the_same_seed():
    def epochs(seed):
        data = ks.DataPipeline(batch_size=8, seed=seed).dataset(*numbers(50))
        return [rows_of(data) for _ in range(2)]

    assert epochs(3) == epochs(3) != epochs(4)
    keras.utils.set_random_seed(5)
    first = epochs(None)
    keras.utils.set_random_seed(5)
    assert epochs(None) == first


@pytest.mark.flavors("tensorflow", "legacy")  # on JAX and PyTorch, plain Keras draws an order more to build the model
def test_model_on_the_pipeline_sees_what_plain_keras_sees(make_pair, samples):
    plain, fast = make_pair()
    one, two = (ks.DataPipeline(batch_size=32, seed=4).dataset(*samples) for _ in range(2))
    expected = plain.fit(one, epochs=3, verbose=0).history
    found = fast.fit(two, epochs=3, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)


def test_validation_data_keeps_its_order_and_random_layers_do_not_draw():
    pipeline = ks.DataPipeline([layers.RandomFlip("horizontal", seed=1)], batch_size=8)
    images = np.random.default_rng(0).random((20, 4, 4, 1)).astype("float32")
    data = pipeline.dataset(images, np.arange(20), training=False)
    assert rows_of(data) == list(range(20))
    np.testing.assert_allclose(np.concatenate([x for x, _ in data.as_numpy_iterator()]), images)


def test_random_layers_draw_anew_each_epoch_and_deterministic_ones_are_applied():
    pipeline = ks.DataPipeline(
        [layers.Rescaling(2.0), layers.RandomFlip("horizontal", seed=1)], batch_size=8, shuffle=False
    )
    images = np.random.default_rng(0).random((64, 4, 4, 1)).astype("float32")
    data = pipeline.dataset(images, np.arange(64))
    first, second = (np.concatenate([x for x, _ in data.as_numpy_iterator()]) for _ in range(2))
    assert not np.array_equal(first, second)
    np.testing.assert_allclose(np.sort(first.ravel()), np.sort(2 * images.ravel()), rtol=1e-6)


@pytest.mark.parametrize(("last", "sizes"), [("keep", [8, 8, 4]), ("drop", [8, 8]), ("pad", [8, 8, 8])])
@pytest.mark.parametrize("source", ["arrays", "samples"])
def test_odd_last_batch_is_kept_dropped_or_padded(last, sizes, source):
    data = ks.DataPipeline(batch_size=8, last_batch=last).dataset(*SOURCES[source](20))
    for _ in range(2):
        assert [len(batch[0]) for batch in data.as_numpy_iterator()] == sizes
    if last == "pad":
        assert sum(float(batch[2].sum()) for batch in data.as_numpy_iterator()) == 20


def test_padding_keeps_weights_and_structures():
    x, y = {"a": np.arange(5.0), "b": np.ones((5, 2))}, {"u": np.arange(5), "v": np.arange(5)}
    weights = {"u": np.full(5, 2.0), "v": np.full(5, 3.0)}
    (batch,) = ks.DataPipeline(batch_size=8, last_batch="pad", shuffle=False).dataset(x, y, weights).as_numpy_iterator()
    assert batch[0]["b"].shape == (8, 2)
    assert batch[2]["u"].tolist() == [2] * 5 + [0] * 3
    assert batch[2]["v"].tolist() == [3] * 5 + [0] * 3


def test_layers_compute_in_the_pipelines_own_dtype():
    ks.set_precision("mixed_float16")
    pipeline = ks.DataPipeline([layers.Rescaling(0.5)], batch_size=4)
    ((x, _),) = pipeline.dataset(np.full((4, 2), 3, "uint8"), np.zeros(4)).as_numpy_iterator()
    assert x.dtype == np.float32
    assert (x == 1.5).all()


def test_pandas_frames_memory_maps_and_tensors_are_arrays(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2, 3], "b": [4.0, 5, 6]})
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="float32", shape=(3, 2))
    mapped[:] = frame.to_numpy()
    for x in (frame, mapped, tf.constant(frame.to_numpy(), tf.float32), frame.to_numpy()):
        ((found, y),) = ks.DataPipeline(batch_size=8, shuffle=False).dataset(x, frame["a"]).as_numpy_iterator()
        np.testing.assert_allclose(found, frame.to_numpy())
        assert found.dtype == np.float32
        assert len(y) == 3


def test_py_dataset_keeps_its_batches():
    base = keras.utils.PyDataset if hasattr(keras.utils, "PyDataset") else keras.utils.Sequence

    class Data(base):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return np.full((3, 2), index, "float32"), np.full(3, index)

    data = ks.DataPipeline(batch_size=3).dataset(Data())
    assert rows_of(data) == [index for index in range(5) for _ in range(3)]
    assert int(data.cardinality()) == 5


def test_tfrecords_are_parsed(tmp_path):
    path = str(tmp_path / "data.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for value in range(10):
            feature = {"v": tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    features = {"v": tf.io.FixedLenFeature([], tf.int64)}
    data = ks.DataPipeline(batch_size=4).dataset(path, features=features)
    assert sorted(v for batch in data.as_numpy_iterator() for v in batch["v"]) == list(range(10))
    with pytest.raises(ValueError, match="not found"):
        ks.DataPipeline().dataset(str(tmp_path / "none"), features=features)


@pytest.fixture
def photos(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cats", 10), ("dogs", 200)):
        (tmp_path / name).mkdir()
        for index, (mode, suffix) in enumerate((("RGB", "jpg"), ("L", "png"), ("CMYK", "jpg"), ("RGBA", "png"))):
            colour = {"RGB": (value,) * 3, "L": value, "CMYK": (0, 0, 0, 255 - value), "RGBA": (*(value,) * 3, 255)}
            image.new(mode, (12, 10), colour[mode]).save(tmp_path / name / f"{index}.{suffix}")
    return tmp_path


@pytest.mark.parametrize("cache", ["auto", "disk", None])
def test_folder_of_images_of_every_mode(photos, cache, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_SPEEDUP_CACHE", str(tmp_path / "kept"))
    pipeline = ks.DataPipeline(batch_size=3, cache=cache)
    data = pipeline.dataset(photos, image_size=(6, 8))
    for _ in range(2):
        batches = list(data.as_numpy_iterator())
        assert [x.shape for x, _ in batches] == [(3, 6, 8, 3), (3, 6, 8, 3), (2, 6, 8, 3)]
        for x, y in zip(*map(np.concatenate, zip(*batches, strict=True)), strict=True):
            assert abs(float(x.mean()) - (10, 200)[y]) < 6
    assert "images in 2 classes" in pipeline.summary()


def test_damaged_image_raises_with_its_path_or_is_skipped_and_listed(photos):
    damaged = photos / "cats" / "0.jpg"
    damaged.write_bytes(b"no image")
    with pytest.raises(Exception, match=r"0\.jpg cannot be decoded"):
        list(ks.DataPipeline().dataset(photos, image_size=(4, 4)))
    pipeline = ks.DataPipeline(on_error="skip")
    assert len(rows_of(pipeline.dataset(photos, image_size=(4, 4)))) == 7
    assert pipeline.skipped == [str(damaged)]


def test_pipeline_is_the_first_layer_of_a_saved_model(tmp_path):
    pipeline = ks.DataPipeline([layers.Rescaling(1 / 255), layers.RandomFlip("horizontal")])
    model = ks.SpeedupSequential([keras.Input((4, 4, 1)), pipeline, layers.Flatten(), layers.Dense(2)])
    images = np.random.default_rng(0).integers(0, 255, (5, 4, 4, 1)).astype("uint8")
    expected = model.predict(images, verbose=0)
    model.save(tmp_path / "served.keras")
    loaded = keras.models.load_model(tmp_path / "served.keras")
    np.testing.assert_allclose(loaded.predict(images, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"batch_size": -4}, "got -4"),
        ({"batch_size": 2.5}, "got 2.5"),
        ({"batch_size": True}, "got True"),
        ({"cache": "ram"}, "cache must be one of 'auto', 'memory', 'disk', None, got 'ram'"),
        ({"last_batch": "trim"}, "last_batch must be one of"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"placement": "gpu"}, "placement must be one of"),
    ],
)
def test_odd_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ks.DataPipeline(**arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: (np.zeros((5, 2)), np.zeros(4)), r"same number of rows, got \[5, 4\]"),
        (lambda: (np.zeros((0, 2)), np.zeros(0)), "empty"),
        (lambda: (None,), "got None"),
        (lambda: (iter([1]),), "x must be|read once"),
        (lambda: ((n for n in range(3)),), "read once"),
        (lambda: (tf.data.Dataset.from_tensor_slices(np.zeros((4, 3))),), "batched=True"),
        (lambda: (tf.data.Dataset.range(3), np.zeros(3)), "go with arrays"),
        (lambda: ("no/such/folder",), "folder"),
    ],
)
def test_odd_data_is_refused_before_training(data, message):
    with pytest.raises(ValueError, match=message):
        ks.DataPipeline().dataset(*data())


def test_placement_on_the_device_leaves_random_layers_to_the_model():
    pipeline = ks.DataPipeline(
        [layers.RandomFlip("horizontal", seed=1)], batch_size=4, shuffle=False, placement="device"
    )
    images = np.random.default_rng(0).random((8, 4, 4, 1)).astype("float32")
    data = pipeline.dataset(images, np.arange(8))
    np.testing.assert_allclose(np.concatenate([x for x, _ in data.as_numpy_iterator()]), images)
    assert array_source(data) is not None
    assert FLAVOR
