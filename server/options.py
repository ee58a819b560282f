"""Command-line flags made from the fields of EngineConfig: vLLM's names where the meaning is the same."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from typing import Any

from jaxpaged.config import DTYPES, IMPLEMENTATIONS, POLICIES, EngineConfig, engine_config

_CHOICES = {
    "dtype": ("auto", *DTYPES),
    "kv_cache_dtype": ("auto", *DTYPES),
    "load_format": ("auto", "dummy"),
    "attention_implementation": IMPLEMENTATIONS,
    "logprobs_mode": ("raw", "processed"),
    "scheduling_policy": POLICIES,
}
# Not flags: the model is an argument, functions exist only in Python.
_NO_FLAG = ("model", "logits_processors", "scheduling_key")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--max-model-len` and so on, a flag a field, with its help from the docstring of EngineConfig."""
    group = parser.add_argument_group("engine")
    types_of, helps = typing.get_type_hints(EngineConfig), _field_helps()
    for field in dataclasses.fields(EngineConfig):
        if field.name in _NO_FLAG:
            continue
        kind = _plain_type(types_of[field.name])
        flag, text = "--" + field.name.replace("_", "-"), helps[field.name].replace("%", "%%")
        if field.default is not None:
            text += f" (default: {field.default})"
        # Absent flags stay absent, so that a command can have defaults of its own.
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": f"engine.{field.name}"}
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
    return engine_config(arguments.model, **{**defaults, **given})


def _plain_type(hint: Any) -> type:
    """`int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint


def _field_helps() -> dict[str, str]:
    """The lines of the docstring's "Attributes:"."""
    lines = re.findall(r"^\s+(\w+): (.+(?:\n\s{8,}.+)*)$", EngineConfig.__doc__ or "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in lines}
