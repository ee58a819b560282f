"""Who may ask what: API keys, tenants' caches, web pages of other origins. Cases S01, S05, S15, S16, S22."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from fastapi import WebSocket

from jaxpaged.errors import ConfigError
from server.api_keys import ApiKeys, configured_keys, tenant_salt
from server.app import create_app
from server.config import ServerConfig
from server.middleware import OPEN_PATHS
from tests import tiny_tokenizers
from tests.server.conftest import LiveServer
from tests.server.raw_http import ask

ONE, TWO = "sk-the-first-key", "sk-the-second-and-longer-key"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    """A server with two keys, and a route of which nobody has thought."""
    server = LiveServer(tiny_tokenizers.byte_level(), api_key=(ONE, TWO))

    @server.app.get("/added-later")
    async def added_later() -> str:
        return "secret"

    @server.app.websocket("/socket")
    async def a_socket(websocket: WebSocket) -> None:
        await websocket.accept()

    yield server
    server.stop()


# Keys.


def paths_of(routes: Iterable[Any]) -> Iterator[str]:
    """The paths of routes, and of the routers among them."""
    for route in routes:
        router = getattr(route, "original_router", None)  # as newer versions of FastAPI hold those that are included
        if router is not None:
            yield from paths_of(router.routes)
        else:
            yield route.path


def test_every_route_but_the_probes_is_closed(locked) -> None:
    """S16: also one that is added later, the documentation, and what does not exist."""
    paths = set(paths_of(locked.app.routes))
    assert {"/added-later", "/docs", "/openapi.json", COMPLETIONS, CHAT, *OPEN_PATHS} <= paths
    for path in (paths - OPEN_PATHS) | {"/", "/nothing", "/static/x.js", "/metrics", "/v1"}:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            response = locked.http.request(method, path)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert locked.http.get("/added-later", headers=bearer(TWO)).json() == "secret"
    for path in OPEN_PATHS:
        assert locked.http.get(path).status_code == locked.http.head(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1/../metrics", "/health/../v1/models", "/health/..%2fv1/models", "/%2e/v1/models",
     "/v1/%2e%2e/v1/models", "/health%2f..%2fv1%2fmodels", "/health/", "/health//", "//health", "/Health", "/health;/x",
     "/health%00", "/health%20", "/ping/v1/models", "/./health", "/v1/models/", "/v1/models?/ping", "/v1/models#/ping",
     "/v1/models%3f/health", "http://x/v1/models", "http://x/added-later", "http://health/v1/models"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_no_spelling_of_a_path_gets_around_the_key(locked, method, path) -> None:
    """S16, sent as it stands: client libraries would mend it."""
    status, received = ask(locked, method, path)
    assert status in (400, 401)
    assert b"secret" not in received and b"max_model_len" not in received


def test_a_query_or_a_fragment_does_not_close_a_probe(locked) -> None:
    assert ask(locked, "GET", "/health?/v1/models")[0] == 200


@pytest.mark.parametrize("root_path", ["/api", "/api/", "/health"])
def test_behind_a_proxy_with_a_prefix(start, root_path) -> None:
    """Whether or not the proxy strips it."""
    server = start(api_key=(ONE,), root_path=root_path)
    prefix = root_path.rstrip("/")
    for path in (COMPLETIONS, "/openapi.json", "/v1/models"):
        assert ask(server, "GET", path)[0] == ask(server, "GET", prefix + path)[0] == 401
    assert ask(server, "GET", "/health")[0] == (401 if prefix == "/health" else 200)
    assert ask(server, "GET", "/version")[0] == 200
    assert ask(server, "GET", prefix + "/ping")[0] == 200
    assert ask(server, "GET", prefix + "/v1/models", f"Authorization: Bearer {ONE}")[0] == 200


def test_sockets_are_closed_too(locked) -> None:
    """The application itself refuses them, should the HTTP server ever offer them."""
    import anyio

    sent = []

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    async def send(message: dict) -> None:
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/socket", "raw_path": b"/socket", "query_string": b"", "root_path": ""}
    anyio.run(locked.app, {**scope, "headers": [], "subprotocols": []}, receive, send)
    assert sent == ["websocket.close"]
    fields = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
    assert ask(locked, "GET", "/socket", *fields)[0] == 401


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}", ONE,
     f"Bearer {ONE} {TWO}", f"Bearer {ONE},{TWO}", f"Bearer{ONE}", "Bearer \xff\xfe", "Bearer \u00e9" + ONE,
     f"Bearer {ONE.upper()}", f'Bearer "{ONE}"', f"Bearer Bearer {ONE}"],
)  # fmt: skip
def test_what_is_no_key_opens_nothing(locked, header) -> None:
    """S15: non-ASCII among them."""
    assert ask(locked, "GET", "/v1/models", f"Authorization: {header}")[0] == 401


@pytest.mark.parametrize("key", [ONE, TWO])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_any_of_the_keys_opens(locked, key, scheme) -> None:
    response = locked.http.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
    assert response.status_code == 200
    client = locked.openai.with_options(api_key=key)
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "x"


def test_digests_are_compared_and_all_of_them(monkeypatch) -> None:
    """S15: in a time that depends on nothing of the key's."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    keys = ApiKeys([ONE, TWO])
    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert keys.tenant(b"Bearer " + ONE.encode()) != keys.tenant(b"Bearer " + TWO.encode())
    assert keys.tenant(b"Bearer x") is None
    assert len(compared) == 6 and {len(part) for pair in compared for part in pair} == {32}


