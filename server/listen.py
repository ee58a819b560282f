"""Where the server listens: a TCP port or a Unix socket, taken before the weights load."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from hashlib import sha256
from types import TracebackType

from jaxpaged.errors import ConfigError
from server.config import ServerConfig


class Listener:
    """A bound socket that does not listen yet: until the server runs, connections are refused, as if it were not there.

    Use it as a context manager.

    Attributes:
      socket: the bound socket.
    """

    def __init__(self, config: ServerConfig):
        """Binds.

        Raises:
          ConfigError: the port or path is taken, or cannot be had; or the TLS files are wrong.
        """
        _check_tls(config)
        self._config = config
        self._guard: socket.socket | None = None
        if config.uds is not None:
            self.socket, self._guard = _bind_path(config.uds)
            self._inode = os.stat(config.uds).st_ino
        else:
            self.socket = _bind_port(config.host, config.port)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the port or path back."""
        self.socket.close()
        if self._guard is not None:
            assert self._config.uds is not None
            try:
                if os.stat(self._config.uds).st_ino == self._inode:
                    os.unlink(self._config.uds)
            except OSError:
                pass  # gone already
            self._guard.close()

    def opened(self) -> socket.socket:
        """The socket, to listen on."""
        if self._config.uds is None:  # connections that linger after this server shall not keep out the next one
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return self.socket

    @property
    def url(self) -> str:
        """Of the server's root, `http://127.0.0.1:8000`; `unix:PATH` of a Unix socket."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        host, port = self.socket.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self._config.uds is not None or ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback


def _bind_port(host: str, port: int) -> socket.socket:
    """A socket bound to an address, which nobody else can bind until it is closed.

    Linux lets two sockets with SO_REUSEADDR share a port until one listens, so a second server would learn of it only
    when its weights are loaded. Hence without it; with it only where connections of the last server still linger.
    """
    try:
        try:
            return _bound(host, port, reuse=False)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            return _bound(host, port, reuse=True)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(e, 'strerror', None) or e}") from e


def _bound(host: str, port: int, *, reuse: bool) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_path(path: str) -> tuple[socket.socket, socket.socket]:
    """A socket bound to a path, and one that guards the path: its name vanishes with this process.

    A file that a server left behind is replaced. A server that is still loading refuses connections like a dead one,
    and is told from it by its guard.
    """
    guard, listener = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    try:
        guard.bind(_guard_name(path))
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.EEXIST, "a file is there that is no socket")
            if _answers(path, socket.AF_UNIX):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            os.unlink(path)
        listener.bind(path)
    except OSError as e:
        listener.close()
        guard.close()
        raise ConfigError(f"cannot listen on uds={path!r}: {e.strerror or e}") from e
    return listener, guard


def _guard_name(path: str) -> str:
    """Of a digest: a name holds 107 bytes, but paths of any length may begin alike."""
    return f"\0jaxpaged:{sha256(os.fsencode(os.path.realpath(path))).hexdigest()}"


def _answers(address: object, family: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0  # type: ignore[arg-type]


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")  # an encrypted key: no prompt
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as e:
        files = ", ".join(f for f in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if f)
        raise ConfigError(f"TLS cannot be set up with {files}: {getattr(e, 'strerror', None) or e}") from e
