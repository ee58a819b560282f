"""The page's files, and the state that feeds it, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

import server.page
from server.page import FILES
from server.routes import engine_state
from server.routes.engine_state import EngineState, is_no_polling
from tests.server.conftest import LiveServer, wait_for

FOLDER = Path(server.page.__file__).parent
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
STATE = "/engine/state"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello world"}]


def test_every_file_is_served_as_what_it_is(live) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
    assert len(FILES) == len(SOURCES)
    for path in SOURCES:
        url = {"index.html": "/", "docs.html": "/docs"}.get(path.name, f"/page/{path.name}")
        response = live.http.get(url)
        assert response.status_code == 200 and response.content == path.read_bytes()
        assert response.headers["content-type"].partition(";")[0] == kinds[path.suffix]
        policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == policy["frame-ancestors"] == "'none'"
        assert set(policy.values()) == {"'self'", "'none'"}, "something from elsewhere, or inline, is let through"
        assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_is_inline_and_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"']*", text))
    assert urls <= {"http://www.w3.org/2000/svg"}, "the namespace of SVG is only a name"
    if path.suffix == ".html":
        assert not re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


def test_a_file_that_has_not_changed_is_not_sent_again(live) -> None:
    first = live.http.get("/")
    again = live.http.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert live.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "__init__.py", "..%2fapp.py", "%2e%2e/app.py", "a/b"])
def test_nothing_else_is_served(live, name: str) -> None:
    response = live.http.get(f"/page/{name}")
    assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


def test_the_page_can_be_turned_off(start) -> None:
    off = start(page=False)
    for path in ("/", STATE):
        assert off.http.get(path).status_code == 404
    assert off.http.get("/docs").status_code == 200
    assert start(disable_fastapi_docs=True).http.get("/docs").status_code == 404
    assert start(disable_fastapi_docs=True, page=False).http.get("/page/style.css").status_code == 404


@pytest.mark.parametrize("page", [True, False])
@pytest.mark.parametrize("docs", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"api_key": ("secret",)}, {"api_key": ("secret",), "enable_public_page": True}]
)
@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
def test_all_that_a_page_links_to_is_there(start, page: bool, docs: bool, options: dict, root_path: str) -> None:
    """Of each page that is served, whichever are; relative to its place, and what its scripts import too."""
    server = start(page=page, disable_fastapi_docs=not docs, root_path=root_path, **options)
    server.http.headers.update({} if "enable_public_page" in options else {"Authorization": "Bearer secret"})
    left = [root_path + path for path, is_served in (("/", page), ("/docs", docs)) if is_served]
    seen: set[str] = set()
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            response = server.http.get(path)
            assert response.status_code == 200, path
            links = re.findall(r"""(?:src|href)="([^"#]+)"|\bfrom "([^"]+)";""", response.text)
            left += [urljoin(path, link or imported) for link, imported in links]
    assert len(seen) > 5 or not (page or docs)
    for path, is_served in (("/", page), ("/docs", docs)):
        assert (root_path + path in seen) == is_served == (server.http.get(root_path + path).status_code == 200)


def test_with_keys_the_page_needs_one_too_unless_the_operator_says_otherwise(start) -> None:
    """S16: denied by default."""
    key = {"Authorization": "Bearer secret"}
    closed, public = start(api_key=("secret",)), start(api_key=("secret",), enable_public_page=True)
    for path in (*FILES, STATE, "/openapi.json", "/v1/models", "/page/nothing.js"):
        assert closed.http.get(path).status_code == 401, path
        known = 404 if path == "/page/nothing.js" else 200
        assert closed.http.get(path, headers=key).status_code == known
        assert public.http.get(path).status_code == (200 if path in FILES else 401), path
    assert public.http.post("/").status_code == 405


def taken(live: LiveServer) -> dict:
    response = live.http.get(STATE)
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    return response.json()


def test_the_state_tells_requests_and_their_blocks_but_not_what_they_say(live, monkeypatch) -> None:
    monkeypatch.setattr(engine_state, "SECONDS_FRESH", 0.0)
    idle = taken(live)
    assert [core["requests"] for core in idle["cores"]] == [[]]
    assert base64.b64decode(idle["cores"][0]["blocks"]) == bytes(64)
    live.play([5], delay=0.05)
    secret = "the merger is on friday"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 400, "request_id": "mine", "stream": True}
    with live.http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_for(lambda: taken(live)["first_tokens"]["count"] > idle["first_tokens"]["count"])
        state = taken(live)
        (core,) = state["cores"]
        (request,) = core["requests"]
        assert request["request_id"].startswith("chatcmpl-mine#") and request["status"] == "running"
        assert core["num_running"] == 1 and request["num_blocks"] == core["num_used_blocks"] > 1
        codes = base64.b64decode(core["blocks"])
        assert codes == bytes([2] * core["num_used_blocks"] + [0] * (64 - core["num_used_blocks"]))
        assert core["owners"] == [[0]] and request["age"] > 0
        assert all(0 <= seconds < 10 for seconds in state["first_tokens"]["recent"])
        assert secret not in json.dumps(state)
        assert core["stats"]["num_generated_tokens"] > 0
    live.settle()
    assert taken(live)["cores"][0]["num_running"] == 0


