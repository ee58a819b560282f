"""A headless Chromium for tests of the page: what it complains of and whom it asks is recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.server.conftest import EOS, LiveServer, RunningServer

NEEDED = "JAXPAGED_NEEDS_CHROMIUM"  # set where a missing browser is a failure
PATIENCE = 60_000  # milliseconds; a busy machine may need some
expect.set_options(timeout=PATIENCE)
_ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


def chromium() -> str:
    """The path of Chromium; without one the test is skipped, or fails where NEEDED is set."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        message = "no Chromium on the PATH (Debian: apt-get install chromium)"
        if os.environ.get(NEEDED):
            pytest.fail(message)
        pytest.skip(message)
    return found


class Tab:
    """A window of its own, with its own storage.

    Attributes:
      page: Playwright's page.
      complaints: errors and warnings on the console, exceptions, breaches of the page's policy.
      hosts: all hosts that were asked for anything.
    """

    def __init__(self, browser: Browser, url: str, *, width: int = 1280, height: int = 800, **options: Any):
        self.url, self.complaints, self.hosts = url, [], set()
        self._context = browser.new_context(viewport={"width": width, "height": height}, **options)
        self._context.set_default_timeout(PATIENCE)
        self.page: Page = self._context.new_page()
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def open(self, path: str = "/") -> Page:
        """Goes to a path of the server."""
        self.page.goto(self.url + path)
        return self.page

    def close(self, *, allowed: str | None = None) -> None:
        """Checks that nothing went wrong and nobody else was asked; complaints that hold `allowed` are expected."""
        self._context.close()
        assert not [text for text in self.complaints if allowed is None or allowed not in text]
        assert self.hosts <= {urlsplit(self.url).netloc}


OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module each: while it runs, nothing else in this thread can have an event loop."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


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
    """Sends a message."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def play(live: LiveServer, text: str, **options: Any) -> None:
    """Has the engine answer this text."""
    live.play([*live.tokenizer.byte_ids(text), EOS], **options)


def answer(page: Page) -> Locator:
    """The last one."""
    return page.locator(".assistant").last
