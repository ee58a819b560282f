"""What `jaxpaged serve` says once it serves: what was loaded, how much fits, and where it listens. Never a key."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from jaxpaged.config import EngineConfig
from jaxpaged.engine.programs import Programs
from server.config import ServerConfig
from server.listen import Listener

_KEY_FLAGS = ("--api-key", "--admin-api-key")


def start_page(
    engine: EngineConfig,
    programs: Programs,
    server: ServerConfig,
    listener: Listener,
    *,
    num_cores: int,
    weight_bytes: int | None,
    seconds: float,
) -> str:
    """The page.

    Args:
      engine: the resolved options of each core.
      programs: of each core.
      weight_bytes: read from the checkpoint; None: nothing was.
      seconds: from the start of the command.
    """
    return "\n".join(
        f"{title:<12} {text}"
        for title, text in (
            *_model_lines(engine, server, weight_bytes),
            *_capacity_lines(engine, num_cores),
            ("ready", f"after {seconds:.1f} s"),
            *_program_lines(programs, warms_up=engine.warmup),
            *_server_lines(server, listener, _shows_key(sys.argv)),
        )
    )


def _model_lines(engine: EngineConfig, server: ServerConfig, weight_bytes: int | None) -> Iterator[tuple[str, str]]:
    names = ", ".join(server.served_model_name or (engine.model,))
    size = f", {_bytes(weight_bytes)} of weights" if weight_bytes else ""
    yield "model", f"{engine.model} ({engine.dtype}{size}), served as {names}"
    defaults = server.override_generation_config or {}
    if defaults:
        said = ", ".join(f"{name}={value}" for name, value in defaults.items())
        yield "sampling", f"{said}, where a request does not say"
    parsers = {"tool calls": server.tool_call_parser, "reasoning": server.reasoning_parser}
    if any(parsers.values()):
        yield "parsers", ", ".join(f"{title}: {name}" for title, name in parsers.items() if name)


def _capacity_lines(engine: EngineConfig, num_cores: int) -> Iterator[tuple[str, str]]:
    blocks, length = engine.num_kv_blocks or 0, engine.max_model_len or 1
    tokens = blocks * engine.block_size
    each = " a core" if num_cores > 1 else ""
    if num_cores > 1:
        yield "cores", f"{num_cores}, each with the model and a KV cache of its own"
    yield "context", f"{length} tokens"
    yield (
        "KV cache",
        f"{blocks} blocks of {engine.block_size} tokens ({engine.kv_cache_dtype}){each}: {tokens * num_cores} tokens, "
        f"{tokens * num_cores / length:.1f} requests of the full context",
    )
    yield (
        "batch",
        f"up to {engine.max_num_seqs} requests{each}, {engine.max_num_batched_tokens} tokens a step; "
        f"prefix caching {'on' if engine.enable_prefix_caching else 'off'}",
    )


def _program_lines(programs: Programs, *, warms_up: bool) -> Iterator[tuple[str, str]]:
    warm, cold = _sizes_by_kind(programs.warm), _sizes_by_kind(programs.cold)
    yield "programs", f"{programs.count} compiled" + (f": {warm}" if warm else "")
    if cold:
        when = (
            "being compiled; until then, others serve"
            if warms_up
            else "compiled when first needed, while requests wait (--warmup)"
        )
        yield "cold", f"{when}: {cold}"


def _sizes_by_kind(sizes_of: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{kind}: {_sizes(sizes)}" for kind, sizes in sizes_of.items() if sizes)


def _sizes(sizes: Sequence[int]) -> str:
    """All, or where there are many the first three and the last: `1, 2, 4 … 256`."""
    shown = [str(size) for size in sizes]
    return ", ".join(shown) if len(shown) < 6 else f"{', '.join(shown[:3])} … {shown[-1]}"


def _server_lines(server: ServerConfig, listener: Listener, shows_key: bool) -> Iterator[tuple[str, str]]:
    has_keys = bool(server.api_key or server.api_key_file)
    yield "listening", f"{listener.url}/v1" if server.uds is None else f"{listener.url} (as in http://localhost/v1)"
    if server.uds is None and (not has_keys or server.enable_public_page):
        pages = ["/"] * server.page + ["/docs"] * (not server.disable_fastapi_docs) + ["/metrics"] * (not has_keys)
        yield "pages", ", ".join(listener.url + path for path in pages)
    if has_keys:
        closed = server.page and not server.enable_public_page
        yield "access", "with an API key" + ("; browsers have none to send: see --enable-public-page" if closed else "")
        if shows_key:
            hint = "JAXPAGED_API_KEY and --api-key-file do not show it"
            yield "WARNING", f"whoever lists this machine's processes sees the key of --api-key: {hint}"
    elif not listener.is_local:
        yield "WARNING", "no API key is set: whoever reaches this address may use the model (--api-key)"


def _shows_key(command_line: Sequence[str]) -> bool:
    """Whether the list of processes shows a key."""
    return any(word.partition("=")[0].replace("_", "-") in _KEY_FLAGS for word in command_line)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
