"""Sampling parameters that requests leave out: from the model's generation_config.json, or the operator's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from jaxpaged.checkpoint.source import local_model
from jaxpaged.core.sampling_params import SamplingParams
from jaxpaged.errors import ConfigError, InvalidRequestError, reason
from server.config import ServerConfig

_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"
_NOT_WITH_BEAMS = ("temperature", "top_k", "top_p", "min_p")


def resolve_generation(config: ServerConfig, of_model: Callable[[], Mapping[str, Any]]) -> ServerConfig:
    """The config with all defaults collected in `override_generation_config`. Resolving that again changes nothing.

    Args:
      of_model: gives the content of the model's generation_config.json.

    Raises:
      ConfigError: a parameter is out of range, or the file that the operator named cannot be read.
    """
    override = dict(config.override_generation_config or {})
    unknown = sorted(set(override) - {*_SAMPLING, _LIMIT})
    if unknown:
        known = ", ".join((*_SAMPLING, _LIMIT))
        raise ConfigError(f"override_generation_config has unknown parameters {unknown}; known: {known}")
    if config.generation_config == "vllm":
        content: Mapping[str, Any] = {}
    elif config.generation_config == "auto":
        content = of_model()
    else:
        content = _read(Path(config.generation_config))
    found = {name: content[name] for name in (*_SAMPLING, _LIMIT) if content.get(name) is not None}
    merged = {**found, **override}
    _check(merged)
    return dataclasses.replace(config, generation_config="vllm", override_generation_config=merged)


def generation_config_of(name: str) -> Mapping[str, Any]:
    """The content of the generation_config.json of a model that an engine here has loaded; {} if there is none.

    So its files are on this machine, and nothing is asked of the network.
    """
    path = local_model(name)
    if path is not None:
        file = path / _FILE
        return _read(file) if path.is_dir() and file.is_file() else {}
    cached = try_to_load_from_cache(name, _FILE)
    return _read(Path(cached)) if isinstance(cached, str) else {}


def with_defaults(params: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SamplingParams with what they leave out, and no more tokens than the defaults allow anyone."""
    unfit = _NOT_WITH_BEAMS if params.get("use_beam_search") else ()
    merged = {name: v for name, v in defaults.items() if name in _SAMPLING and name not in unfit} | params
    limit = defaults.get(_LIMIT)
    if limit is not None:
        asked = params.get("max_tokens")
        merged["max_tokens"] = limit if asked is None else min(asked, limit)
    return merged


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / _FILE if folder.is_dir() else folder
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"generation_config={str(folder)!r}: {path} cannot be read: {reason(e)}") from e
    if not isinstance(content, dict):
        raise ConfigError(f"generation_config={str(folder)!r}: {path} holds no JSON object")
    return content


def _check(merged: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**{name: value for name, value in merged.items() if name != _LIMIT})
        if _LIMIT in merged:
            SamplingParams(max_tokens=merged[_LIMIT])
    except InvalidRequestError as e:
        message = str(e).replace("max_tokens", _LIMIT)
        raise ConfigError(f"{message}, in the generation config (see --override-generation-config)") from e
    if _LIMIT in merged and merged[_LIMIT] < 1:
        raise ConfigError(f"{_LIMIT}={merged[_LIMIT]} in the generation config must be at least 1")
