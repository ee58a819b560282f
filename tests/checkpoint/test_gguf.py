"""GGUF in Hugging Face terms: names, configs, and what llama.cpp's converter changed, undone."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import models
from jaxpaged.checkpoint.gguf import gguf_config, gguf_dtype, gguf_tensors
from jaxpaged.checkpoint.gguf_file import read_gguf
from jaxpaged.checkpoint.load import load_params
from jaxpaged.errors import CheckpointError, UnknownModelTypeError, UnsupportedError
from tests.checkpoint.files import llama_metadata, rng_array, write_gguf

EMBED = {"token_embd.weight": rng_array((48, 32))}


@pytest.fixture
def write(tmp_path):
    return lambda metadata, tensors=EMBED: read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


ARCHITECTURES = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA, {}),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2, {}),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3, {"attention.key_length": 16}),
    "gemma2": ("gemma2", gguf.MODEL_ARCH.GEMMA2, {"attention.key_length": 16, "attention.sliding_window": 8}),
    "gemma3": ("gemma3_text", gguf.MODEL_ARCH.GEMMA3, {"attention.key_length": 16, "attention.sliding_window": 8}),
    "phi3": ("phi3", gguf.MODEL_ARCH.PHI3, {}),
    "olmo2": ("olmo2", gguf.MODEL_ARCH.OLMO2, {}),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_each_architecture_loads_into_its_model(write, architecture, tied):
    """A file with the names that the gguf package gives to the model's own: every tensor arrives, undone."""
    if architecture == "gemma2" and not tied:
        pytest.skip("GGUF knows Gemma 2 with tied embeddings only")
    model_type, arch, changes = ARCHITECTURES[architecture]
    metadata = llama_metadata(architecture, **changes)
    head = {} if tied else {"output.weight": rng_array((48, 32), seed=9)}
    config = gguf_config(write(metadata, EMBED | head))
    assert config["model_type"] == model_type
    assert config["tie_word_embeddings"] == tied
    family = models.get_family(model_type)
    model_config = family.config_from_hf(config)
    abstract = models.abstract_params(family.module(config=model_config, dtype=jnp.float32))
    table = family.table(model_config)

    names = gguf.get_tensor_name_map(arch, 2)
    original = _hf_checkpoint(table, abstract, model_config)
    converted = {}
    for name, array in original.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, 4 if "q_proj" in name else 2)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        converted[names.get_name(name, (".weight", ".bias"))] = array
    assert None not in converted
    file = write(metadata, converted)
    tensors = gguf_tensors(file)
    assert set(tensors) == set(original)
    for name, array in original.items():
        np.testing.assert_allclose(tensors[name].read(), array, atol=1e-6, err_msg=name)
    params = load_params(table, abstract, tensors, dtype=jnp.float32)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, abstract)


