"""The page in a real Chromium, in states that a stand-in for the coordinator puts it into."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from tests.browser.chromium import PHONE, needs_chromium, open_page, overflow
from tests.browser.stand_in import Json, StandIn, chunk, tail, worker_row
from tests.pace import scaled

pytestmark = [needs_chromium, pytest.mark.whole, pytest.mark.processes]
expect = pytest.importorskip("playwright.async_api").expect
expect.set_options(timeout=scaled(5_000))

REFUSED = "status of 40[13]"
"""What Chromium writes to the console for a request without the right key."""
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


def request_of(id: str, *spans: Json, **changes: Any) -> Json:
    """Return a request as events have it."""
    shown: Json = {
        "id": id, "request_id": f"req-{id}", "trace_id": None, "endpoint": "/v1/chat/completions",
        "arrived": time.time(), "state": "done", "path": "disagg", "stream": True, "prompt_tokens": 120,
        "cached_tokens": 16, "output_tokens": 40, "choices": 1, "finish": ["stop"], "error": None, "retries": 0,
        "migrations": 0, "ttft_ms": 50.0, "total_ms": 400.0, "itl_ms": {"mean": 8.7, "p99": 14.0, "max": 21.0},
        "spans": list(spans),
    }  # fmt: skip
    return shown | changes


def span(name: str, start: float, end: float | None, worker: str | None = None, **changes: Any) -> Json:
    shown: Json = {
        "name": name, "start_ms": start, "end_ms": end, "attempt": 0, "worker": worker, "parent": None, "detail": {},
    }  # fmt: skip
    return shown | changes


PLACED = {"prefill": "prefill-0", "decode": "decode-0", "path": "disagg", "why": "least loaded"}
SENT = {"to": "decode-0", "link": "shm", "bytes": 9e6, "hidden_ms": 30.0, "exposed_ms": 10.0}
PLAIN = (
    span("tokenize", 0.0, 2.0),
    span("queue", 2.0, 4.0),
    span("place", 4.0, 4.0, detail=PLACED),
    span("prefill", 4.0, 50.0, "prefill-0", detail={"queue_ms": 1.0, "cached_tokens": 16, "chunks": 2}),
    span("prefill_chunk", 5.0, 30.0, "prefill-0", parent=3, detail={"tokens": 64}),
    span("prefill_chunk", 30.0, 50.0, "prefill-0", parent=3, detail={"tokens": 40}),
    span("transfer", 20.0, 60.0, "prefill-0", detail=SENT),
    span("decode", 60.0, 400.0, "decode-0", detail={"wait_ms": 1.0, "tokens": 39}),
)  # fmt: skip


# -- chat -------------------------------------------------------------------------------------------------------------


async def test_an_answer_with_reasoning_text_and_log_probabilities(stand_in: StandIn) -> None:
    def scored(text: str, value: float) -> Json:
        top = [{"token": "other", "logprob": -2.5, "bytes": []}]
        return chunk(text, logprobs={"content": [{"token": text, "logprob": value, "bytes": [], "top_logprobs": top}]})

    stand_in.answers.append(
        [
            chunk(reasoning_content="Let me think. ", reasoning="Let me think. "),
            scored("Hello", -0.01), scored(" ", -0.1), scored(MARKUP, -3.0),
            chunk("", finish="stop"), "[DONE]",
        ]
    )  # fmt: skip
    async with open_page(stand_in.url) as page:
        await page.fill("#p-system", "Be brief.")
        await page.fill("#p-temperature", "0.5")
        await page.check("#p-logprobs")
        await page.fill("#prompt", f"Hi {MARKUP}")
        await page.press("#prompt", "Enter")
        answer = page.locator(".turn.assistant")
        await expect(answer).to_have_attribute("aria-busy", "false")
        await expect(answer.locator(".text")).to_have_text(f"Hello {MARKUP}")
        await expect(answer.locator(".reasoning-text")).to_have_text("Let me think. ")
        assert await page.locator("main :is(img, b) >> text=bold").count() == 0, "text became markup"
        body = stand_in.bodies[0]
        assert [each["role"] for each in body["messages"]] == ["system", "user"]
        assert (body["temperature"], body["logprobs"], body["top_logprobs"]) == (0.5, True, 5)

        await answer.locator(".token").first.hover()
        tip = page.locator("#alternatives")
        await expect(tip).to_be_visible()
        assert re.findall(r"Hello|other|99\.0 %|8\.21 %", await tip.inner_text()) == [
            "Hello",
            "99.0 %",
            "other",
            "8.21 %",
        ]
        await answer.locator(".text").focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowRight")
        await expect(tip).to_contain_text("4.98 %")
        await page.keyboard.press("Escape")
        await expect(tip).to_be_hidden()


async def test_the_rate_is_the_servers_even_if_an_answer_arrives_at_once(stand_in: StandIn) -> None:
    figures = {"ttft_ms": 12.5, "itl_ms_mean": 4.0, "prefill": "prefill-0", "decode": "decode-0"}
    stand_in.answers.append(
        [chunk("One"), chunk(" two"), chunk(" three"), {**chunk(finish="stop"), "tandem": figures}, "[DONE]"]
    )
    async with open_page(stand_in.url) as page:
        await page.fill("#prompt", "Count")
        await page.press("#prompt", "Enter")
        facts = page.locator(".turn.assistant .facts")
        await expect(facts).to_contain_text("first token 12.5 ms · 3 tokens · 250.0 tokens/s · prefill-0 → decode-0")


async def test_stop_ends_the_request(stand_in: StandIn) -> None:
    stand_in.answers.append([chunk("One "), *([0.05, chunk("more ")] * 400)])
    async with open_page(stand_in.url) as page:
        await page.fill("#prompt", "Go on for ever")
        await page.click("#send")
        await expect(page.locator(".turn.assistant .text")).to_contain_text("more more")
        await page.click("#stop")
        await asyncio.wait_for(stand_in.hung_up.wait(), scaled(5))
        await expect(page.locator(".turn.assistant .facts")).to_contain_text("stopped by you")
        await expect(page.locator("#send")).to_be_visible()


async def test_a_tool_call_and_its_result(stand_in: StandIn) -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}}
    stand_in.answers.append([chunk(tool_calls=[call]), chunk(tool_calls=[rest]), chunk(finish="tool_calls"), "[DONE]"])
    stand_in.answers.append([chunk("It rains."), chunk(finish="stop"), "[DONE]"])
    async with open_page(stand_in.url) as page:
        await page.click("summary:text('Tools')")
        await page.click("text=Insert an example")
        await page.fill("#prompt", "What is the weather in Oslo?")
        await page.press("#prompt", "Enter")
        card = page.locator(".call")
        await expect(card.locator("code")).to_have_text("get_weather")
        await expect(card.locator("pre")).to_contain_text('"city": "Oslo"')
        await card.locator("textarea").fill("rain, 7 degrees")
        await card.locator("button").click()
        await expect(page.locator(".turn.assistant .text").last).to_have_text("It rains.")
        assert stand_in.bodies[0]["tools"][0]["function"]["name"] == "get_weather"
        *_, called, result = stand_in.bodies[1]["messages"]
        assert called["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert result == {"role": "tool", "tool_call_id": "call-1", "content": "rain, 7 degrees"}


async def test_a_conversation_goes_on_without_the_result_of_a_call(stand_in: StandIn) -> None:
    """Every call that is sent has a result, also one without an answer; one that was cut off is not sent."""
    calls = [
        {"index": at, "id": f"call-{at}", "type": "function", "function": {"name": f"tool_{at}", "arguments": "{}"}}
        for at in range(2)
    ]
    stand_in.answers.append([chunk(tool_calls=calls), chunk(finish="tool_calls"), "[DONE]"])
    stand_in.answers.append([chunk("Well."), chunk(tool_calls=calls[:1]), chunk(finish="length"), "[DONE]"])
    stand_in.answers.append([chunk("Fine."), chunk(finish="stop"), "[DONE]"])
    async with open_page(stand_in.url) as page:
        await page.fill("#prompt", "Do both")
        await page.press("#prompt", "Enter")
        await page.locator(".call textarea").first.fill("done")
        await page.locator(".call button").first.click()
        assert len(stand_in.bodies) == 1, "it waits for the other result"
        await page.fill("#prompt", "Never mind")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.assistant .text").last).to_have_text("Well.")
        await expect(page.locator(".call .result").nth(1)).to_have_text("no result was given")
        await expect(page.locator(".call button")).to_have_count(0)
        await page.fill("#prompt", "Thanks")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.assistant .text").last).to_have_text("Fine.")
        *_, first, second, asked, cut, last = stand_in.bodies[2]["messages"]
        assert (first["tool_call_id"], first["content"]) == ("call-0", "done")
        assert second["tool_call_id"] == "call-1" and "was not made" in second["content"]
        assert (asked["content"], last["content"]) == ("Never mind", "Thanks")
        assert cut == {"role": "assistant", "content": "Well."}


@pytest.mark.parametrize("secure", [True, False])
async def test_a_request_is_copied_as_curl_without_its_key(stand_in: StandIn, secure: bool) -> None:
    """Browsers have the clipboard's interface only for secure pages; without it the older way is taken."""
    stand_in.key = "the-key"
    async with open_page(stand_in.url, expected=REFUSED) as page:
        if not secure:
            await page.evaluate("() => { Object.defineProperty(navigator, 'clipboard', { value: undefined }); }")
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await page.click(".hello button")
        await page.fill("#client-key", "the-key")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("dialog")).to_have_count(0)  # until then only the dialog takes text
        await page.fill("#prompt", "It's me")
        await page.click(".curl")
        await expect(page.locator(".toast").last).to_have_text("The request copied")
        await page.fill("#prompt", "")
        await page.press("#prompt", "Control+v")
        command = await page.input_value("#prompt")
        assert "$TANDEM_API_KEY" in command and "the-key" not in command and "It'\\''s me" in command


