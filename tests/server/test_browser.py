"""The page in a real browser, over a scripted engine and over a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from jaxpaged.config import EngineConfig
from jaxpaged.core.snapshot import EngineSnapshot
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import InProcessClient
from jaxpaged.engine.load import load_engine
from jaxpaged.engine.stats import EngineStats
from tests import tiny_model
from tests.server.browser import Tab, running
from tests.server.conftest import EOS, LiveServer, RunningServer, wait_for

OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[OpenTab]:
    """Opens tabs; at the end each must be free of complaints and must have asked its own server only."""
    tabs: list[tuple[Tab, str | None]] = []

    def make(server: RunningServer, *, allowed: str | None = None, **options: Any) -> Tab:
        tabs.append((Tab(browser, server.url, **options), allowed))
        return tabs[-1][0]

    yield make
    for each, allowed in tabs:
        each.close(allowed=allowed)


def say(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def play(live: LiveServer, text: str, **options: Any) -> None:
    live.play([*live.tokenizer.byte_ids(text), EOS], **options)


def answer(page: Page) -> Any:
    return page.locator(".assistant").last


def test_it_answers_and_remembers(live, tab) -> None:
    play(live, "A **page** maps.\n\n- one\n- two\n\n```python\nx = 1\n```", delay=0.001)
    page = tab(live).open()
    expect(page.locator("#served")).to_have_text("tiny")
    assert page.locator("#model option").all_text_contents() == ["tiny", "alias"]
    say(page, "What is a page?")
    expect(answer(page).locator("strong")).to_have_text("page")
    expect(answer(page).locator("li")).to_have_text(["one", "two"])
    expect(answer(page).locator("pre code")).to_have_text("x = 1")
    footer = answer(page).locator("footer")
    expect(footer).to_contain_text("finish stop")
    for part in ("first token", "tokens/s", "51 out"):
        expect(footer).to_contain_text(part)
    play(live, "Again.")
    say(page, "And again?")
    expect(answer(page).locator(".text").last).to_have_text("Again.")
    said = live.tokenizer.decode(live.engine.requests[-1].prompt_token_ids)
    assert "What is a page?" in said and "A **page** maps." in said and "And again?" in said


def test_the_answer_comes_piece_by_piece(live, tab) -> None:
    play(live, "x" * 200, delay=0.01)
    page = tab(live).open()
    say(page, "Go")
    lengths = [0]
    wait_for(lambda: lengths.append(len(answer(page).locator(".text").last.text_content() or "")) or lengths[-1] == 200)
    assert len(set(lengths)) > 4, "it came all at once"


def test_stop_frees_the_engine_and_keeps_what_came(live, tab) -> None:
    play(live, "tick " * 90, delay=0.02)
    page = tab(live).open()
    say(page, "Go")
    expect(answer(page).locator(".text").last).to_contain_text("tick tick")
    assert len(live.engine.live) == 1
    page.click("#stop")
    live.settle()
    assert live.engine.aborted
    expect(answer(page).locator("footer")).to_contain_text("stopped")
    expect(answer(page)).to_contain_text("tick tick")
    play(live, "done")
    say(page, "More")
    expect(answer(page).locator(".text").last).to_have_text("done")
    page.keyboard.press("Escape")  # nothing to stop
    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_a_new_chat_knows_nothing_of_the_one_that_it_ends(live, tab) -> None:
    play(live, "tick " * 90, delay=0.02)
    page = tab(live).open()
    say(page, "The first one")
    expect(answer(page).locator(".text").last).to_contain_text("tick tick")
    page.click("#new")
    live.settle()
    play(live, "ok")
    say(page, "The second one")
    expect(answer(page).locator(".text").last).to_have_text("ok")
    said = live.tokenizer.decode(live.engine.requests[-1].prompt_token_ids)
    assert "second" in said and "first" not in said and "tick" not in said


def test_markup_of_the_model_stays_text(live, tab) -> None:
    bad = (
        "<script>window.hit=1</script><img src=x onerror='window.hit=1'> **<b>x</b>** `<i>`\n\n"
        "- <svg onload='window.hit=1'>\n\n```html\n</code></pre><script>window.hit=1</script>\n```\n"
        "[link](javascript:window.hit=1) <iframe src='https://example.com'></iframe>"
    )
    play(live, bad)
    page = tab(live).open()
    say(page, "<img src=x onerror='window.hit=1'>")
    expect(answer(page).locator("footer")).to_contain_text("finish stop")
    for shown in ("<script>window.hit=1</script><img", "<b>x</b>", "<svg onload=", "</code></pre><script>", "<iframe"):
        expect(answer(page)).to_contain_text(shown)
    assert page.locator("#thread").locator("script, img, svg, iframe, b, i, a").count() == 0
    assert page.evaluate("window.hit") is None


def test_options_are_sent_and_faults_are_told(live, tab) -> None:
    play(live, "ab" * 50)
    page = tab(live, allowed="400 (Bad Request)").open()
    page.click("#options-button")
    for field, value in {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "max_tokens": "7",
        "seed": "3",
    }.items():
        page.fill(f"#{field}", value)
    page.fill("#stop-strings", "zzz\nyyy")
    page.select_option("#model", "alias")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Go")
    body = sent.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
    wanted = {"model": "alias", "temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "stop": ["zzz", "yyy"]}
    assert wanted.items() <= body.items()
    expect(answer(page).locator("footer")).to_contain_text("finish length")
    page.fill("#temperature", "-1")
    say(page, "Once more")
    expect(page.locator(".error")).to_contain_text("temperature")
    expect(page.locator("#prompt")).to_have_value("Once more")
    page.fill("#temperature", "")
    page.press("#prompt", "Enter")
    expect(answer(page).locator("footer")).to_contain_text("finish length")
    expect(page.locator(".error")).to_have_count(0)


def test_a_key_is_asked_for_and_kept_in_the_tab_only(start, tab) -> None:
    live = start(api_key=("secret",), enable_public_page=True)
    play(live, "yes")
    tab_of = tab(live, allowed="401 (Unauthorized)")
    page = tab_of.open("/#chat")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-message")).to_contain_text("API key")
    page.click("#key-cancel")
    say(page, "Hello")
    expect(page.locator(".error")).to_contain_text("a valid API key is needed")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    expect(page.locator("#served")).to_have_text("tiny")
    page.press("#prompt", "Enter")  # what was not answered is still there
    expect(answer(page).locator(".text").last).to_have_text("yes")
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie").find("secret") < 0
    page.goto(live.url + "/docs")
    expect(page.locator("h2").first).to_contain_text("POST")


def test_reasoning_and_tool_calls_are_shown(live, tab) -> None:
    """As the server streams them; the stream itself is played here."""
    pieces = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "<b>think</b>."},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
    ]
    page = tab(live).open("/#chat")
    bodies: list[Any] = []

    def play_stream(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        body = stream_of(pieces if len(bodies) == 1 else [{"content": "Sunny."}])
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", play_stream)
    page.click("#options-button")
    page.fill("#tools", '{"type": "function", "function": {"name": "weather"}}')
    say(page, "Weather in Rome?")
    folded = answer(page).locator("details")
    expect(folded.locator("summary")).to_be_visible()
    expect(folded.locator(".text")).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.locator(".text")).to_have_text("Let me <b>think</b>.")
    expect(answer(page).locator(".call")).to_contain_text("weather")
    expect(answer(page).locator(".call pre")).to_contain_text('"city": "Rome"')
    answer(page).get_by_label("Result of weather").fill("25 degrees")
    answer(page).get_by_role("button", name="Send results").click()
    expect(answer(page).locator(".text").last).to_have_text("Sunny.")
    assert bodies[0]["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    call, result = bodies[1]["messages"][-2:]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "25 degrees"}


def stream_of(pieces: list[dict[str, Any]]) -> str:
    """An event stream that gives these deltas, and ends."""
    import json

    chunks = [{"id": "x", "choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_the_engine_view_shows_requests_and_their_blocks(live, tab) -> None:
    play(live, "abc " * 100, delay=0.02)
    page = tab(live, width=1400).open("/#both")
    expect(page.locator("#f-running")).to_have_text("0")
    expect(page.locator("#map")).to_have_attribute("data-owned", "0")
    say(page, "How many blocks?")
    row = page.locator("#requests tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("this page")
    (request,) = live.engine.live.values()
    owned = str(live.engine._blocks(request))
    expect(page.locator("#map")).to_have_attribute("data-owned", owned)
    expect(row.locator("td").nth(3)).to_have_text(owned)
    expect(page.locator("#f-running")).to_have_text("1")
    page.focus("#map")
    page.keyboard.press("Home")
    name = request.request_id.partition("#")[0].removeprefix("chatcmpl-")
    expect(page.locator("#readout")).to_have_text(f"Block 1: {name}")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_have_text("Block 64: free")
    wait_for(lambda: float((page.locator("#c-output").text_content() or "").replace("\u2013", "0")) > 0)
    expect(page.locator("#c-first")).to_contain_text("ms")
    page.click("#stop")
    expect(row).to_have_count(0)
    expect(page.locator("#map")).to_have_attribute("data-owned", "0")


def test_nobody_asks_for_the_state_while_it_is_not_shown(live, tab) -> None:
    page = tab(live).open("/#chat")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "engine/state" in request.url else None)
    expect(page.locator("#served")).to_have_text("tiny")
    page.wait_for_timeout(1200)
    assert not asked
    page.click("text=Engine")
    expect(page.locator("#f-running")).to_have_text("0")
    page.click("text=Chat")
    page.wait_for_timeout(100)
    count = len(asked)
    page.wait_for_timeout(1200)
    assert len(asked) == count >= 1


def test_samples_of_one_request_share_their_blocks(live, tab) -> None:
    play(live, "abc " * 100, delay=0.02)
    page = tab(live).open("/#engine")
    body = {"prompt": "x" * 100, "n": 3, "max_tokens": 300, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        expect(page.locator("#requests tr")).to_have_count(3)
        expect(page.locator("#map")).to_have_attribute("data-shared", "7")
        page.hover("#map", position={"x": 5, "y": 5})
        expect(page.locator("#readout")).to_contain_text("shared by 3")
    live.settle()


def test_each_core_has_a_map(live, tab, monkeypatch) -> None:
    one, other = live.engine.snapshot(), msgspec.structs.replace(live.engine.snapshot(), num_used_blocks=32)

    class Llm:
        stats = (EngineStats(num_preemptions=1), EngineStats(num_preemptions=2))

        async def snapshot(self) -> list[EngineSnapshot]:
            return [one, msgspec.structs.replace(other, blocks=bytes([1] * 64))]

    monkeypatch.setattr(live.app.state.engine_state, "_llm", Llm())
    page = tab(live).open("/#engine")
    expect(page.locator("#cores button")).to_have_text(["Core 0: 0%", "Core 1: 50%"])
    expect(page.locator("#f-preemptions")).to_have_text("3")
    expect(page.locator("#f-usage")).to_have_text("25%")
    expect(page.locator("#map")).to_have_attribute("data-cached", "0")
    page.click("#cores button:last-child")
    expect(page.locator("#map")).to_have_attribute("data-cached", "64")
    expect(page.locator("#cores button:last-child")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("num_blocks", [100, 100_000])
def test_large_and_small_pools_have_a_map(start, tab, num_blocks: int) -> None:
    live = start(engine_options={"num_blocks": num_blocks})
    page = tab(live).open("/#engine")
    expect(page.locator("#readout")).to_contain_text(f"{num_blocks} free")
    box = page.locator("#map").bounding_box()
    assert box and box["height"] <= 330 and box["width"] <= 1280
    assert ("a cell is" in (page.locator("#readout").text_content() or "")) == (num_blocks > 100)
    page.focus("#map")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text(str(num_blocks))


def luminance(page: Page) -> float:
    """How bright the page's ground is, from 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_it_is_dark_where_the_system_is_or_the_user_says_so(live, tab) -> None:
    page = tab(live, color_scheme="dark").open()
    assert luminance(page) < 40
    page.click("#theme-button")
    assert luminance(page) > 200
    page.reload()
    assert luminance(page) > 200
    page.click("#theme-button")
    assert luminance(page) < 40
    assert luminance(tab(live, color_scheme="light").open("/docs")) > 200