def _hf_checkpoint(table, abstract, config) -> dict[str, np.ndarray]:
    """Random tensors of every name that the model's table wants, with the shapes of Hugging Face's modules."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    full = config.qk_norm == "full"
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "qkv_proj": (q + 2 * kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "gate_up_proj": (2 * ffn, hidden),
        "down_proj": (hidden, ffn),
        "q_norm": (q,) if full else (config.head_dim,),
        "k_norm": (kv,) if full else (config.head_dim,),
    }
    result = {}
    for i, name in enumerate(name for weight in table.weights for name in weight.sources):
        module, kind = name.split(".")[-2:]
        shape = shapes.get(module, (hidden,))
        result[name] = rng_array(shape[:1] if kind == "bias" else shape, seed=i)
    return result


def test_interleaving_of_biases_is_undone_too(write):
    bias = rng_array((32,))
    tensors = gguf_tensors(write(llama_metadata(), EMBED | {"blk.0.attn_q.bias": interleave(bias, 4)}))
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.bias"].read(), bias)


def test_unknown_tensors_keep_their_name_and_rope_tensors_are_no_parameters(write):
    extra = {"blk.0.mystery.weight": rng_array((4,)), "rope_freqs.weight": np.ones(4, np.float32)}
    tensors = gguf_tensors(write(llama_metadata(), EMBED | extra))
    assert set(tensors) == {"model.embed_tokens.weight", "blk.0.mystery.weight"}


def test_config_of_llama(write):
    metadata = llama_metadata() | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    config = gguf_config(write(metadata))
    expected = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {k: config[k] for k in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_window_makes_it_mistral(write):
    config = gguf_config(write(llama_metadata(**{"attention.sliding_window": 16})))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def test_counts_per_layer_must_agree(write):
    config = gguf_config(write(llama_metadata(**{"attention.head_count_kv": [2, 2], "feed_forward_length": [64, 64]})))
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 64)
    with pytest.raises(UnsupportedError, match=r"head_count_kv differs between layers: \[2, 1\]"):
        gguf_config(write(llama_metadata(**{"attention.head_count_kv": [2, 1]})))


def llama3_divisors(theta=500000.0, dim=8, factor=8.0, low=1.0, high=4.0, original=8192):
    """As llama.cpp's converter computes `rope_freqs.weight`."""
    result = []
    for freq in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelen = 2 * np.pi / freq
        if wavelen < original / high:
            result.append(1.0)
        elif wavelen > original / low:
            result.append(factor)
        else:
            smooth = (original / wavelen - low) / (high - low)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(result, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_found_back(write, factor):
    divisors = llama3_divisors(dim=64, factor=factor)
    assert np.sum((divisors > 1) & (divisors < factor)) > 0  # the smooth part is tried too
    metadata = llama_metadata(**{"rope.freq_base": 500000.0})
    scaling = gguf_config(write(metadata, EMBED | {"rope_freqs.weight": divisors}))["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_divisors_are_refused(write):
    odd = llama3_divisors(dim=64, original=1000)
    metadata = llama_metadata(**{"rope.freq_base": 500000.0})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        gguf_config(write(metadata, EMBED | {"rope_freqs.weight": odd}))


def test_linear_and_yarn_rope(write):
    linear = llama_metadata(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert gguf_config(write(linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    old = llama_metadata(**{"rope.scale_linear": 2.0})
    assert gguf_config(write(old))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    assert gguf_config(write(llama_metadata("qwen2", **yarn)))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(UnsupportedError, match="'spiral'"):
        gguf_config(write(llama_metadata(**{"rope.scaling.type": "spiral"})))


def test_longrope_of_phi3(write):
    factors = {
        "rope_factors_long.weight": np.asarray([1.0, 2.0, 3.0, 4.0], np.float32),
        "rope_factors_short.weight": np.ones(4, np.float32),
    }
    metadata = llama_metadata("phi3", **{"rope.scaling.original_context_length": 32, "rope.dimension_count": 6})
    config = gguf_config(write(metadata, EMBED | factors))
    assert config["rope_scaling"]["rope_type"] == "longrope"
    assert config["rope_scaling"]["long_factor"] == [1.0, 2.0, 3.0, 4.0]
    assert config["original_max_position_embeddings"] == 32
    assert config["partial_rotary_factor"] == 0.75
    del factors["rope_factors_short.weight"]
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight"):
        gguf_config(write(metadata, EMBED | factors))


def test_gemma_facts_that_gguf_leaves_out(write):
    gemma2 = gguf_config(write(llama_metadata("gemma2", **{"attention.key_length": 16})))
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention"]
    assert gemma2["query_pre_attn_scalar"] == 16
    largest = gguf_config(write(llama_metadata("gemma2", **{"attention.key_length": 16, "block_count": 46})))
    assert largest["query_pre_attn_scalar"] == 32 // 4
    gemma3 = gguf_config(write(llama_metadata("gemma3", **{"attention.key_length": 16, "block_count": 7})))
    assert [t[:4] for t in gemma3["layer_types"]] == ["slid"] * 5 + ["full", "slid"]
    assert gemma3["rope_local_base_freq"] == 10000.0


def test_dtype_is_that_of_most_weights(write, tmp_path):
    half = {"blk.0.attn_q.weight": rng_array((64, 32), np.float16), "output_norm.weight": rng_array((4096,))}
    small = {"token_embd.weight": rng_array((8, 32))}
    assert gguf_dtype(write(llama_metadata(), small | half)) == "float16"
    assert gguf_dtype(write(llama_metadata(), small)) == "float32"
    kind = gguf.GGMLQuantizationType.Q8_0
    quantized = {"blk.0.attn_q.weight": (gguf.quants.quantize(rng_array((64, 32)), kind), kind)}
    assert gguf_dtype(write(llama_metadata(), small | quantized)) == "bfloat16"


def test_what_cannot_be_served_is_refused(write):
    with pytest.raises(UnknownModelTypeError, match=r"'mamba'.*known: gemma2"):
        gguf_config(write(llama_metadata("mamba")))
    with pytest.raises(UnsupportedError, match="8 experts"):
        gguf_config(write(llama_metadata(expert_count=8)))
    with pytest.raises(CheckpointError, match=r"llama\.context_length"):
        gguf_config(write(llama_metadata(context_length=None)))
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        gguf_config(write(llama_metadata(), {"output_norm.weight": rng_array((32,))}))