def test_keys_from_a_file(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n  {ONE} \n\n{TWO}\n")
    assert configured_keys(ServerConfig(api_key=("k",), api_key_file=str(file))) == ("k", ONE, TWO)
    file.write_text(f"{ONE}\n{TWO}\n", "utf-8-sig")  # an invisible mark before the first key is none of it
    assert configured_keys(ServerConfig(api_key_file=str(file))) == (ONE, TWO)
    file.write_text("\n")
    for path in (file, tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="api_key_file"):
            configured_keys(ServerConfig(api_key_file=str(path)))


@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("blank", ["", " ", "\n", "\t\r\n", "\u00a0"])
def test_a_blank_key_is_refused(option: str, blank: str) -> None:
    """Blanks around a key do not count, as a file's last newline: of this one nothing would be left to know."""
    for keys in ((blank,), ("k", blank)):
        with pytest.raises(ConfigError, match=f"^{option} must not be blank"):
            ServerConfig(**{option: keys})


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Bearer  \t ", b"bearer\t", b" "])
def test_no_key_is_none_of_the_keys(header: bytes) -> None:
    keys = ApiKeys([ONE])
    keys._digests.append(hashlib.sha256(b"").digest())  # even if one got in
    assert keys.tenant(header) is None


def test_keys_are_told_to_nobody(locked, caplog) -> None:
    """S15: neither in logs nor in answers, whatever fails."""
    caplog.set_level(logging.DEBUG)
    answers = []
    for key in (ONE, "sk-a-guess-of-somebody"):
        for path, body in ((COMPLETIONS, {"prompt": "x", "n": "x"}), (CHAT, {}), ("/nothing", {})):
            answers.append(locked.http.post(path, json=body, headers=bearer(key)))
        answers += [locked.http.get(path, headers=bearer(key)) for path in ("/v1/models", "/metrics", "/openapi.json")]
    encode, locked.tokenizer.encode = locked.tokenizer.encode, None  # type: ignore[method-assign]
    answers.append(locked.http.post(COMPLETIONS, json={"prompt": "x"}, headers=bearer(ONE)))
    locked.tokenizer.encode = encode  # type: ignore[method-assign]
    assert answers[-1].status_code == 500
    told = caplog.text + "".join(a.text + str(a.headers) for a in answers)
    assert "sk-" not in told
    assert "sk-" not in repr(vars(locked.app.state.serving.llm))


# Tenants.


def salt_of(server: LiveServer, path: str = COMPLETIONS, key: str | None = None, **body) -> str | None:
    """What the engine is told."""
    prompt = {CHAT: {"messages": HELLO}, EMBEDDINGS: {"input": "x"}}.get(path, {"prompt": "x"})
    response = server.http.post(path, json={**prompt, **body}, headers=bearer(key) if key else {})
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].cache_salt


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, EMBEDDINGS])
def test_tenants_share_no_prefixes(locked, path) -> None:
    """S01: not even if one sends what is, or becomes, the other's salt."""
    ours, theirs = salt_of(locked, path, ONE), salt_of(locked, path, TWO)
    assert ours and theirs and ours != theirs
    assert salt_of(locked, path, ONE) == ours
    salted = salt_of(locked, path, ONE, cache_salt="s")
    assert salted == salt_of(locked, path, ONE, cache_salt="s")
    everything = {ours, theirs, salted, salt_of(locked, path, TWO, cache_salt="s")}
    everything |= {salt_of(locked, path, TWO, cache_salt=copied) for copied in (ours, salted, theirs)}
    assert len(everything) == 7
    response = locked.http.post(COMPLETIONS, json={"prompt": "x", "cache_salt": ""}, headers=bearer(ONE))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