def test_the_state_is_small_and_compressed_for_those_who_can(live) -> None:
    with httpx.stream("GET", live.url + STATE, headers={"Accept-Encoding": "gzip"}, trust_env=False) as packed:
        assert packed.headers["content-encoding"] == "gzip"
        raw = b"".join(packed.iter_raw())
    plain = httpx.get(live.url + STATE, headers={"Accept-Encoding": "identity"}, trust_env=False)
    assert "content-encoding" not in plain.headers
    assert json.loads(gzip.decompress(raw)).keys() == plain.json().keys()


@pytest.mark.parametrize(
    ("options", "key", "shows"),
    [
        ({}, None, True),
        ({"api_key": ("one",)}, "one", True),
        ({"api_key": ("one", "two")}, "one", False),
        ({"api_key": ("one", "two"), "isolate_api_keys": False}, "one", True),
        ({"api_key": ("one",), "admin_api_key": ("root",)}, "one", False),
        ({"api_key": ("one",), "admin_api_key": ("root",)}, "root", True),
    ],
)
def test_other_tenants_ids_are_for_the_administrator(start, options: dict, key: str | None, shows: bool) -> None:
    """Clients choose them, so they may say whose a request is. A number still tells requests apart."""
    server = start(**options)
    server.play([5], delay=0.05)
    with ThreadPoolExecutor(2) as pool:
        ask = {"Authorization": f"Bearer {options.get('api_key', ('none',))[-1]}"}
        for name in ("of-bank#7", "of-shop"):
            body = {"prompt": "x", "max_tokens": 100, "request_id": name}
            pool.submit(server.http.post, "/v1/completions", json=body, headers=ask)
        wait_for(lambda: len(server.engine.live) == 2)
        shown = server.http.get(STATE, headers={"Authorization": f"Bearer {key}"})
        server.llm.abort("cmpl-of-bank#7")
        server.llm.abort("cmpl-of-shop")
    ids = {request["request_id"] for core in shown.json()["cores"] for request in core["requests"]}
    assert len(ids) == 2 and ("of-bank" in shown.text) == ("of-shop" in shown.text) == shows
    assert shows or all(re.fullmatch(r"#\d+", each) for each in ids)


def test_many_viewers_cost_one_snapshot(live, monkeypatch) -> None:
    monkeypatch.setattr(engine_state, "SECONDS_FRESH", 60.0)
    snapshot, calls = live.engine.snapshot, []
    release = threading.Event()

    def slow():
        calls.append(1)
        release.wait(10)
        return snapshot()

    monkeypatch.setattr(live.engine, "snapshot", slow)
    live.app.state.engine_state._taken = -60.0
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(live.http.get, STATE) for _ in range(8)]
        wait_for(lambda: calls)
        release.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert live.http.get(STATE).status_code == 200
    assert len(calls) == 1


def test_a_viewer_who_leaves_takes_the_snapshot_from_nobody() -> None:
    class Llm:
        stats: tuple = ()

        async def snapshot(self) -> list:
            await gate.wait()
            return []

    async def main() -> None:
        state = EngineState(Llm())  # type: ignore[arg-type]
        one, other = asyncio.create_task(state.get()), asyncio.create_task(state.get())
        await asyncio.sleep(0)
        one.cancel()
        gate.set()
        plain, _ = await other
        assert json.loads(plain)["cores"] == []

    gate = asyncio.Event()
    asyncio.run(main())


def test_a_dead_engine_is_told(start) -> None:
    live = start()
    live.play([5], fail_with=RuntimeError("out of memory"))
    live.post(CHAT, messages=HELLO)
    wait_for(lambda: live.llm.error)
    response = live.http.get(STATE)
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"


def test_polling_is_not_in_the_access_log() -> None:
    def record(path: str) -> logging.LogRecord:
        arguments = ("127.0.0.1:5", "GET", path, "1.1", 200)
        return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)

    assert not is_no_polling(record(STATE)) and not is_no_polling(record("/prefix" + STATE))
    assert is_no_polling(record("/")) and is_no_polling(record("/v1/models"))
