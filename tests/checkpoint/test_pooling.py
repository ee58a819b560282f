"""What a model's files say about pooling."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpaged.checkpoint.pooling import model_pooling
from jaxpaged.checkpoint.source import ModelSource
from jaxpaged.errors import ModelError


def source(folder: Path, gguf: dict[str, Any] | None = None) -> ModelSource:
    file: Any = None if gguf is None else SimpleNamespace(metadata=gguf)
    return ModelSource("m", folder, {}, {}, "float32", file)


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def modes(*true: str) -> dict[str, Any]:
    every = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 64, "include_prompt": True} | {f"pooling_mode_{m}": m in true for m in every}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "last"),
        ({}, "last"),
        (modes("lasttoken"), "last"),
        (modes("mean_tokens"), "mean"),
        (modes("cls_token"), "cls_token"),
        (modes("mean_tokens", "max_tokens"), "mean_tokens+max_tokens"),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode": ["cls", "mean"]}, "cls+mean"),
    ],
)
def test_sentence_transformers(tmp_path, config, expected):
    if config is not None:
        write(tmp_path, "1_Pooling/config.json", config)
    assert model_pooling(source(tmp_path)) == expected


def test_a_model_that_does_more_than_pooling(tmp_path):
    """A projection after it would be left out."""
    types = ["Transformer", "Pooling", "Normalize"]
    write(tmp_path, "1_Pooling/config.json", modes("mean_tokens"))
    write(tmp_path, "modules.json", [{"type": f"sentence_transformers.models.{t}"} for t in types])
    assert model_pooling(source(tmp_path)) == "mean"
    write(tmp_path, "modules.json", [{"type": f"sentence_transformers.models.{t}"} for t in [*types, "Dense"]])
    assert model_pooling(source(tmp_path)) == "Dense"


@pytest.mark.parametrize(("kind", "name"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls_token"), (3, "last")])
def test_gguf(tmp_path, kind, name):
    metadata = {"general.architecture": "llama"} | ({} if kind is None else {"llama.pooling_type": kind})
    assert model_pooling(source(tmp_path, metadata)) == name


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_file(tmp_path, content):
    write(tmp_path, "1_Pooling/config.json", content)
    with pytest.raises(ModelError, match="1_Pooling"):
        model_pooling(source(tmp_path))