def test_one_tenant_or_sharing_ones_choose_their_salts(live, start) -> None:
    single, sharing = start(api_key=(ONE,)), start(api_key=(ONE, TWO), isolate_api_keys=False)
    for server, key in ((live, None), (single, ONE), (sharing, ONE), (sharing, TWO)):
        assert salt_of(server, key=key) is None
        assert salt_of(server, key=key, cache_salt="s") == "s"


def test_salts_tell_nothing_of_the_key() -> None:
    tenant = ApiKeys([ONE]).tenant(bearer(ONE)["Authorization"].encode())
    assert tenant is not None
    salts = {tenant_salt(tenant, None), tenant_salt(tenant, "a"), tenant_salt(tenant, "salt:")}
    assert len(salts) == 3 and all(len(salt) == 64 and tenant.hex() not in salt for salt in salts)


# Web pages.

EVIL = "http://evil.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}


def test_no_origin_is_allowed_by_default(live) -> None:
    preflight = live.http.options(COMPLETIONS, headers={"Origin": EVIL, **PREFLIGHT})
    assert preflight.status_code == 405 and "tiny" not in preflight.text
    for response in (preflight, live.http.get("/v1/models", headers={"Origin": EVIL})):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "file://", "http://127.0.0.1", "http://localhost:1", "https://x:y", ""]
)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None, "application/json"])
def test_a_page_of_another_site_reaches_nothing(live, origin, content_type) -> None:
    """Browsers send "simple" requests without asking first: a form, text, or a body without a type."""
    started = len(live.engine.added)
    headers = {"Origin": origin} if origin else {}
    headers |= {"Content-Type": content_type} if content_type else {}
    response = live.http.post(COMPLETIONS, content=json.dumps({"prompt": "x"}), headers=headers)
    if origin:
        assert response.status_code == 403
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "origin_not_allowed")
        assert "--allowed-origins" in error["message"]
    else:  # no browser
        assert response.status_code == (200 if content_type in (None, "application/json") else 415)
    assert len(live.engine.added) == started + (response.status_code == 200)


def test_our_own_pages_may_ask(live, start) -> None:
    """But no name that may mean this machine only since a moment ago: without keys, that is."""
    port = live.url.rpartition(":")[2]
    keyed = start(api_key=(ONE,))
    for name, allowed in (("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("evil.example", False)):
        headers = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        response = live.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        assert response.status_code == (200 if allowed else 403), name
        with_key = keyed.http.post(COMPLETIONS, json={"prompt": "x"}, headers={**headers, **bearer(ONE)})
        assert with_key.status_code == 200
    local_https = {"Host": f"localhost:{port}", "Origin": f"https://localhost:{port}"}
    assert live.http.post(COMPLETIONS, json={"prompt": "x"}, headers=local_https).status_code == 200  # TLS ends before


def test_allowed_origins(start) -> None:
    server = start(api_key=(ONE,), allowed_origins=("https://app.example",), allow_credentials=True)
    ours, evil = {"Origin": "https://app.example"}, {"Origin": EVIL}
    preflight = server.http.options(COMPLETIONS, headers={**ours, **PREFLIGHT})  # a browser sends no key here
    assert preflight.status_code == 200 and "tiny" not in preflight.text
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert preflight.headers["access-control-allow-credentials"] == "true"
    assert server.http.options(COMPLETIONS, headers={**evil, **PREFLIGHT}).status_code == 400
    assert server.http.options(COMPLETIONS, headers=ours).status_code == 401  # no preflight
    for headers, status in ((ours, 401), ({**ours, **bearer(ONE)}, 200)):
        response = server.http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
        assert response.status_code == status  # which the page can read
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert response.headers["access-control-expose-headers"] == "X-Request-Id"
    response = server.http.post(COMPLETIONS, json={"prompt": "x"}, headers={**evil, **bearer(ONE)})
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


def test_any_origin_but_not_with_credentials(start) -> None:
    with pytest.raises(ConfigError, match="allow_credentials"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)
    server = start(allowed_origins=("*",), allowed_methods=("GET", "POST"), allowed_headers=("content-type",))
    response = server.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"Origin": EVIL})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in response.headers
    refused = server.http.options(COMPLETIONS, headers={"Origin": EVIL, **PREFLIGHT})
    assert refused.status_code == 400  # `authorization` is not among the headers
    assert server.events(COMPLETIONS, prompt="x")