async def test_errors_are_shown_and_a_wrong_parameter_is_not_sent(stand_in: StandIn) -> None:
    error = {"error": {"message": "The worker was lost.", "type": "server_error", "param": None, "code": "worker_lost"}}
    stand_in.answers += [[chunk("Half "), error, "[DONE]"], [chunk("Cut ")]]
    async with open_page(stand_in.url) as page:
        await page.fill("#prompt", "One")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn .problem")).to_have_text("The worker was lost.")
        await page.fill("#prompt", "Two")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn .problem").last).to_contain_text("ended before the answer did")
        await page.fill("#p-temperature", "7")
        await page.fill("#prompt", "Three")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".composer .problem")).to_contain_text("Temperature")
        await expect(page.locator("#p-temperature")).to_be_focused()
        assert len(stand_in.bodies) == 2


# -- keys and connection ----------------------------------------------------------------------------------------------


async def test_keys_are_asked_for_tried_and_kept_in_the_tab(stand_in: StandIn) -> None:
    stand_in.key, stand_in.admin_key = "client", "admin"
    async with open_page(stand_in.url, expected=REFUSED) as page:
        await expect(page.locator(".hello h2")).to_have_text("An API key is needed")
        await expect(page.locator("#link")).to_have_text("key needed")
        await page.click("#keys-button")
        await expect(page.locator("#client-key")).to_be_focused()
        await page.click("dialog button:text('Cancel')")
        await page.click(".hello button")
        await page.fill("#client-key", "wrong")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("#client-key-said")).to_have_text("The server refuses this key.")
        await page.fill("#client-key", "client")
        await page.fill("#admin-key", "client")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("#admin-key-said")).to_contain_text("does not open /admin")
        await page.fill("#admin-key", "")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("dialog")).to_have_count(0)
        await expect(page.locator(".hello h2")).to_have_text("Chat with tiny")
        await page.click("#keys-button")
        await expect(page.locator("#admin-key")).to_be_focused()
        await page.click("dialog button:text('Cancel')")

        await page.click("nav a[href='#system']")
        await expect(page.locator("#system-view .notice")).to_contain_text("enter the admin key")
        await page.click("#system-view .notice button")
        await page.fill("#admin-key", "admin")
        await page.check("#keep-keys")
        await page.click("dialog button[type=submit]")
        await expect(page.locator(".worker")).to_have_count(2)
        assert await page.evaluate("Object.keys(localStorage).filter((key) => key.includes('key'))") == []
        await page.reload()
        await expect(page.locator(".worker")).to_have_count(2)


