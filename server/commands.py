"""The commands of `jaxpaged` and their flags. What runs them is imported when it runs: help needs no JAX."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxpaged import __version__
from jaxpaged.config import EngineConfig
from server.api_keys import configured_keys
from server.listen import Listener
from server.options.file import read_options
from server.options.flags import API_KEY_VARIABLE, add_flags, engine_config_of, flags, server_config_of
from server.options.vllm import add_vllm_flags, contradiction
from server.terminal.prompts import read_prompts

_MODEL = '"demo", a local folder, a .gguf file, or a Hugging Face name'
# What matters to one conversation: nothing of queues, neighbours and log-probabilities.
_CHAT_FLAGS = (
    "tokenizer", "dtype", "load_format", "max_model_len", "seed", "kv_cache_dtype", "block_size", "num_kv_blocks",
    "kv_cache_bytes", "gpu_memory_utilization", "enable_prefix_caching", "attention_implementation", "overlap",
    "warmup", "compilation_cache_dir", "strict", "debug_kernels",
)  # fmt: skip


def add_serve_command(commands: Any) -> None:
    """Adds `serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        usage="jaxpaged serve MODEL [options]",
        description="Serves a model over HTTP, as OpenAI does. Flags are vLLM's where the meaning is the same.",
        epilog=f"An API key may be given in {API_KEY_VARIABLE} too, where the list of processes does not show it. "
        "Whole numbers may be written 32k (32,000) or 32K (32,768).",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the model, if not given without a flag")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML with the names of flags as keys; the command line goes before it"
    )
    own = flags()
    add_flags(parser, own)
    add_vllm_flags(parser, parser._option_string_actions)
    parser.set_defaults(run=_serve, finish=_finish_serve, parser=parser, flags=own)


def add_chat_command(commands: Any) -> None:
    """Adds `chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        usage="jaxpaged chat MODEL [PROMPT] [options]",
        description="Talks to a model in the terminal. The answer goes to stdout, all else to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="what to ask; without it: a conversation, or what stdin holds"
    )
    group = parser.add_argument_group("chat")
    group.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    group.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="most tokens of an answer (default: 512)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (the default); higher is more varied"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="keep the likeliest tokens of this mass (default: 1, all)"
    )
    add_flags(parser, [flag for flag in flags([EngineConfig]) if flag.field in _CHAT_FLAGS])
    parser.set_defaults(run=_chat, parser=parser)


def _finish_serve(arguments: argparse.Namespace) -> None:
    """Adds what the file of options says, and finds the model."""
    if arguments.config == "":
        arguments.parser.error("--config must name a file")
    message = contradiction(vars(arguments))
    if message is not None:
        arguments.parser.error(message)
    options = read_options(arguments.config, arguments.flags) if arguments.config else {}
    models = list(dict.fromkeys(m for m in (arguments.model, arguments.model_flag) if m is not None))
    if len(models) > 1:
        arguments.parser.error(f"two models are given: {models[0]!r} and {models[1]!r}")
    if not models and "model" not in options:
        arguments.parser.error(
            "MODEL is missing; if there is a flag that takes several values, MODEL must come before it"
        )
    ignored = (*options.pop("vllm_ignored", ()), *arguments.vllm_ignored)
    given = {**options, **vars(arguments), "vllm_ignored": ignored}
    vars(arguments).update(given, model=models[0] if models else options["model"])


def _serve(arguments: argparse.Namespace) -> int:
    """What is wrong with the options, the model's name, the keys or the port is found before the slow imports."""
    engine, server = engine_config_of(arguments), server_config_of(arguments)
    configured_keys(server)
    with Listener(server) as listener:
        announce(engine)
        from server.serve import serve

        return serve(engine, server, listener)


def _chat(arguments: argparse.Namespace) -> int:
    from jaxpaged.core.sampling_params import SamplingParams

    config = engine_config_of(arguments, max_num_seqs=1)  # one request at a time needs few programs
    params = SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens)
    prompts = read_prompts(arguments.prompt)
    announce(config)
    from server.terminal.chat import chat

    return chat(config, params, prompts, arguments.system)


def announce(config: EngineConfig) -> None:
    """Says what is to be loaded, if it may be there: the imports alone take seconds.

    Raises:
      ModelError: it is no model.
    """
    from jaxpaged.checkpoint.source import local_model

    local_model(config.model)
    print(f"jaxpaged {__version__}: loading {config.model}", file=sys.stderr, flush=True)
