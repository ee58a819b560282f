"""Command-line flags made from the fields of EngineConfig: vLLM's names where the meaning is the same."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
import types
import typing
from typing import Any

from jaxpaged.config import DTYPES, IMPLEMENTATIONS, POLICIES, EngineConfig, engine_config
from jaxpaged.errors import ConfigError

_CHOICES = {
    "dtype": ("auto", *DTYPES),
    "kv_cache_dtype": ("auto", *DTYPES),
    "load_format": ("auto", "dummy"),
    "attention_implementation": IMPLEMENTATIONS,
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "scheduling_policy": POLICIES,
}
_NO_FLAG = ("model", "scheduling_key")  # an argument; a function


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--max-model-len` and so on, a flag a field, with its help from the docstring of EngineConfig."""
    group = parser.add_argument_group("engine")
    types_of, helps = typing.get_type_hints(EngineConfig), _field_helps()
    for field in dataclasses.fields(EngineConfig):
        if field.name in _NO_FLAG:
            continue
        flag, text = "--" + field.name.replace("_", "-"), helps[field.name].replace("%", "%%")
        if field.default not in (None, ()):
            text += f" (default: {field.default})"
        # Absent flags stay absent, so that a command can have defaults of its own.
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": f"engine.{field.name}"}
        if field.name == "logits_processors":
            options["help"] += " Each is MODULE:NAME, imported from PYTHONPATH."
            group.add_argument(flag, nargs="+", metavar="MODULE:NAME", **options)
            continue
        kind = _plain_type(types_of[field.name])
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        else:
            choices = _CHOICES.get(field.name)
            metavar = None if choices else kind.__name__.upper()
            group.add_argument(flag, type=kind, choices=choices, metavar=metavar, **options)


def engine_config_of(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The EngineConfig that the flags describe.

    Args:
      defaults: instead of EngineConfig's own, for fields whose flag was not given.

    Raises:
      ConfigError: a value is out of range.
    """
    prefix = "engine."
    given = {name.removeprefix(prefix): v for name, v in vars(arguments).items() if name.startswith(prefix)}
    if "logits_processors" in given:
        given["logits_processors"] = tuple(map(_imported, given["logits_processors"]))
    return engine_config(arguments.model, **{**defaults, **given})


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # whatever the operator's module raises: it is a wrong option
        raise ConfigError(f"logits_processors={path!r} cannot be imported: {e}") from e


def _plain_type(hint: Any) -> type:
    """`int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint


def _field_helps() -> dict[str, str]:
    """The lines of the docstring's "Attributes:"."""
    lines = re.findall(r"^\s+(\w+): (.+(?:\n\s{8,}.+)*)$", EngineConfig.__doc__ or "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in lines}
