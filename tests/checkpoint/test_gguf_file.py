"""The GGUF container: metadata, block formats, splits, damage."""

import shutil

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from jaxpaged.checkpoint.gguf_file import read_gguf
from jaxpaged.errors import CheckpointError, UnsupportedError
from tests.checkpoint.files import rng_array, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.text": "héllo\n",
    "a.int": 7,
    "a.float": 0.5,
    "a.bool": True,
    "a.texts": ["x", "", "日本"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.25, -1.5],
    "a.bools": [True, False],
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


def test_metadata_agrees_with_the_gguf_package(path):
    write_gguf(path, METADATA, {"t": rng_array((4, 32))})
    file = read_gguf(path)
    fields = {k: v.contents() for k, v in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == fields
    assert {k: file.metadata[k] for k in METADATA} == METADATA


def test_plain_tensors(path):
    arrays = {
        "f32": rng_array((3, 4)),
        "f16": rng_array((3, 4), np.float16),
        "bf16": rng_array((3, 4), ml_dtypes.bfloat16),
        "vector": rng_array((5,)),
        "f64": rng_array((2, 3), np.float64),
        "i32": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    file = read_gguf(write_gguf(path, METADATA, arrays))
    assert file.kinds["bf16"] == "BF16"
    for name, array in arrays.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype), name
        np.testing.assert_array_equal(tensor.read(), array)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantized_tensors_come_back_close(path, kind):
    array = rng_array((6, 64))
    file = read_gguf(write_gguf(path, METADATA, {"t": (quants.quantize(array, kind), kind)}))
    tensor = file.tensors["t"]
    assert (tensor.shape, tensor.dtype, file.kinds["t"]) == ((6, 64), np.float32, kind.name)
    step = np.abs(array).max() / (100 if kind == Kind.Q8_0 else 7)
    np.testing.assert_allclose(tensor.read(), array, atol=step)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q3_K, Kind.Q2_K, Kind.IQ4_NL, Kind.Q4_1])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_dequantizing_by_slabs_equals_the_package(path, kind, rows):
    """300 rows of 512 are more than one slab, and no whole number of them."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(rows).integers(0, 60, (rows, 512 // block * nbytes), dtype=np.uint8)
    file = read_gguf(write_gguf(path, METADATA, {"t": (raw, kind)}))
    assert file.tensors["t"].shape == (rows, 512)
    np.testing.assert_array_equal(file.tensors["t"].read(), quants.dequantize(raw, kind))


def test_alignment_is_honoured(path):
    arrays = {"a": rng_array((3,)), "b": rng_array((5,))}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.tensors[name].read(), array)


def test_splits_are_one_model(tmp_path):
    a, b = rng_array((2, 32)), rng_array((3, 32), seed=1)
    write_gguf(tmp_path / "m-00001-of-00002.gguf", METADATA, {"a": a})
    write_gguf(tmp_path / "m-00002-of-00002.gguf", {"general.architecture": "llama"}, {"b": b})
    file = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert set(file.tensors) == {"a", "b"}
    assert file.metadata["a.int"] == 7
    np.testing.assert_array_equal(file.tensors["b"].read(), b)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_splits_that_repeat_a_tensor(tmp_path):
    write_gguf(tmp_path / "m-00001-of-00002.gguf", METADATA, {"a": rng_array((2, 32))})
    shutil.copy(tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(CheckpointError, match="repeats"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_truncation_anywhere_is_an_error_that_names_the_file(path, tmp_path):
    write_gguf(path, METADATA, {"t": rng_array((4, 32)), "u": rng_array((4, 32))})
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 1024, 37), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("offset", "value", "error"),
    [
        (0, b"GGML", CheckpointError),
        (4, (1).to_bytes(4, "little"), UnsupportedError),
        (4, (3).to_bytes(4, "big"), UnsupportedError),
        (8, (2**60).to_bytes(8, "little"), CheckpointError),
        (16, (2**60).to_bytes(8, "little"), CheckpointError),
        (24, (2**60).to_bytes(8, "little"), CheckpointError),
    ],
)
def test_wrong_headers(path, offset, value, error):
    write_gguf(path, METADATA, {"t": rng_array((4, 32))})
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(error, match=str(path)):
        read_gguf(path)
