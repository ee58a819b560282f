"""Options of the server that make no sense are refused as they are read."""

from __future__ import annotations

import pytest

from jaxpaged.errors import ConfigError
from server.config import ServerConfig

TIMEOUTS = (
    "request_timeout",
    "request_header_timeout",
    "request_body_timeout",
    "slow_reader_timeout",
    "engine_timeout",
)


@pytest.mark.parametrize("name", TIMEOUTS)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e7, float("nan")])
def test_times_are_above_0(name, value) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value} must be a number of seconds above 0 and up to 1e6"):
        ServerConfig(**{name: value})


def test_no_engine_answers_at_once() -> None:
    for value in (1e-9, 0.5):
        with pytest.raises(ConfigError, match=f"engine_timeout={value} must be at least 1 second"):
            ServerConfig(engine_timeout=value)
    assert ServerConfig(engine_timeout=1.0).engine_timeout == 1
    assert ServerConfig(engine_timeout=None).engine_timeout is None


@pytest.mark.parametrize(
    "value", ["x", "", "localhost:4318", "ftp://a/b", "http://", "http:///v1", "http://a:b", "http://[a"]
)
def test_collectors_have_a_url(value) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=.* must be a URL such as"):
        ServerConfig(otlp_traces_endpoint=value)


def test_a_socket_has_a_path() -> None:
    with pytest.raises(ConfigError, match="uds=''"):
        ServerConfig(uds="")
