"""Checkpoint folders of every family become parameters; tied embeddings and wrong tensors (B70)."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.checkpoint.load import load_params
from jaxpaged.checkpoint.source import open_model
from jaxpaged.errors import CheckpointError
from jaxpaged.models import abstract_params, get_family
from tests.models.golden_cases import CASES, make_weight, read_golden
from tests.models.paged import assemble_params

FAMILY_CASES = [name for name, case in CASES.items() if not case.variant]


def write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path) -> dict:
    source = open_model(folder)
    family = get_family(source.config["model_type"])
    config = family.config_from_hf(source.config)
    abstract = abstract_params(family.module(config=config))
    return load_params(family.table(config), abstract, source.tensors(), dtype=np.float32)


def flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: np.asarray(value)}
    return leaves


def assert_same(actual: dict, expected: dict) -> None:
    actual, expected = flat(actual), flat(expected)
    assert actual.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(actual[path], expected[path], err_msg=path)


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_a_folder_gives_the_parameters_of_the_goldens(name: str, tmp_path: Path):
    config, tensors = CASES[name].config, read_golden(name).tensors()
    folder = write_folder(tmp_path, config, tensors)
    expected = assemble_params(get_family(config["model_type"]).config_from_hf(config), tensors)
    assert_same(load(folder), expected)


def test_a_model_with_vision_loads_its_text_half(tmp_path: Path):
    text, tensors = CASES["gemma3_text"].config, read_golden("gemma3_text").tensors()
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    nested |= {
        "vision_tower.vision_model.post_layernorm.weight": np.ones(4, np.float32),
        "multi_modal_projector.mm_soft_emb_norm.weight": np.ones(4, np.float32),
    }
    folder = write_folder(tmp_path, {"model_type": "gemma3", "text_config": text}, nested)
    expected = assemble_params(get_family("gemma3_text").config_from_hf(text), tensors)
    assert_same(load(folder), expected)


def llama_folder(folder: Path, *, tied: bool, head: bool) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = read_golden("llama").tensors()
    tensors["lm_head.weight"] = make_weight("lm_head.weight", (128, 64), norm_mean=1.0)
    if not head:
        del tensors["lm_head.weight"]
    return write_folder(folder, CASES["llama"].config | {"tie_word_embeddings": tied}, tensors), tensors


@pytest.mark.parametrize("head", [False, True])
def test_tied_embeddings_need_no_head_and_ignore_one(head: bool, tmp_path: Path):
    folder, tensors = llama_folder(tmp_path, tied=True, head=head)
    params = load(folder)
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_untied_embeddings_use_the_head(tmp_path: Path):
    folder, tensors = llama_folder(tmp_path, tied=False, head=True)
    params = load(folder)
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    assert not np.array_equal(params["lm_head"], params["embed"])


def test_untied_embeddings_without_a_head_are_an_error(tmp_path: Path):
    folder, _ = llama_folder(tmp_path, tied=False, head=False)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.missing == ("lm_head.weight",) and not caught.value.unused


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_all_wrong_tensors_are_named_at_once(name: str, tmp_path: Path):
    tensors = read_golden(name).tensors()
    o, down, norm = "layers.0.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight", "model.norm.weight"
    fused = "layers.1.self_attn.qkv_proj.weight"
    qkv = fused if f"model.{fused}" in tensors else "layers.1.self_attn.k_proj.weight"
    del tensors[f"model.{o}"], tensors[norm]
    tensors[f"model.{down}"] = tensors[f"model.{down}"].T.copy()
    tensors[f"model.{qkv}"] = tensors[f"model.{qkv}"][:-1]
    tensors["model.layers.0.mlp.experts.7.weight"] = np.ones(3, np.float32)
    folder = write_folder(tmp_path, CASES[name].config, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert sorted(caught.value.missing) == sorted([f"model.{o}", norm])
    assert caught.value.unused == ("model.layers.0.mlp.experts.7.weight",)
    assert len(caught.value.misshaped) == 2
    assert all(any(wrong in line for line in caught.value.misshaped) for wrong in (down, qkv))


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path):
    tensors = read_golden("llama").tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    load(write_folder(tmp_path, CASES["llama"].config, tensors))
