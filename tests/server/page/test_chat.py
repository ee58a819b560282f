"""The playground in a real browser, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.server.page.conftest import answer, play, say
from tests.waiting import wait_for


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
    play(live, "tick " * 90, delay=0.05)
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
    play(live, "tick " * 90, delay=0.05)
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


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, '{"error": {"message": "Too many <b>requests</b>"}}', "Too many <b>requests</b>"),
        (502, "<html>Bad gateway</html>", "The server answered with status 502."),
        (503, '{"error": "no backend"}', "no backend"),
        (504, '{"error": {}}', "The server answered with status 504."),
    ],
)
def test_every_refusal_is_told(live, tab, status, body, said) -> None:
    """Whether the server refuses, or a proxy before it, in its own form."""
    page = tab(live, allowed=f"status of {status}").open("/#chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body))
    say(page, "Hello")
    expect(page.locator(".error")).to_have_text(said)
    expect(page.locator("#prompt")).to_have_value("Hello")
    expect(page.locator(".turn")).to_have_count(0)


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
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