@pytest.mark.parametrize("view", ["#chat", "#engine", "docs"])
def test_it_fits_a_phone(live, tab, view: str) -> None:
    play(live, "w" * 90 + "\n\n```\n" + "long " * 20 + "\n```\n\n| a | b |\n|---|---|\n| " + "c" * 60 + " | d |")
    page = tab(live, width=390, height=844, has_touch=True, is_mobile=True).open(f"/{view}")
    if view == "#chat":
        page.click("#options-button")
        say(page, "v" * 150)
        expect(answer(page).locator("footer")).to_contain_text("finish stop")
    elif view == "#engine":
        expect(page.locator("#f-running")).to_have_text("0")
    else:
        expect(page.locator("section").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_docs_list_every_endpoint_and_field(live, tab) -> None:
    page = tab(live).open("/docs")
    schema = live.http.get("/openapi.json").json()
    expect(page.locator("section")).to_have_count(sum(map(len, schema["paths"].values())))
    chat = page.locator("section", has=page.locator("h2", has_text="/v1/chat/completions"))
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(chat.locator("tbody th").all_text_contents()) == set(body["properties"])
    expect(chat.locator("tbody tr").first).to_contain_text("messages")


def test_over_a_real_engine(tmp_path_factory, tab) -> None:
    """A tiny model: blocks of the request that runs, and of its prefix once it has ended."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model.save(folder)
    config = EngineConfig(model=str(folder), max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=40, strict=True)
    engine, tokenizer = load_engine(config)
    server = RunningServer(AsyncLLM(InProcessClient(engine, tokenizer), tokenizer))
    try:
        opened = tab(server, width=1400)
        page = opened.open("/#both")
        page.click("#options-button")
        page.fill("#max_tokens", "24")
        page.fill("#temperature", "0")
        say(page, "Hello world, and all who live on it")
        expect(answer(page).locator("footer")).to_contain_text("finish")
        pool = engine.scheduler.block_manager
        wait_for(lambda: not engine.has_work)
        expect(page.locator("#map")).to_have_attribute("data-cached", str(pool.num_cached_blocks))
        assert pool.num_cached_blocks >= 2
        expect(page.locator("#map")).to_have_attribute("data-owned", "0")
        answer(page).get_by_role("button", name="Retry").click()
        expect(page.locator("#f-hits")).not_to_have_text("0%")
        expect(answer(page).locator("footer")).to_contain_text("cached")
    finally:
        server.stop()