async def test_the_chat_asks_for_no_key_where_only_the_admin_endpoints_need_one(stand_in: StandIn) -> None:
    stand_in.admin_key = "admin"
    stand_in.answers.append([chunk("Hello."), chunk(finish="stop"), "[DONE]"])
    async with open_page(stand_in.url, expected=REFUSED) as page:
        await expect(page.locator(".hello h2")).to_have_text("Chat with tiny")
        await expect(page.locator("#link")).to_have_text("chat only")
        await page.fill("#prompt", "Hello?")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.assistant")).to_have_attribute("aria-busy", "false")
        await expect(page.locator(".turn.assistant .text")).not_to_be_empty()
        for view in ("system", "requests"):
            await page.click(f"nav a[href='#{view}']")
            await expect(page.locator("#link")).to_have_text("key needed")
            await expect(page.locator(f"#{view}-view .notice")).to_contain_text("A key is needed")
        await page.click("#requests-view .notice button")
        await page.fill("#admin-key", "admin")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("#link")).to_have_text("2 workers")
        await page.click("nav a[href='#chat']")
        await expect(page.locator("#link")).to_have_text("2 workers")


async def test_a_coordinator_that_is_gone_and_comes_back(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, "system", expected="ERR_|status of 429") as page:
        await expect(page.locator("#link")).to_have_text("2 workers")
        await page.route("**/admin/events", lambda route: route.abort())
        stand_in.break_off()
        await expect(page.locator("#banner")).to_contain_text("The coordinator is gone.")
        await expect(page.locator(".system")).to_have_attribute("data-stale", "")
        await page.unroute("**/admin/events")
        await expect(page.locator("#banner")).to_be_hidden()
        await expect(page.locator("#link")).to_have_text("2 workers")
        stand_in.full = True
        stand_in.break_off()
        await expect(page.locator("#banner")).to_contain_text("Too many pages are open.")


