"""A headless Chromium for tests: what it complains of and whom it asks is recorded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NEEDED = "JAXPAGED_NEEDS_CHROMIUM"  # set where a missing browser is a failure
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


@contextmanager
def running() -> Iterator[Browser]:
    """The browser."""
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


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
        self._context.set_default_timeout(15_000)
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
