"""Take the screenshots of docs/operate/page.md from a real system under load: ``python -m tests.browser.screenshots``.

Starts ``tandem up`` with one prefill and two decode workers, keeps some clients busy for a few minutes so that the
charts have something to show, kills a decode worker in the middle of an answer, and writes ``docs/_static/page-*.png``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from PIL import Image

from tests.browser.chromium import PHONE, open_page
from tests.e2e.system import RunningSystem

STATIC = Path(__file__).parents[2] / "docs" / "_static"
WINDOW = {"width": 1360, "height": 850}
COLOURS = 256
"""Colours of a screenshot: enough for flat areas and smooth text, and a third of the bytes of all of them."""
TEXTS = (
    "List the planets of the solar system.",
    "Write a short poem about a river.",
    "What is the capital of France?",
    "Explain what a cache is to a child. " * 12,
    "Summarize: " + "The cyclists rode along the coast until the wind turned. " * 30,
)


async def client(url: str, seed: int) -> None:
    """Send chats for ever, with pauses."""
    chance = random.Random(seed)
    async with aiohttp.ClientSession() as session:
        while True:
            messages = [{"role": "user", "content": f"({chance.random():.3f}) {chance.choice(TEXTS)}"}]
            body = {"messages": messages, "max_tokens": chance.randrange(20, 120), "stream": True}
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    await response.read()
            await asyncio.sleep(chance.expovariate(0.6))


@contextlib.asynccontextmanager
async def clients(url: str, number: int) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(client(url, seed)) for seed in range(number)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def get(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}{path}") as response:
        return await response.json()


async def kill_a_decoding_worker(url: str) -> str:
    """Kill the decode worker with the largest batch, and return its name once it is started again."""
    while True:
        rows = (await get(url, "/admin/workers"))["workers"]
        busy = max((row for row in rows if row["role"] == "decode"), key=lambda row: row["running"])
        if busy["running"]:
            psutil.Process(busy["pid"]).kill()
            return str(busy["id"])
        await asyncio.sleep(0.02)


async def moved(url: str) -> str:
    """Return the id of a request that moved to another worker and has ended."""
    while True:
        for request in (await get(url, "/admin/requests?limit=100"))["requests"]:
            if request["migrations"] and request["state"] == "done":
                return str(request["id"])
        await asyncio.sleep(0.1)


async def shoot(page: Any, name: str) -> None:
    """Write a screenshot, with few colours."""
    path = STATIC / f"page-{name}.png"
    await page.screenshot(path=path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


async def chat(page: Any, text: str, fields: dict[str, Any]) -> None:
    await page.evaluate("(text) => { document.getElementById('p-other').value = text; }", json.dumps(fields))
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await page.locator(".turn.assistant").last.locator(".facts a").wait_for()


async def shots(url: str, minutes: float) -> None:
    async with clients(url, 5):
        await asyncio.sleep(60 * minutes)
        await kill_a_decoding_worker(url)
        id = await moved(url)
        async with open_page(url, "system", viewport=WINDOW) as page:
            await asyncio.sleep(75)  # for the lines of batches
            await shoot(page, "system")
            await page.evaluate("(id) => { location.hash = `requests/${id}`; }", id)
            await page.locator(".lane[data-span=migration]").click()
            await shoot(page, "waterfall")
        async with open_page(url, "chat", viewport={"width": 1360, "height": 620}, color_scheme="dark") as page:
            await page.check("#p-logprobs")
            await chat(page, "Tell me a short story about a fox.", {"temperature": 0.8, "seed": 7, "max_tokens": 120})
            await page.locator(".token.p2").first.hover()
            await shoot(page, "chat")
        async with open_page(url, "requests", viewport=PHONE) as page:
            await page.locator("tr .mini .decode").nth(30).wait_for()
            await shoot(page, "phone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="default: the built-in model")
    parser.add_argument("--minutes", type=float, default=4.0, help="of load before the first screenshot")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = ["up", *options.model, "--port", "0", "--control-port", "0", "--decode", "2"]
        with RunningSystem.running(Path(folder) / "up.log", *words) as system:
            asyncio.run(shots(system.url, options.minutes))


if __name__ == "__main__":
    main()
