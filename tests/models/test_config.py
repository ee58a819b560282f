"""What config.json says becomes the model, or an error that names the value."""

from typing import Any

import pytest

from jaxpaged.errors import ModelError, UnknownModelTypeError, UnsupportedError
from jaxpaged.models import FAMILIES, get_family
from jaxpaged.models.config import ModelConfig
from tests.models.golden_cases import CASES, read_golden


def read(model_type: str, **changes: Any) -> ModelConfig:
    """A tiny config of the family with changes; a value of ... removes the field."""
    base = next(case.config for case in CASES.values() if case.config["model_type"] == model_type)
    hf = {name: value for name, value in (base | changes).items() if value is not ...}
    return get_family(model_type).config_from_hf(hf)


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_a_config_are_the_same_model(name: str):
    """As published, and as transformers 5 writes it back with every default spelled out."""
    family = get_family(CASES[name].config["model_type"])
    assert family.config_from_hf(read_golden(name).saved_config) == family.config_from_hf(CASES[name].config)


def test_configs_are_hashable():
    assert len({read("llama"), read("llama"), read("gemma3_text")}) == 2


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(UnknownModelTypeError, match=r"'mamba'; known: gemma2, gemma3, .*qwen3"):
        get_family("mamba")


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gemma3"}))
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedError, "'awq'"),
        ({"num_local_experts": 8}, UnsupportedError, "num_local_experts=8"),
        ({"rope_scaling": {"rope_type": "spiral"}}, ModelError, "'spiral'"),
        ({"num_key_value_heads": 3}, ModelError, "num_attention_heads=4 .*num_key_value_heads=3"),
        ({"hidden_size": -64}, ModelError, "hidden_size=-64"),
        ({"vocab_size": "128"}, ModelError, "vocab_size='128'"),
        ({"num_hidden_layers": 2.5}, ModelError, "num_hidden_layers=2.5"),
        ({"head_dim": -16}, ModelError, "head_dim.-16"),
        ({"hidden_act": "tanh", "hidden_activation": "tanh"}, ModelError, "activation 'tanh'"),
    ],
)
def test_what_cannot_be_used_is_named(model_type: str, changes: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        read(model_type, **changes)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_size_is_named(field: str):
    with pytest.raises(ModelError, match=f"model_type 'llama' lacks '{field}'"):
        read("llama", **{field: ...})


def test_bidirectional_models_are_refused():
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention=True"):
        read("gemma3_text", use_bidirectional_attention=True)


def test_mistral_has_one_window_or_none():
    assert read("mistral", sliding_window=None).sliding_windows == (None, None)
    assert read("mistral", sliding_window=...).sliding_windows == (4096, 4096)


def test_qwen_windows_count_only_if_asked_for():
    window = {"sliding_window": 9, "num_hidden_layers": 3, "max_window_layers": 1}
    for family in ("qwen2", "qwen3"):
        assert read(family, use_sliding_window=False, **window).sliding_windows == (None, None, None)
        assert read(family, use_sliding_window=True, **window).sliding_windows == (None, 9, 9)
        types = ["sliding_attention", "full_attention", "full_attention"]
        assert read(family, use_sliding_window=True, layer_types=types, **window).sliding_windows == (9, None, None)


def test_layer_types_must_fit():
    with pytest.raises(ModelError, match="layer_types has 1 entries for num_hidden_layers=2"):
        read("qwen3", layer_types=["full_attention"])
    with pytest.raises(UnsupportedError, match="chunked_attention"):
        read("qwen3", layer_types=["full_attention", "chunked_attention"])


def test_gemma_layers_alternate():
    assert read("gemma2").sliding_windows == (6, None, 6)
    config = read("gemma3_text", num_hidden_layers=7, sliding_window_pattern=...)
    assert config.sliding_windows == (6, 6, 6, 6, 6, None, 6)
    assert config.rope_of_layer == (1, 1, 1, 1, 1, 0, 1)
    assert [(rope.rope_type, rope.theta) for rope in config.ropes] == [("linear", 1e6), ("default", 1e4)]


def test_gemma2_soft_caps_have_defaults_and_null_means_none():
    assert read("gemma2", attn_logit_softcapping=..., final_logit_softcapping=...).attn_soft_cap == 50.0
    uncapped = read("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attn_soft_cap, uncapped.final_soft_cap) == (None, None)


def test_gemma3_with_vision_is_its_text_half():
    text = {name: value for name, value in CASES["gemma3_text"].config.items() if name != "tie_word_embeddings"}
    config = get_family("gemma3").config_from_hf({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert config.checkpoint_prefix == "language_model."
    assert config.hidden_size == 64 and config.tie_word_embeddings
    with pytest.raises(ModelError, match="'text_config', not None"):
        get_family("gemma3").config_from_hf({"model_type": "gemma3"})
    with pytest.raises(UnsupportedError, match="'gptq'"):
        get_family("gemma3").config_from_hf({"text_config": text, "quantization_config": {"quant_method": "gptq"}})


def test_published_gemma3_leaves_out_defaults():
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = get_family("gemma3").config_from_hf({"model_type": "gemma3", "text_config": text})
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size)
    assert sizes == (8, 4, 256, 262208)
    assert config.max_position_embeddings == 131072 and config.sm_scale == 256**-0.5


def test_phi3_calls_longrope_by_old_names():
    scaling = CASES["phi3_long"].config["rope_scaling"]
    for name in ("su", "yarn"):
        assert read("phi3", rope_scaling={**scaling, "type": name}).ropes[0].rope_type == "longrope"


def test_the_context_of_the_engine_decides_length_dependent_ropes():
    config = read("phi3")
    assert config.max_context_len == 64
    short, long = config.for_context(16), config.for_context(17)
    assert short != long
    assert (short.ropes[0].frequencies()[0] > long.ropes[0].frequencies()[0])[1:].all()
    grown = read("llama", rope_scaling={"type": "dynamic", "factor": 4.0})
    assert grown.max_context_len == 256