async def test_a_system_without_workers(stand_in: StandIn) -> None:
    stand_in.workers, stand_in.links = [], []
    async with open_page(stand_in.url, "system") as page:
        await expect(page.locator("#banner")).to_contain_text("There are no workers.")
        stand_in.workers = [worker_row("c-0", "colocated")]
        await expect(page.locator("#banner")).to_be_hidden()
        await expect(page.locator(".pool.colocated .worker")).to_have_count(1)
        await expect(page.locator("#scale-button")).to_be_hidden()  # a colocated worker is in no pool
        stand_in.workers.append(worker_row("decode-0", "decode"))
        await expect(page.locator("#scale-button")).to_be_visible()


# -- system and admin actions -----------------------------------------------------------------------------------------


async def test_blocks_links_and_a_worker_that_is_lost(stand_in: StandIn) -> None:
    stand_in.workers.append(worker_row(MARKUP, "decode", state="draining"))
    async with open_page(stand_in.url, "system") as page:
        decode = page.locator("[data-worker=decode-0]")
        await expect(decode.locator(".kv")).to_have_attribute("aria-label", re.compile("150 held .* of 600"))
        widths = await decode.locator(".kv i").evaluate_all("(bars) => bars.map((bar) => bar.style.width)")
        assert widths == ["25%", "40%"]
        await expect(page.locator(".pool.decode h4").first).to_have_text(MARKUP)
        await expect(page.locator(".links li")).to_contain_text("1.24 GB/s")
        lost = stand_in.workers.pop(1)
        stand_in.push(
            "worker", {"name": "decode-0", "role": "decode", "state": "lost", "why": "silent", "t": time.time()}
        )
        await expect(decode).to_have_attribute("data-state", "lost")
        await expect(page.locator("#link")).to_have_text("1 of 3 workers")
        stand_in.absent = [{"id": "decode-0", "why": "exited with signal 9", "for_s": 1.0, "restart_in_s": 3.0}]
        await expect(decode.locator(".why")).to_contain_text("exited with signal 9 · restarts in")
        stand_in.absent = [{"id": "decode-0", "why": "drained", "for_s": 1.0, "restart_in_s": 0.0}]
        await expect(decode.locator(".why")).to_have_text("drained · restarting")
        await expect(decode).to_have_attribute("data-state", "left")
        stand_in.workers.append({**lost, "incarnation": "decode-0-b"})
        stand_in.absent = []
        await expect(decode).to_have_attribute("data-state", "ready")
        await expect(page.locator(".log li")).to_contain_text("lost")


