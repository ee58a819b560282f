"""Server options: one frozen record. The flags of `jaxpaged serve` are made from it; see `server.options`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server; those of the engine are in `EngineConfig`.

    Attributes:
      host: address to listen on.
      port: port to listen on; 0: any that is free.
      served_model_name: names that requests use; answers carry the first one. Default: the model as given.
      api_key: if any, every route but the probes needs one of them.
      root_path: path prefix under which a proxy serves it.
      shutdown_timeout: how many seconds SIGTERM waits for running requests.
      uvicorn_log_level: least level of the HTTP server's log.
      disable_uvicorn_access_log: do not log each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    root_path: str = ""
    shutdown_timeout: float = 30.0
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
