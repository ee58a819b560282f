"""safetensors: shards, dtypes, views of the file, and files that are wrong."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.checkpoint.safetensors import read_file, read_folder
from jaxpaged.errors import CheckpointError, UnsupportedError
from tests.checkpoint.files import rng_array, write_safetensors


def write_shards(folder, shards, *, weight_map=None):
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = weight_map or {t: name for name, tensors in shards.items() for t in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "dtype",
    [
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int64,
        np.int32,
        np.int8,
        np.uint8,
        np.bool_,
    ],
)
def test_every_dtype_reads_back(tmp_path, dtype):
    array = (rng_array((3, 5)) * 10).astype(dtype)
    save_file({"a": array, "b": array[:1]}, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    assert tensors["a"].shape == (3, 5)
    assert tensors["a"].dtype == dtype
    assert tensors["a"].nbytes == array.nbytes
    np.testing.assert_array_equal(tensors["a"].read().view(np.uint8), array.view(np.uint8))
    np.testing.assert_array_equal(tensors["b"].read(), array[:1])


def test_reading_maps_the_file_and_copies_nothing(tmp_path):
    save_file({"a": rng_array((1024, 256))}, tmp_path / "model.safetensors")
    array = read_folder(tmp_path)["a"].read()
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not array.flags.writeable


def test_scalar_and_empty_tensors(tmp_path):
    save_file({"s": np.asarray(3.5, np.float32), "e": np.empty((0, 4), np.float32)}, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    assert tensors["s"].read() == 3.5
    assert tensors["e"].read().shape == (0, 4)


def test_shards_are_found_through_the_index(tmp_path):
    a, b = rng_array((2, 3)), rng_array((4,), seed=1)
    write_shards(tmp_path, {"model-00001-of-00002.safetensors": {"a": a}, "model-00002-of-00002.safetensors": {"b": b}})
    save_file({"a": a + 1, "layers.0.wq": b}, tmp_path / "consolidated.safetensors")
    tensors = read_folder(tmp_path)
    assert set(tensors) == {"a", "b"}
    np.testing.assert_array_equal(tensors["a"].read(), a)
    np.testing.assert_array_equal(tensors["b"].read(), b)


def test_stray_consolidated_beside_a_single_file_is_ignored(tmp_path):
    save_file({"a": rng_array((2,))}, tmp_path / "model.safetensors")
    save_file({"z": rng_array((2,))}, tmp_path / "consolidated.safetensors")
    assert set(read_folder(tmp_path)) == {"a"}


def test_index_naming_missing_files_lists_all_of_them(tmp_path):
    weight_map = {"a": "here.safetensors", "b": "gone-1.safetensors", "c": "gone-2.safetensors"}
    write_shards(tmp_path, {"here.safetensors": {"a": rng_array((2,))}}, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"gone-1\.safetensors, gone-2\.safetensors") as caught:
        read_folder(tmp_path)
    assert caught.value.missing == ("gone-1.safetensors", "gone-2.safetensors")


def test_index_naming_missing_tensors_lists_all_of_them(tmp_path):
    weight_map = {"a": "m.safetensors", "b": "m.safetensors", "c": "m.safetensors"}
    write_shards(tmp_path, {"m.safetensors": {"a": rng_array((2,))}}, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"b \(in m\.safetensors\), c"):
        read_folder(tmp_path)


@pytest.mark.parametrize("outside", ["../m.safetensors", "/etc/passwd", "sub/m.safetensors"])
def test_index_cannot_leave_its_folder(tmp_path, outside):
    write_shards(tmp_path, {"m.safetensors": {"a": rng_array((2,))}}, weight_map={"a": outside})
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_folder(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}'])
def test_index_that_is_no_index(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_folder(tmp_path)


def test_files_without_index_are_merged_unless_they_repeat_a_tensor(tmp_path):
    save_file({"a": rng_array((2,))}, tmp_path / "x.safetensors")
    save_file({"b": rng_array((2,))}, tmp_path / "y.safetensors")
    assert set(read_folder(tmp_path)) == {"a", "b"}
    save_file({"b": rng_array((2,))}, tmp_path / "z.safetensors")
    with pytest.raises(CheckpointError, match="repeats"):
        read_folder(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read: only safetensors and GGUF"):
        read_folder(tmp_path)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": F32}, b"\0" * 4, "cut short"),
        ({"a": F32}, b"\0" * 12, "belong to no tensor"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12, "overlaps a"),
        ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"\0" * 20, "leaves a gap"),
        ({"a": {**F32, "shape": [3]}}, b"\0" * 8, "does not fill"),
        ({"a": {**F32, "shape": [-2], "data_offsets": [8, 0]}}, b"\0" * 8, "damaged"),
        ({"a": {**F32, "shape": [2.0]}}, b"\0" * 8, "damaged"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "damaged"),
        ({"a": 3}, b"", "damaged"),
        (b"{not json", b"", "damaged"),
        (b"[]", b"", "damaged"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b"\xff\xfe", b"", "damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path, header, data, message):
    path = write_safetensors(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 8, (10**6).to_bytes(8, "little") + b"{}"])
def test_files_too_short_for_their_header(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="no safetensors file, or cut short"):
        read_file(path)


def test_unknown_dtype_is_unsupported(tmp_path):
    path = write_safetensors(tmp_path / "m.safetensors", {"a": {**F32, "dtype": "F4"}}, b"\0" * 8)
    with pytest.raises(UnsupportedError, match="'F4'"):
        read_file(path)
