"""Chromium, driven by Playwright: the system's program, with a new profile for each test."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.pace import scaled

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (Debian: apt install chromium)")


@contextlib.asynccontextmanager
async def open_page(
    url: str, view: str = "chat", *, viewport: dict[str, int] = DESKTOP, expected: str = "(?!)", **options: Any
) -> AsyncIterator[Any]:
    """Open a view of the page of the server at ``url``. Fails if anything is written to the console, but for messages
    that match ``expected``, or if the page asks another server for anything."""
    from playwright.async_api import async_playwright

    said: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=FLAGS)
        try:
            context = await browser.new_context(viewport=viewport, **options)
            context.set_default_timeout(scaled(20_000))
            page = await context.new_page()
            page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: said.append(f"error: {error}"))
            page.on(
                "request",
                lambda request: said.append(f"foreign: {request.url}") if _is_foreign(request.url, url) else None,
            )
            await page.goto(f"{url}/ui/#{view}")
            yield page
        finally:
            await browser.close()
    wrong = [each for each in said if not re.search(expected, each)]
    assert not wrong, wrong


def _is_foreign(asked: str, url: str) -> bool:
    return not asked.startswith((f"{url}/", "data:", "blob:"))


async def overflow(page: Any) -> list[str]:
    """Return what sticks out of the window to the right, as the beginning of its HTML."""
    found: list[str] = await page.evaluate(
        """() => [...document.querySelectorAll('body *')]
            .filter((each) => each.checkVisibility() && each.getBoundingClientRect().right > innerWidth + 1)
            .filter((each) => !each.closest('.skip, .conversation pre'))
            .map((each) => each.outerHTML.slice(0, 120))"""
    )
    return found
