"""Command-line flags made from the fields of EngineConfig and ServerConfig.

Names are vLLM's where the meaning is the same. A flag's type and default are its field's; its help is the field's line
under "Attributes:" in the docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.config import DTYPES, IMPLEMENTATIONS, POLICIES, EngineConfig
from jaxpaged.engine.core_child import API_KEY_VARIABLES
from server.chat.reasoning import REASONING_FORMATS
from server.config import LOG_LEVELS, ServerConfig
from server.options import values
from server.options.vllm_table import VALUES
from server.tools.formats import TOOL_FORMATS

API_KEY_VARIABLE, _VLLM_KEY_VARIABLE = API_KEY_VARIABLES

CONFIGS = (ServerConfig, EngineConfig)
NONE = "none"
_NO_FLAG = ("model", "scheduling_key")  # an argument; a function

# The help lists flags under these titles, then the rest of each record under its own.
_GROUPS = {
    "model": ("tokenizer", "dtype", "load_format", "max_model_len", "seed", "generation_config",
              "override_generation_config", "served_model_name"),
    "chat": ("chat_template", "trust_request_chat_template", "enable_auto_tool_choice", "tool_call_parser",
             "exclude_tools_when_tool_choice_none", "reasoning_parser"),
    "memory": ("kv_cache_dtype", "block_size", "num_kv_blocks", "kv_cache_bytes", "gpu_memory_utilization",
               "swap_space", "enable_prefix_caching"),
    "scheduling": ("max_num_seqs", "max_num_batched_tokens", "max_decode_steps", "max_decode_seconds",
                   "scheduling_policy", "ageing", "max_num_queued_requests"),
    "devices": ("tensor_parallel_size", "data_parallel_size", "attention_implementation", "overlap", "warmup",
                "compilation_cache_dir", "strict", "debug_kernels"),
    "listening": ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "root_path",
                  "engine_timeout", "shutdown_timeout"),
    "access": ("api_key", "api_key_file", "isolate_api_keys", "allowed_origins", "allowed_methods", "allowed_headers",
               "allow_credentials", "disable_fastapi_docs", "page",
               "enable_public_page", "admin_api_key"),
    "limits": ("limit_concurrency", "max_body_bytes", "request_timeout", "request_header_timeout",
               "request_body_timeout", "slow_reader_timeout", "keep_alive_timeout", "max_logprobs",
               "max_n", "max_stop", "max_stop_token_ids", "max_logit_bias", "max_prompts", "max_inputs"),
    "logging": ("log_level", "enable_log_requests", "disable_log_stats", "uvicorn_log_level",
                "disable_uvicorn_access_log", "otlp_traces_endpoint", "profiler_dir"),
}  # fmt: skip
_REST = {ServerConfig: "server", EngineConfig: "engine"}

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", *DTYPES),
    "kv_cache_dtype": ("auto", *DTYPES),
    "load_format": ("auto", "dummy"),
    "attention_implementation": IMPLEMENTATIONS,
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "scheduling_policy": POLICIES,
    "log_level": LOG_LEVELS[:-1],
    "uvicorn_log_level": LOG_LEVELS,
    "tool_call_parser": tuple(TOOL_FORMATS),
    "reasoning_parser": tuple(REASONING_FORMATS),
}
# vLLM's other spellings of a flag, and of a value.
_ALSO = {
    "tensor_parallel_size": ("-tp",),
    "data_parallel_size": ("-dp",),
    "kv_cache_bytes": ("--kv-cache-memory-bytes",),
    "num_kv_blocks": ("--num-gpu-blocks-override",),
    "max_num_queued_requests": ("--max-num-queued-reqs",),
    "max_decode_steps": ("--num-scheduler-steps",),
}
_SAME_VALUE: dict[str, dict[str, str | None]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
    "max_model_len": {"auto": None, "-1": None},
}

_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: values.boolean,
    int: values.integer,
    float: values.number,
    str: str,
    dict: values.json_object,
}
_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON"}


@dataclass(frozen=True)
class Flag:
    """The flag of one field.

    Attributes:
      config: the record that has the field.
      field: its name.
      kind: bool, int, float, str or dict: of the value, or of each where there are `many`.
      optional: whether it may be None, which is `none` on the command line.
      help: what it does and what its default is.
    """

    config: type
    field: str
    kind: type
    many: bool
    optional: bool
    help: str

    @property
    def name(self) -> str:
        """`--max-model-len`."""
        return "--" + self.field.replace("_", "-")

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings."""
        return (self.name, *_ALSO.get(self.field, ()))

    @property
    def dest(self) -> str:
        """Its name among the parsed arguments."""
        return f"{self.config.__name__}.{self.field}"

    @property
    def group(self) -> str:
        """The title under which the help shows it."""
        return next((title for title, fields in _GROUPS.items() if self.field in fields), _REST[self.config])

    def value(self, text: str) -> Any:
        """What the text means; of a flag with many values a list.

        Raises:
          ValueError: nothing.
        """
        same = _SAME_VALUE.get(self.field, {})
        if text in same:
            return same[text]
        if self.optional and text == NONE:
            return None
        if self.many:
            return values.strings(text)
        choices = _CHOICES.get(self.field)
        if choices and text not in choices:
            vllms = "vLLM's and not built here: it is " if text in VALUES.get(self.field, "").split() else ""
            raise ValueError(f"{text!r} is {vllms}none of {', '.join((*choices, *[NONE] * self.optional))}")
        return _PARSERS[self.kind](text)

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag. Absent ones leave no trace in what is parsed, so that a command can have its own defaults."""
        options: dict[str, Any] = {
            "help": self.help.replace("%", "%%"), "default": argparse.SUPPRESS, "dest": self.dest,
        }  # fmt: skip
        if self.kind is bool:
            group.add_argument(*self.names, action=argparse.BooleanOptionalAction, **options)
            return
        choices = _CHOICES.get(self.field)
        metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS[self.kind]
        if self.many:
            options |= {"nargs": "+", "action": "extend"}
        group.add_argument(*self.names, type=self._parsed, metavar=metavar, **options)

    def _parsed(self, text: str) -> Any:
        try:
            return self.value(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e


def flags(configs: Iterable[type] = CONFIGS) -> list[Flag]:
    """A flag for each field of the records, but for those that no text can give."""
    made = []
    for config in configs:
        hints, helps = typing.get_type_hints(config), _helps(config)
        fields = [field for field in dataclasses.fields(config) if field.name not in _NO_FLAG]
        for field in fields:
            kind, many = _kind(hints[field.name])
            optional = isinstance(hints[field.name], types.UnionType)
            text = _help(helps[field.name], field, {f.name for f in fields})
            made.append(Flag(config, field.name, kind, many, optional, text))
    return made


def add_flags(parser: argparse.ArgumentParser, wanted: Iterable[Flag]) -> None:
    """Adds flags to a parser, in groups."""
    by_group: dict[str, list[Flag]] = {}
    for flag in wanted:
        by_group.setdefault(flag.group, []).append(flag)
    for title in sorted(by_group, key=[*_GROUPS, *_REST.values()].index):
        group = parser.add_argument_group(title)
        for flag in by_group[title]:
            flag.add_to(group)


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` of the known name that is most like this one, or nothing."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    return f"; did you mean {found[0]}?" if found else ""


def in_flags(message: str, arguments: argparse.Namespace) -> str:
    """A message about fields in the words of the command line: `--block-size 15` for `block_size=15`.

    Only a name of several words is surely one; another is where a value follows.
    """
    options = arguments.parser._option_string_actions.values() if "parser" in arguments else ()
    for field in {action.dest.rpartition(".")[2] for action in options}:
        if isinstance(field, str) and field.isidentifier():
            flag = "--" + field.replace("_", "-")
            message = re.sub(rf"(?<![\w/.-]){field}=", f"{flag} ", message)
            if "_" in field:
                message = re.sub(rf"(?<![\w/.-]){field}(?![\w/.-])", flag, message)
    return message


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Field -> value, of the flags of one record that were given."""
    prefix = f"{config.__name__}."
    found = {name.removeprefix(prefix): v for name, v in vars(arguments).items() if name.startswith(prefix)}
    return {name: tuple(_flat(value)) if isinstance(value, list) else value for name, value in found.items()}