# Nothing is fetched, nothing is imported.

URLS = ("http://169.254.169.254/latest", "file:///etc/passwd", r"http://allowed.example\@127.0.0.1/", "ftp://x/y",
        "data:text/plain,x", "//evil.example/x", "http://[::1]/", "https://evil.example/x.png")  # fmt: skip


def url_bodies(url: str) -> Iterator[tuple[str, dict]]:
    """Every field that might hold a URL."""
    for kind in ("image_url", "input_audio", "video_url", "file", "audio_url"):
        for value in (url, {"url": url}):
            yield CHAT, {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}
    schema = {"type": "object", "properties": {"a": {"$ref": url}}, "$schema": url}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        yield path, {**prompt, "model": url}
        yield path, {**prompt, "response_format": wrapped}
        yield path, {**prompt, "guided_json": json.dumps(schema)}
        yield path, {**prompt, "logits_processors": [url]}
        yield path, {**prompt, "kv_transfer_params": {"remote_host": url}}
    yield CHAT, {"messages": HELLO, "chat_template": url}
    yield CHAT, {"messages": HELLO, "tools": [{"type": "mcp", "server_url": url}]}
    yield CHAT, {"messages": HELLO, "web_search_options": {"url": url}}
    yield COMPLETIONS, {"prompt": {"url": url}}
    yield COMPLETIONS, {"prompt": "x", "prompt_embeds": url}


@pytest.mark.parametrize("url", URLS)
def test_no_url_of_a_clients_is_ever_fetched(live, monkeypatch, url) -> None:
    """S22: text is all that this server takes."""
    ours = int(live.url.rpartition(":")[2])
    live.http.get("/health")  # the client's own connection is open
    connected, opened = [], []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: connected.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **_: opened.append(where))
    for path, body in url_bodies(url):
        response = live.post(path, **body)
        assert response.status_code in (400, 404), (body, response.text)
    assert [a for a in connected if a[1] != ours] == opened == []


@pytest.mark.parametrize(
    "value",
    [["os.system"], "os.system", {"this": "os.system"}, {"antigravity": ["x"]}, [{"qualname": "this"}]],
)
def test_no_name_of_a_clients_is_ever_imported(live, value) -> None:
    """S05."""
    before = set(sys.modules)
    for path, prompt in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        response = live.post(path, **prompt, logits_processors=value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "logits_processors")
    assert {"this", "antigravity"} & (set(sys.modules) - before) == set()


def test_no_route_takes_code_or_weights(live) -> None:
    """S05."""
    for path in ("update_weights", "load_lora_adapter", "collective_rpc", "init_weight_transfer", "pause", "v1/files",
                 "v1/load_lora_adapter", "v1/unload_lora_adapter", "v1/fine_tuning/jobs", "sleep", "wake_up",
                 "invocations", "server_info", "scale_elastic_ep"):  # fmt: skip
        for content in (b"\x80\x04\x95", b'{"lora_path": "../../etc"}'):
            assert live.http.post(f"/{path}", content=content).status_code == 404


def test_applications_share_nothing(live) -> None:
    """Two in one process have their own keys."""
    open_app = create_app(live.llm, ServerConfig())
    assert open_app.state.serving.config.api_key == ()
