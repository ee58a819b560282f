"""Server options: one frozen record. The flags of `jaxpaged serve` are made from it; see `server.options.flags`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from jaxpaged.errors import ConfigError
from server.chat.reasoning import reasoning_format
from server.chat.template import read_chat_template
from server.tools.formats import tool_format

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

_SECONDS = (
    "request_timeout", "request_header_timeout", "request_body_timeout", "slow_reader_timeout", "keep_alive_timeout",
    "engine_timeout",
)  # fmt: skip
# Limits of what one request asks for, and the least that each may be; the most is its default.
_COUNTS = {"max_n": 1, "max_stop": 0, "max_stop_token_ids": 0, "max_logit_bias": 0, "max_prompts": 1, "max_inputs": 1}


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server; those of the engine are in `EngineConfig`.

    Attributes:
      host: address to listen on.
      port: port to listen on; 0: any that is free.
      uds: listen on this Unix socket, and on no port; None: `host` and `port`.
      ssl_keyfile: key of `ssl_certfile`, PEM; None: plain HTTP.
      ssl_certfile: certificate, with its chain, PEM; None: plain HTTP.
      ssl_ca_certs: demand of clients a certificate that one of these signed, PEM; None: none is asked for.
      root_path: path prefix under which a proxy serves it.
      data_parallel_size: engine processes, each with the whole model, on a device of its own where there are several;
        requests are spread over them.
      served_model_name: names that requests use; answers carry the first one. Empty: the model as given.
      api_key: every route but the probes needs one of these keys. Empty: anyone may ask.
      api_key_file: a file with more keys, one a line: unlike `api_key` it does not show in the list of processes.
      isolate_api_keys: with several keys, cached prefixes are shared only by requests with the same key, and
        /engine/state tells the ids of requests to the administrator only.
      allowed_origins: origins of web pages that may ask, "*" for any. Others may not, but for pages of this server.
      allowed_methods: methods that such pages may use; "*" for any.
      allowed_headers: headers that such pages may send; "*" for any.
      allow_credentials: let the browser send cookies and the like; not with origin "*".
      limit_concurrency: more requests than these at a time are answered 503. None: no limit but the engine's queue.
      max_body_bytes: a larger body is answered 413.
      max_n: most samples of a prompt: n, best_of and beam_width of a request.
      max_stop: most stop strings of a request.
      max_stop_token_ids: most stop tokens of a request.
      max_logit_bias: most entries of a request's logit_bias.
      max_prompts: most prompts of a request to /v1/completions.
      max_inputs: most inputs of a request to /v1/embeddings.
      request_timeout: seconds after which a request ends as it is, with finish_reason "abort" and stop_reason
        "timeout", as with its own `timeout`. None: none.
      request_header_timeout: seconds for a client to send a request's headers.
      request_body_timeout: seconds for it to send the body.
      slow_reader_timeout: seconds after which a client that takes no more of its answer is dropped.
      keep_alive_timeout: seconds that an idle connection is kept.
      disable_fastapi_docs: no /docs and no /openapi.json.
      page: serve the page at /, with a playground and a live view of the engine, and /engine/state, which feeds it.
      enable_public_page: with keys, let browsers load the page and /docs without one, since they have no way to send it
        with a link. Both are files without data: what they show needs a key, which the page asks for.
      generation_config: where sampling parameters come from that requests leave out: "auto" is the model's
        generation_config.json, "vllm" is OpenAI's defaults, else a folder with such a file. Read are temperature,
        top_k, top_p, min_p, repetition_penalty and max_new_tokens; the last bounds every request.
      override_generation_config: a JSON object of such parameters, which go before the others. None: none.
      chat_template: the chat template instead of the model's own: a file, or the template itself in one line. None: the
        model's.
      trust_request_chat_template: run chat templates that requests bring. A template is a program: it runs in a
        sandbox, with limits, but this is for clients that you trust.
      enable_auto_tool_choice: let the model decide about calling tools. Without it, requests with tools must say
        `tool_choice` "none", "required" or a name.
      tool_call_parser: the format in which the model writes calls: hermes (also Qwen 2.5 and 3), llama3_json,
        pythonic (Llama 3.2 and 4), mistral, deepseek_v3, or json. None: the one that the chat template speaks, else
        json. A named one is what a model without a template for tools is asked for, too.
      exclude_tools_when_tool_choice_none: do not tell the model of tools that it may not call.
      reasoning_parser: how the model marks its thoughts, which then come as `reasoning_content`: deepseek_r1, qwen3 or
        think. None: they stay in the content.
      engine_timeout: seconds after which an engine that answers nothing counts as dead: its requests fail, and the
        server ends. A step must not take so long, even one that compiles. None: never.
      shutdown_timeout: how many seconds SIGTERM waits for running requests.
      admin_api_key: keys of the administrator, for POST /reset_prefix_cache, /start_profile and /stop_profile, which
        are forbidden without one; they serve as `api_key` too.
      profiler_dir: folder of the server's machine for the traces of /start_profile. None: there is no profiling.
      enable_log_requests: log each request's id, size and parameters, and how it ended; never what it says.
      disable_log_stats: do not log throughput and load every ten seconds while there is work.
      log_level: least level of jaxpaged's own log.
      otlp_traces_endpoint: URL of an OpenTelemetry collector that is sent a span a request, such as
        http://localhost:4318/v1/traces. None: no traces.
      uvicorn_log_level: least level of the HTTP server's log.
      disable_uvicorn_access_log: do not log each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    root_path: str = ""
    data_parallel_size: int = 1
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    isolate_api_keys: bool = True
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    limit_concurrency: int | None = None
    max_body_bytes: int = 32 << 20
    max_n: int = 128
    max_stop: int = 16
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_prompts: int = 1024
    max_inputs: int = 2048
    request_timeout: float | None = None
    request_header_timeout: float = 20.0
    request_body_timeout: float = 60.0
    slow_reader_timeout: float = 60.0
    keep_alive_timeout: int = 5
    disable_fastapi_docs: bool = False
    page: bool = True
    enable_public_page: bool = False
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    engine_timeout: float | None = 300.0
    shutdown_timeout: float = 30.0
    admin_api_key: tuple[str, ...] = ()
    profiler_dir: str | None = None
    enable_log_requests: bool = False
    disable_log_stats: bool = False
    log_level: str = "info"
    otlp_traces_endpoint: str | None = None
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 0 to 65535")
        if not 0 <= self.shutdown_timeout <= 1e6:
            raise ConfigError(f"shutdown_timeout={self.shutdown_timeout} must be a number of seconds from 0 to 1e6")
        if self.uvicorn_log_level not in LOG_LEVELS:
            raise ConfigError(f"uvicorn_log_level={self.uvicorn_log_level!r} must be one of {', '.join(LOG_LEVELS)}")
        if self.log_level not in LOG_LEVELS[:-1]:
            raise ConfigError(f"log_level={self.log_level!r} must be one of {', '.join(LOG_LEVELS[:-1])}")
        if self.uds == "":
            raise ConfigError("uds='' must be the path of a Unix socket")
        if self.otlp_traces_endpoint is not None and not _is_url(self.otlp_traces_endpoint):
            url = "must be a URL such as http://localhost:4318/v1/traces"
            raise ConfigError(f"otlp_traces_endpoint={self.otlp_traces_endpoint!r} {url}")
        if self.otlp_traces_endpoint is not None and not _has_otlp():
            packages = "pip install 'jaxpaged[otlp]'"
            raise ConfigError(f"otlp_traces_endpoint={self.otlp_traces_endpoint!r} needs more packages: {packages}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("ssl_ca_certs needs ssl_certfile: only TLS clients have certificates")
        for name in ("api_key", "admin_api_key"):
            if not all(key.strip() for key in getattr(self, name)):  # blanks around a key are none of it
                raise ConfigError(f"{name} must not be blank")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must not be empty")
        for name in _SECONDS:
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= 1e6:
                raise ConfigError(f"{name}={seconds} must be a number of seconds above 0 and up to 1e6")
        if self.engine_timeout is not None and self.engine_timeout < 1:  # an engine that is busy may take as long
            raise ConfigError(f"engine_timeout={self.engine_timeout} must be at least 1 second")
        if self.chat_template is not None:
            read_chat_template(self.chat_template)
        tool_format(self.tool_call_parser, None)
        reasoning_format(self.reasoning_parser)
        if self.limit_concurrency is not None and self.limit_concurrency < 1:
            raise ConfigError(f"limit_concurrency={self.limit_concurrency} must be at least 1")
        for name, least in _COUNTS.items():
            most = getattr(type(self), name)  # what the engine and the server are made for
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)} must be from {least} to {most}")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} must be at least 1")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError('allow_credentials with allowed_origins="*" would let any web page act for its visitors')


def _is_url(text: str) -> bool:
    """Of HTTP, with a host and a port that may be one."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _has_otlp() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False