def engine_config_of(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The EngineConfig that the flags describe.

    Args:
      defaults: instead of EngineConfig's own, for fields whose flag was not given.

    Raises:
      ConfigError: a value is out of range.
    """
    return EngineConfig(model=arguments.model, **{**defaults, **given(arguments, EngineConfig)})


def server_config_of(arguments: argparse.Namespace) -> ServerConfig:
    """The ServerConfig that the flags describe, with the key in the environment.

    vLLM's variable counts where no other key is given, as there: who moves over must not be left with an open server.

    Raises:
      ConfigError: a value is out of range.
    """
    config = ServerConfig(**given(arguments, ServerConfig))
    names = config.served_model_name or (arguments.model,)
    key = os.environ.get(API_KEY_VARIABLE)
    if not (key or config.api_key or config.api_key_file):
        key = os.environ.get(_VLLM_KEY_VARIABLE)
    return dataclasses.replace(
        config, served_model_name=names, api_key=(*config.api_key, key) if key else config.api_key
    )


def _flat(values: list[Any]) -> Iterable[Any]:
    return (item for value in values for item in (value if isinstance(value, list) else [value]))


def _kind(hint: Any) -> tuple[type, bool]:
    """`(int, False)` for `int | None`, `(str, True)` for `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return str, True
    kind = dict if isinstance(origin, type) and issubclass(origin, Mapping) else hint
    assert kind in _PARSERS, f"no flag can hold {hint}"
    return kind, False


def _helps(config: type) -> dict[str, str]:
    """The lines of the docstring's "Attributes:"."""
    lines = re.findall(r"^\s+(\w+): (.+(?:\n\s{8,}.+)*)$", config.__doc__ or "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in lines}


def _help(text: str, field: dataclasses.Field[Any], fields: set[str]) -> str:
    """A field's line in the words of the command line: flags by their names, and the default.

    What the line says of None or of nothing, after "None:" or "Empty:", is what the default means where that is it,
    and else what `none` asks for.
    """
    text = re.sub(r"`(\w+)`", lambda m: "--" + m[1].replace("_", "-") if m[1] in fields else m[1], text)
    said = re.fullmatch(r"(.*?)[;.] (None|Empty): (.*?)\.?", text)
    if said and field.default in (None, "", ()):
        return f"{said[1]} (default: {said[3]})"
    if said:
        return f"{said[1]} (default: {_shown(field.default)}; {NONE}: {said[3]})"
    return f"{text.removesuffix('.')} (default: {_shown(field.default)})"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in (None, "", ()) or default is dataclasses.MISSING:
        return "none"
    if isinstance(default, tuple):
        return " ".join(default)
    if isinstance(default, int) and default and default % 2**20 == 0:
        return f"{default >> 20}M"
    return str(default)