async def test_refused_requests_are_shown(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, "system") as page:
        tile = page.locator(".tile", has_text="Requests")
        await expect(tile).to_contain_text("4 running")
        await expect(tile).not_to_contain_text("refused")
        stand_in.rates["refused_s"] = 2.5
        stand_in.push()
        await expect(tile.locator(".bad")).to_have_text(" · 2.50/s refused")


async def test_a_value_without_neighbours_is_seen_in_a_chart(stand_in: StandIn) -> None:
    """The first request of an idle server is one: of the rows around it none has a latency."""
    now = time.time()
    latencies = [None, None, 40.0, None, 30.0, 20.0]
    stand_in.history = [
        {"t": now - 5 * (len(latencies) - at), "output_tokens_s": 1.0, "prompt_tokens_s": 1.0, "ttft_ms": tail(each),
         "itl_ms": None, "running": 0, "waiting": 0}
        for at, each in enumerate(latencies)
    ]  # fmt: skip
    async with open_page(stand_in.url, "system") as page:
        chart = page.locator(".chart", has_text="Time to first token")
        lone = chart.locator("path.lone.p99")
        await expect(lone).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+h0\.01$"))
        assert float(await lone.evaluate("(path) => parseFloat(getComputedStyle(path).strokeWidth)")) >= 4
        assert (await chart.locator("path.line.p99").get_attribute("d")).count("L") == 1


async def test_a_gpu_in_trouble_and_a_pair_that_is_avoided(stand_in: StandIn) -> None:
    gpu = {
        "index": 3, "uuid": "GPU-1", "name": "NVIDIA H200", "utilization": 91, "memory_used": 120 * 10**9,
        "memory_total": 141 * 10**9, "power_mw": None, "temperature": 84, "throttled_by": ["hardware_thermal"],
        "xids": {"94": 2},
    }  # fmt: skip
    stand_in.workers = [worker_row("prefill-0", "prefill", gpus=[gpu], avoids=["decode-0"])]
    async with open_page(stand_in.url, "system") as page:
        await expect(page.locator(".gpus li span")).to_have_text("GPU 3 · 91 % · 120 of 141 GB · 84 °C")
        await expect(page.locator(".gpus li b")).to_have_text("hardware thermal, Xid 94 × 2")
        await expect(page.locator(".avoids")).to_contain_text("decode-0")


async def test_drain_and_scale(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, "system") as page:
        await page.click("[data-worker=decode-0] >> text=Drain")
        await page.fill("#drain-timeout", "2.5")
        await page.click("dialog button[type=submit]")
        await expect(page.locator(".toast")).to_contain_text("decode-0 is draining.")
        await page.click("#scale-button")
        await expect(page.locator("#scale-prefill")).to_have_value("1")
        await page.fill("#scale-decode", "0")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("dialog .problem")).to_contain_text("decode workers")
        await page.fill("#scale-decode", "3")
        await page.click("dialog button[type=submit]")
        await expect(page.locator("dialog")).to_have_count(0)
        assert stand_in.bodies == [
            {"path": "/admin/drain", "worker": "decode-0", "timeout": 2.5},
            {"path": "/admin/scale", "prefill": 1, "decode": 3},
        ]


async def test_links_are_measured_anew(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, "system", expected="status of 401") as page:
        button = page.get_by_role("button", name="Measure", exact=True)
        await expect(page.locator(".links li")).to_contain_text("1.24 GB/s")
        await button.click()
        await expect(page.locator(".toast")).to_have_text("1 link measured.")
        await expect(page.locator(".links li")).to_contain_text("2.48 GB/s")
        await expect(button).to_be_enabled()
        stand_in.admin_key = "admin"
        await button.click()
        await expect(page.locator(".toast.bad")).to_contain_text("Enter the admin key under Keys.")


# -- requests ---------------------------------------------------------------------------------------------------------


