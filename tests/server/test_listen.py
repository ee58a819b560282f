"""Where the server listens: what is taken, what is stale, and what clients see before it serves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from jaxpaged.errors import ConfigError
from server.config import ServerConfig
from server.listen import Listener


@pytest.fixture
def listen():
    """Makes listeners, and closes them."""
    made = []

    def make(**options) -> Listener:
        made.append(Listener(ServerConfig(**{"port": 0, **options})))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


def port_of(listener: Listener) -> int:
    return listener.socket.getsockname()[1]


def test_until_it_serves_connections_are_refused_and_the_port_is_taken(listen) -> None:
    port = port_of(listen())
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", port))
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
        listen(port=port)
    with socket.socket() as other:  # also for those who would share it
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_port_that_is_served_is_taken(listen) -> None:
    listener = listen()
    listener.opened().listen()
    with pytest.raises(ConfigError, match="in use"):
        listen(port=port_of(listener))


def test_a_restart_does_not_wait_for_lingering_connections(listen) -> None:
    first = listen()
    port = port_of(first)
    first.opened().listen()
    with socket.create_connection(("127.0.0.1", port)):
        accepted, _ = first.socket.accept()
        accepted.close()  # the server's end closes first: the port lingers
    first.close()
    second = listen(port=port)
    with pytest.raises(ConfigError, match="in use"):  # the grace is for one only
        listen(port=port)
    second.opened().listen()
    with socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "a" * 100, "\x00"])
def test_an_address_that_is_none(listen, host) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as error:
        listen(host=host)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("host", "url", "local"),
    [("127.0.0.1", "http://127.0.0.1", True), ("localhost", "http://", True), ("0.0.0.0", "http://0.0.0.0", False)],
)
def test_the_url(listen, host, url, local) -> None:
    listener = listen(host=host)
    assert listener.url.startswith(url) and listener.url.endswith(f":{port_of(listener)}")
    assert listener.is_local is local


def test_ipv6(listen) -> None:
    try:
        listener = listen(host="::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert listener.url == f"http://[::1]:{port_of(listener)}" and listener.is_local


def test_a_unix_socket_comes_and_goes(listen, tmp_path) -> None:
    path = str(tmp_path / "server.sock")
    listener = listen(uds=path)
    assert listener.url == f"unix:{path}" and listener.is_local
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(path)
    with pytest.raises(ConfigError, match="in use"):  # though it refuses connections, as a dead one's would
        listen(uds=path)
    assert os.path.exists(path)
    listener.opened().listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    listener.close()
    assert not os.path.exists(path)
    listen(uds=path)


def test_two_unix_sockets_in_a_long_folder(listen, tmp_path, monkeypatch) -> None:
    """The paths that name them to the system are short, what they stand for is not."""
    folder = tmp_path / ("deep" * 40)
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("one.sock", "two.sock"):
        listen(uds=name)
    with pytest.raises(ConfigError, match="in use"):
        listen(uds="two.sock")


def test_what_a_dead_server_left_is_replaced(listen, tmp_path) -> None:
    path = str(tmp_path / "server.sock")
    code = "import os; from server.listen import *; Listener(ServerConfig(uds=%r)); os._exit(1)"
    subprocess.run([sys.executable, "-c", code % path], check=False)
    assert os.path.exists(path)
    listen(uds=path).opened().listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_unix_socket_of_another_program_is_left_alone(listen, tmp_path) -> None:
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ConfigError, match="in use"):
            listen(uds=path)
        assert os.path.exists(path)


def test_a_path_that_is_no_socket(listen, tmp_path) -> None:
    (tmp_path / "precious").write_text("data")
    for path in (tmp_path / "precious", tmp_path, tmp_path / "no" / "folder", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="cannot listen on uds="):
            listen(uds=str(path))
    assert (tmp_path / "precious").read_text() == "data"


def test_wrong_tls_files_are_found_first(listen, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"TLS cannot be set up with .*no\.pem"):
        listen(ssl_certfile=str(tmp_path / "no.pem"))
    (tmp_path / "bad.pem").write_text(textwrap.dedent("no certificate"))
    with pytest.raises(ConfigError, match="TLS cannot be set up"):
        listen(ssl_certfile=str(tmp_path / "bad.pem"), ssl_keyfile=str(tmp_path / "bad.pem"))
