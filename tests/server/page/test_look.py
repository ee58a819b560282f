"""Light and dark, narrow and wide, and the documentation, in a real browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.server.page.conftest import answer, play, say

pytestmark = pytest.mark.slow


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