async def test_the_list_and_the_details_by_keyboard(stand_in: StandIn) -> None:
    stand_in.requests = {f"chatcmpl-{n}": request_of(f"chatcmpl-{n}", *PLAIN, arrived=1e9 + n) for n in range(3)}
    async with open_page(stand_in.url, "requests") as page:
        rows = page.locator("tr[data-request]")
        await expect(rows).to_have_count(3)
        await expect(rows.first).to_have_attribute("data-request", "chatcmpl-2")
        await expect(rows.first.locator(".mini i")).to_have_count(6)  # the spans were asked for one by one
        await page.keyboard.press("j")  # the focus is not in the list yet
        await expect(rows.first).to_be_focused()
        await page.keyboard.press("/")
        await page.keyboard.type("j")
        await expect(page.locator("#request-search")).to_have_value("j")
        await page.fill("#request-search", "")
        await rows.first.focus()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Enter")
        details = page.locator(".details")
        await expect(details.locator("h2")).to_have_text("chatcmpl-1")
        await expect(details.locator(".story")).to_contain_text("prefill-0 → decode-0: least loaded")
        await details.locator(".rows").focus()
        for _ in range(4):
            await page.keyboard.press("ArrowDown")
        await expect(details.locator(".span-details")).to_contain_text("64 tokens")
        await page.keyboard.press("Escape")
        await expect(details).to_be_hidden()
        await expect(rows.nth(1)).to_be_focused()
        stand_in.request(
            request_of("chatcmpl-9", *PLAIN, state="failed", error="All workers were lost.", finish=[None])
        )
        await expect(rows).to_have_count(4)
        await page.select_option(".tools select >> nth=0", "failed")
        await expect(rows).to_have_count(1)
        await page.select_option(".tools select >> nth=0", "all")
        await page.fill("#request-search", "decode-0")
        await expect(rows).to_have_count(4)
        await page.fill("#request-search", "decode-7")
        await expect(page.locator(".empty")).to_contain_text("No request fits.")
        await page.select_option(".tools select >> nth=0", "failed")
        await expect(page.locator(".empty")).to_have_text("No request fits the filter.")


async def test_a_request_that_was_not_sent_is_found_by_its_id(stand_in: StandIn) -> None:
    """A page receives only some of many requests per second, but can ask for every recent one."""
    stand_in.requests = {"chatcmpl-1": request_of("chatcmpl-1", *PLAIN)}
    async with open_page(stand_in.url, "requests", expected="status of 404") as page:
        await expect(page.locator("tbody tr")).to_have_count(1)
        stand_in.requests |= {f"chatcmpl-{n}": request_of(f"chatcmpl-{n}", *PLAIN) for n in (2, 3)}
        for id, name in (("chatcmpl-2", "chatcmpl-2"), ("chatcmpl-3", "req-chatcmpl-3")):
            await page.fill("#request-search", name)
            await expect(page.locator(".empty")).to_contain_text("Enter asks the coordinator")
            await page.press("#request-search", "Enter")
            await expect(page.locator("#details-title")).to_have_text(id)
            await expect(page.locator("tbody tr")).to_have_count(1)
            await expect(page.locator(".lane")).to_have_count(6)
        await page.fill("#request-search", "nothing")
        await page.press("#request-search", "Enter")
        await expect(page.locator(".list > .problem")).to_contain_text("does not know the request nothing")
        stand_in.requests["nothing"] = request_of("nothing", *PLAIN)
        await page.press("#request-search", "Enter")
        await expect(page.locator("#details-title")).to_have_text("nothing")


async def test_the_waterfall_of_a_migrated_request(stand_in: StandIn) -> None:
    moved = request_of(
        "chatcmpl-moved",
        *PLAIN[:7],
        span("decode", 60.0, 200.0, "decode-0", detail={"tokens": 12}),
        span("migration", 200.0, 300.0, attempt=1, detail={"from": "decode-0", "why": "its connection closed"}),
        span("queue", 200.0, 210.0, attempt=1, parent=8),
        span("prefill", 210.0, 300.0, "prefill-0", attempt=1, parent=8, detail={"chunks": 1}),
        span("decode", 300.0, 400.0, "decode-1", attempt=1, detail={"tokens": 27}),
        migrations=1,
    )
    async with open_page(stand_in.url, "requests/chatcmpl-moved", expected="status of 404") as page:
        await expect(page.locator(".list .problem")).to_contain_text("does not know the request chatcmpl-moved")
        stand_in.request(moved)
        await expect(page.locator("tr .where")).to_contain_text("decode-0 → prefill-0 → decode-1")
        await expect(page.locator("tr .badge")).to_have_text("migrated")
        gap = page.locator(".gaps i")
        await expect(gap).to_have_attribute("style", "left: 50%; width: 25%;")
        await expect(page.locator(".lane[data-span=migration]")).to_contain_text("from decode-0")
        await expect(page.locator(".story")).to_contain_text("Moved from decode-0 after 100 ms: its connection closed.")


