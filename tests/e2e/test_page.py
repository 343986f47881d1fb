"""The page at /ui of a real system, in a real Chromium: a chat streams, a killed worker is seen and comes back, and the
waterfall of a migrated request shows where it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import leaked_keys
from tests.browser.chromium import needs_chromium, open_page
from tests.e2e.system import RunningSystem
from tests.pace import scaled

pytestmark = [pytest.mark.e2e, needs_chromium]
playwright = pytest.importorskip("playwright.async_api")

LOSS_IS_SEEN_S = 2.0
STREAM = '{"min_tokens": 600, "max_tokens": 600}'
"""Fields of a request whose answer arrives in many pieces."""
WATCH = """() => new MutationObserver((_, observer) => {
    if (document.querySelector(".turn.assistant[aria-busy=true] .text")?.textContent) {
        observer.disconnect();
        window.answerBegan();
    }
}).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true})"""
"""Calls ``answerBegan`` once text is shown of an answer that is not over."""

HELD = """() => [...document.querySelectorAll("[data-worker=decode-0] .kv i")]
    .some((bar) => parseFloat(bar.style.width))"""
"""Whether the page shows blocks of decode-0 that are held or cached, as those of an answer are."""


async def ask(page: Any, text: str, fields: str) -> None:
    """Send ``text`` in the chat, with other ``fields`` of the request."""
    await page.click("summary:text('Other fields')")
    await page.fill("#p-other", fields)
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


async def beginning(page: Any) -> asyncio.Event:
    """Return an event that is set once text is shown of the next answer, while it is not over. Playwright itself looks
    too seldom: an answer of hundreds of tokens may be over in between."""
    began = asyncio.Event()
    await page.expose_function("answerBegan", began.set)
    await page.evaluate(WATCH)
    return began


async def worker_of(system: RunningSystem, name: str) -> dict[str, Any]:
    async with system.client() as client:
        return dict((await client.workers())[name])


@pytest.mark.alone
async def test_a_chat_streams_and_a_killed_worker_turns_red_and_comes_back(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    playwright.expect.set_options(timeout=scaled(10_000))
    with RunningSystem.up(tmp_path, checkpoint("llama")) as system:
        async with open_page(system.url) as page:
            await playwright.expect(page.locator("#model")).to_have_text(system.name)
            began = await beginning(page)
            await ask(page, "hello", STREAM)
            answer = page.locator(".turn.assistant")
            await playwright.expect(answer).to_have_attribute("aria-busy", "false")
            assert began.is_set(), "it was shown while it was not over"
            await playwright.expect(answer.locator(".facts")).to_contain_text("600 tokens")
            await playwright.expect(answer.locator(".facts")).to_contain_text("prefill-0 → decode-0")

            await page.click("nav a[href='#system']")
            card = page.locator("[data-worker=decode-0]")
            await playwright.expect(card).to_have_attribute("data-state", "ready")
            await playwright.expect(page.locator(".kv")).to_have_count(2)
            await page.wait_for_function(HELD, timeout=scaled(10_000))  # the next snapshot has them
            bars = await card.locator(".kv i").evaluate_all("(bars) => bars.map((bar) => parseFloat(bar.style.width))")
            assert len(bars) == 2 and 0 < sum(bars) <= 100

            before = await worker_of(system, "decode-0")
            psutil.Process(before["pid"]).kill()
            killed_at = time.monotonic()
            await playwright.expect(card).to_have_attribute("data-state", "lost")
            assert time.monotonic() - killed_at < scaled(LOSS_IS_SEEN_S)
            await playwright.expect(card).to_have_attribute("data-state", "ready", timeout=scaled(60_000))
            assert (await worker_of(system, "decode-0"))["pid"] != before["pid"]
            await playwright.expect(page.locator(".log")).to_contain_text("back")
            system.process.look_around()


@pytest.mark.whole
async def test_the_waterfall_of_a_migrated_request_shows_both_workers_and_the_gap(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    playwright.expect.set_options(timeout=scaled(10_000))
    with RunningSystem.up(tmp_path, checkpoint("llama"), "--decode", "2") as system:
        async with open_page(system.url) as page:
            pids = {name: (await worker_of(system, name))["pid"] for name in ("decode-0", "decode-1")}
            began = await beginning(page)
            await ask(page, "hello", STREAM.replace("600", "1500"))
            await asyncio.wait_for(began.wait(), scaled(10.0))
            first = await decoding(system)
            psutil.Process(pids[first]).kill()
            answer = page.locator(".turn.assistant")
            await playwright.expect(answer).to_have_attribute("aria-busy", "false", timeout=scaled(60_000))
            await playwright.expect(answer.locator(".facts")).to_contain_text("1,500 tokens")
            await answer.locator(".facts a").click()

            second = {"decode-0": "decode-1", "decode-1": "decode-0"}[first]
            details = page.locator(".details")
            lanes = details.locator(".lane[data-span=decode]")
            await playwright.expect(lanes).to_have_count(2)
            await playwright.expect(lanes.nth(0)).to_contain_text(first)
            await playwright.expect(lanes.nth(1)).to_contain_text(second)
            await playwright.expect(details.locator(".lane[data-span=migration]")).to_contain_text(f"from {first}")
            await playwright.expect(details.locator(".pill")).to_have_text("done")
            again = details.locator(".lane[data-span=prefill]").nth(1)
            await again.click()
            await playwright.expect(details.locator(".span-details")).to_contain_text("chunk 1")
            gap = await details.locator(".gaps i").bounding_box()
            ends = await lanes.nth(0).locator(".track i").last.bounding_box()
            goes_on = await lanes.nth(1).locator(".track i").first.bounding_box()
            assert gap is not None and ends is not None and goes_on is not None and gap["width"] > 0
            assert ends["x"] + ends["width"] <= gap["x"] + 2 and gap["x"] + gap["width"] <= goes_on["x"] + 2
            await playwright.expect(page.locator("tr .badge")).to_have_text("migrated")
            system.process.look_around()


async def decoding(system: RunningSystem) -> str:
    """Return the name of the decode worker that the only request was placed on."""
    async with system.client() as client:
        async with client.session.get("/admin/requests") as response:
            (request,) = (await response.json())["requests"]
        async with client.session.get(f"/admin/requests/{request['id']}") as response:
            spans = (await response.json())["spans"]
    return next(str(span["detail"]["decode"]) for span in spans if span["name"] == "place")


@pytest.mark.whole
async def test_keys_drain_and_scale(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    playwright.expect.set_options(timeout=scaled(10_000))
    client_key, admin_key = leaked_keys.new_key(), leaked_keys.new_key()
    flags = ("--api-key", client_key, "--admin-api-key", admin_key)
    with RunningSystem.up(tmp_path, checkpoint("llama"), *flags) as system:
        async with open_page(system.url, "system", expected="status of 40[13]") as page:
            await playwright.expect(page.locator("#system-view .notice")).to_contain_text("A key is needed")
            await page.click("#keys-button")
            await page.fill("#admin-key", client_key)
            await page.click("dialog button[type=submit]")
            await playwright.expect(page.locator("#admin-key-said")).to_contain_text("does not open /admin")
            await page.fill("#admin-key", admin_key)
            await page.click("dialog button[type=submit]")
            await playwright.expect(page.locator(".worker")).to_have_count(2)

            await page.click("#scale-button")
            await page.fill("#scale-decode", "2")
            await page.click("dialog button[type=submit]")
            await playwright.expect(page.locator("[data-worker=decode-1]")).to_have_attribute(
                "data-state", "ready", timeout=scaled(60_000)
            )
            await playwright.expect(page.locator("dialog")).to_have_count(0)
            await page.click("[data-worker=decode-1] >> text=Drain")
            await page.click("dialog button[type=submit]")
            await playwright.expect(page.locator(".log")).to_contain_text("decode-1")
            await playwright.expect(page.locator(".log")).to_contain_text("it has drained")
            await playwright.expect(page.locator("[data-worker=decode-1]")).to_have_attribute(
                "data-state", "ready", timeout=scaled(60_000)
            )
            system.process.look_around()
