"""How a model makes one vector of a text's hidden states: what comes with it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxpaged.checkpoint.source import ModelSource
from jaxpaged.errors import ModelError, reason

DEFAULT = "last"
# As `1_Pooling/config.json` of sentence-transformers names them, without "pooling_mode_".
_KINDS = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_MODULES = ("Transformer", "Pooling", "Normalize")
_GGUF_KINDS = {0: DEFAULT, 1: "mean", 2: "cls_token", 3: "last", 4: "rank"}  # llama.cpp's pooling_type


def model_pooling(source: ModelSource) -> str:
    """The model's way: "last", "mean", or the name of what we cannot do; "last" where nothing is said.

    Raises:
      ModelError: a file is damaged.
    """
    if source.gguf is not None:
        kind = source.gguf.metadata.get(f"{source.gguf.metadata.get('general.architecture')}.pooling_type", 0)
        return _GGUF_KINDS.get(kind, f"pooling_type {kind!r}")
    more = [name for name in _modules(source.path) if name not in _MODULES]
    if more:
        return "+".join(more)
    config = _read(source.path / "1_Pooling" / "config.json", {})
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    named = config.get("pooling_mode") or [mode.removeprefix("pooling_mode_") for mode in modes]
    name = "+".join(map(str, named)) if isinstance(named, list) else str(named)
    return _KINDS.get(name, name) or DEFAULT


def _modules(folder: Path) -> list[str]:
    """The classes of a sentence-transformers model, in their order."""
    modules = _read(folder / "modules.json", [])
    return [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]


def _read(path: Path, absent: Any) -> Any:
    if not path.is_file():
        return absent
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {reason(error)}") from error
    if type(content) is not type(absent):
        raise ModelError(f"{path} holds no JSON {'object' if absent == {} else 'list'}")
    return content
