"""The live view of the engine in a real browser, over a scripted engine and over a real one."""

from __future__ import annotations

import msgspec
import pytest
from playwright.sync_api import Page, expect

from jaxpaged.config import EngineConfig
from jaxpaged.core.snapshot import EngineSnapshot, RequestSnapshot, block_map
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.engine.load import load_engine
from jaxpaged.engine.stats import EngineStats
from tests import tiny_model
from tests.server.conftest import RunningServer
from tests.server.page.conftest import answer, play, say
from tests.waiting import wait_for


def test_the_engine_view_shows_requests_and_their_blocks(live, tab) -> None:
    play(live, "abc " * 100, delay=0.1)  # longer than all that is looked at
    page = tab(live, width=1400).open("/#both")
    expect(page.locator("#f-running")).to_have_text("0")
    expect(page.locator("#map")).to_have_attribute("data-owned", "0")
    say(page, "How many blocks?")
    row = page.locator("#requests tr")
    expect(row).to_have_count(1)
    expect(row.get_by_text("this page")).to_be_visible()
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
    play(live, "abc " * 100, delay=0.1)
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


def prefix_shared(num_blocks: int) -> EngineSnapshot:
    """Two requests whose first two blocks are the same, and one of their own each; then one that is cached."""
    told = [
        RequestSnapshot(f"cmpl-{name}#0", 0, "running", 40, 1, 40, 32, 100, 3, 0, 1.0) for name in ("first", "second")
    ]
    owners, blocks = block_map(num_blocks, [[1, 2, 3], [1, 2, 4]], [5])
    return EngineSnapshot(16, num_blocks, 4, 1, 2, 0, told, owners, blocks)


def colours(page: Page, num_blocks: int) -> list[str]:
    """The colour of each block's cell, near its lower left corner; so few are drawn as large as can be."""
    return page.evaluate(
        """(count) => {
          const map = document.getElementById("map");
          const { data } = map.getContext("2d").getImageData(0, 0, map.width, map.height);  // once: it is slow
          const columns = Math.floor(parseFloat(map.style.width) / 20), pitch = map.width / columns;
          return Array.from({ length: count }, (_, i) => {
            const x = Math.floor((i % columns) * pitch + 3), y = Math.floor(Math.floor(i / columns) * pitch + 15);
            return data.slice(4 * (y * map.width + x), 4 * (y * map.width + x + 1)).join();
          });
        }""",
        num_blocks,
    )


def test_requests_with_one_prefix_share_its_blocks_and_each_kind_has_a_colour(live, tab, monkeypatch) -> None:
    """What is drawn: two blocks shared by both, one of each, a cached one, and free ones."""

    class Llm:
        stats = (EngineStats(),)

        async def snapshot(self) -> list[EngineSnapshot]:
            return [prefix_shared(64)]

    monkeypatch.setattr(live.app.state.engine_state, "_llm", Llm())
    page = tab(live).open("/#engine")
    expect(page.locator("#map")).to_have_attribute("data-shared", "2")
    expect(page.locator("#map")).to_have_attribute("data-owned", "4")
    shared, again, first, second, cached, free, *others = colours(page, 64)
    assert shared == again and set(others) == {free}
    assert len({shared, first, second, cached, free, "0,0,0,0"}) == 6
    page.focus("#map")
    for key, said in (("Home", "Block 1: shared by 2: first, second"), ("ArrowRight", "Block 2: shared by 2: first")):
        page.keyboard.press(key)
        expect(page.locator("#readout")).to_contain_text(said)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_have_text("Block 3: first")


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
    expect(page.locator("#readout")).to_have_attribute("aria-live", "off")  # it changes with every state
    page.focus("#map")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_contain_text(str(num_blocks))
    expect(page.locator("#readout")).to_have_attribute("aria-live", "polite")


@pytest.mark.slow
def test_over_a_real_engine(tmp_path_factory, tab) -> None:
    """A tiny model: blocks of the request that runs, and of its prefix once it has ended."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model.save(folder)
    config = EngineConfig(model=str(folder), max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=40, strict=True)
    engine, tokenizer = load_engine(config)
    server = RunningServer(AsyncLLM(InProcessClient(engine, tokenizer), tokenizer))
    try:
        page = tab(server, width=1400).open("/#both")
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
        page.close()  # else it would complain that the server is gone
    finally:
        server.stop()