# -- looks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_every_view_without_scrolling_sideways(stand_in: StandIn, scheme: str) -> None:
    stand_in.requests = {"chatcmpl-1": request_of("chatcmpl-1", *PLAIN)}
    stand_in.workers += [worker_row(f"decode-{n}", "decode") for n in range(1, 4)]
    async with open_page(stand_in.url, viewport=PHONE, color_scheme=scheme) as page:
        for view, there in (("chat", ".hello"), ("system", ".worker"), ("requests", "tr[data-request]")):
            await page.click(f"nav a[href='#{view}']")
            await expect(page.locator(there).first).to_be_visible()
            assert await overflow(page) == [], view
        await page.click("tr[data-request]")
        await expect(page.locator(".lane").first).to_be_visible()
        assert await overflow(page) == []
        await page.click("nav a[href='#chat']")
        await page.click(".parameters-button")
        await expect(page.locator("#p-system")).to_be_focused()
        assert await overflow(page) == []
        await page.locator("#p-other").evaluate("(field) => field.closest('details').setAttribute('open', '')")
        await page.focus("#p-other")  # far down: the button that closes the panel stays in sight
        await expect(page.locator(".side .close")).to_be_in_viewport()
        await page.keyboard.press("Escape")
        await expect(page.locator(".side")).to_be_hidden()


async def test_events_of_workers_on_a_phone(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, "system", viewport=PHONE) as page:
        await expect(page.locator(".worker").first).to_be_visible()
        why = "nothing has arrived from it since its connection closed"
        stand_in.push("worker", {"name": "decode-0", "role": "decode", "state": "dead", "why": why, "t": time.time()})
        line = page.locator(".log li").first
        await expect(line).to_contain_text(why)
        measure = "(each) => [each.getClientRects()[0].height, each.scrollWidth - each.clientWidth]"
        name = await line.locator("b").evaluate(measure)
        reason = await line.locator(":scope > :last-child").evaluate(measure)
        assert name[0] < 25 and name[1] <= 0, "on one line"
        assert reason[0] > 25 and reason[1] <= 0, "whole, on several lines"


async def test_themes_and_reduced_motion(stand_in: StandIn) -> None:
    async with open_page(stand_in.url, color_scheme="dark", reduced_motion="reduce") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(ground)
        await page.click("#theme-button")
        await page.reload()
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
        assert await page.evaluate(ground) != dark
        stand_in.answers.append([chunk("Hi"), 0.5, chunk(finish="stop"), "[DONE]"])
        await page.fill("#prompt", "Hi")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".turn.assistant")).to_be_visible()
        seconds = await page.locator(".turn.assistant").evaluate(
            "(turn) => parseFloat(getComputedStyle(turn).animationDuration)"
        )
        assert seconds < 0.001


async def test_every_control_has_a_name(stand_in: StandIn) -> None:
    stand_in.requests = {"chatcmpl-1": request_of("chatcmpl-1", *PLAIN)}
    async with open_page(stand_in.url, "requests/chatcmpl-1") as page:
        await expect(page.locator(".lane").first).to_be_visible()
        for view in ("chat", "system", "requests/chatcmpl-1"):
            await page.evaluate("(view) => { location.hash = view; }", view)
            shown = page.locator(f"#{view.partition('/')[0]}-view")
            await expect(shown).to_be_visible()
            for control in await shown.locator("button, input, select, textarea, a, [tabindex='0']").all():
                if await control.is_visible():
                    name = await control.evaluate(
                        "(each) => each.ariaLabel || each.labels?.[0]?.textContent || each.textContent"
                    )
                    assert name and name.strip(), await control.evaluate("(each) => each.outerHTML.slice(0, 200)")
