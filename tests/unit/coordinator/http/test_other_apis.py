"""The Responses API and the Messages API over real sockets: OpenAI's own client, events, errors, keys, keep-alives."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.core.ids import unpack_tokens
from coordinator.http import answer, sse
from tests.fakes.checkpoint import EOS, fake_checkpoint
from tests.fakes.worker import FakeWorker
from tests.unit.coordinator.api.event_machines import MessagesMachine, ResponsesMachine, named_events
from tests.unit.coordinator.fake_cluster import FakeCluster, letters, open_cluster, prefilled, until
from tests.unit.coordinator.http.test_keepalive import Gate
from tests.unit.coordinator.http.test_parsed_answers import CALL, LINES, OPENS, OTHER, PLAIN, REASONS, TO_WEATHER

pytestmark = pytest.mark.processes  # tools have grammars, which a process compiles

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
INPUT = "/v1/responses/input_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "weather", "input_schema": SCHEMA}
ASKED = {"input": "hello"}
SAID = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hello"}]}
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KEYS = {"api_key": "k" * 20}


async def write(cluster: FakeCluster, text: str, **options: Any) -> list[FakeWorker]:
    """Add workers that write ``text``."""
    return [await cluster.add(role, script=letters(text), **options) for role in ("prefill", "decode")]


async def prompt_of(cluster: FakeCluster) -> str:
    """Return the text of the only prompt that workers got."""
    (request,) = await prefilled(cluster, 1)
    return cluster.services.model.text.decode(unpack_tokens(request.prompt), skip_special_tokens=False)


async def streamed(cluster: FakeCluster, path: str, body: dict[str, Any], machine: Any) -> Any:
    """Return ``machine`` after it accepted all events of a stream."""
    async with cluster.client.post(f"{cluster.url}{path}", json={**body, "stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream", await response.text()
        stream = await response.read()
    for event in named_events(stream):
        if isinstance(machine, ResponsesMachine):
            _EVENTS.validate_python(event)
        machine.accept(event)
    assert machine.state == "end"
    return machine


def client_of(cluster: FakeCluster, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=options.pop("api_key", "none"), max_retries=0, **options)


@pytest.fixture
async def plain(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, chat_template=PLAIN) as cluster:
        yield cluster


@pytest.fixture
async def opens(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, chat_template=OPENS) as cluster:
        yield cluster


# -- Responses --------------------------------------------------------------------------------------------------------


async def test_responses_of_text(plain: FakeCluster) -> None:
    await write(plain, "Hi there")
    async with client_of(plain) as client:
        whole = await client.responses.create(model="tiny", input="hello", temperature=0.5, instructions="Be brief.")
        assert whole.output_text == "Hi there" and whole.status == "completed" and whole.id.startswith("resp_")
        assert whole.temperature == 0.5 and whole.top_p == 1.0 and whole.instructions == "Be brief."
        assert whole.usage is not None and whole.usage.output_tokens == 9
        async with client.responses.stream(model="tiny", input="hello") as events:
            text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
            final = await events.get_final_response()
        assert text == final.output_text == "Hi there"
        cut = await client.responses.create(model="tiny", input="hello", max_output_tokens=3)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens" and cut.output_text == "Hi "
        assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_responses_with_calls(plain: FakeCluster) -> None:
    await write(plain, f"Let me look. {CALL}\n{OTHER}")
    body = {**ASKED, "tools": [FLAT]}
    _, whole = await plain.post(RESPONSES, body)
    Response.model_validate(whole)
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
    assert [json.loads(item["arguments"])["city"] for item in whole["output"][1:]] == ["Oslo", 'Bergen, "west"']
    assert whole["tools"] == [{**FLAT, "description": None}] and whole["tool_choice"] == "auto"
    machine = await streamed(plain, RESPONSES, body, ResponsesMachine())
    for items in (whole["output"], machine.response["output"]):
        for item in items:
            item.pop("id")
            item.pop("call_id", None)
    assert machine.response["output"] == whole["output"]
    one = await streamed(plain, RESPONSES, {**body, "parallel_tool_calls": False}, ResponsesMachine())
    assert [item["type"] for item in one.items] == ["message", "function_call"]


async def test_responses_with_reasoning(opens: FakeCluster) -> None:
    await write(opens, "let me see</think>\n\nForty-two.")
    _, whole = await opens.post(RESPONSES, ASKED)
    Response.model_validate(whole)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][0]["content"][0]["text"] == "let me see"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    machine = await streamed(opens, RESPONSES, ASKED, ResponsesMachine())
    assert [item["content"] for item in machine.items] == [item["content"] for item in whole["output"]]


async def test_responses_with_log_probabilities(plain: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(plain, f"Let me look. {CALL}")
    async with client_of(plain) as client:
        whole = await client.responses.create(
            model="tiny", input="hello", tools=[FLAT], include=["message.output_text.logprobs"], top_logprobs=2
        )
        part: Any = whole.output[0].content[0]  # type: ignore[union-attr, index]
        assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text == "Let me look."
        assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * len("Let me look.")
        assert whole.top_logprobs == 2
    body = {**ASKED, "tools": [FLAT], "top_logprobs": 2}
    machine = await streamed(plain, RESPONSES, body, ResponsesMachine())
    assert machine.items[0]["content"][0]["logprobs"] == [entry.model_dump() for entry in part.logprobs]
    monkeypatch.setattr("coordinator.api.sampling.MOST_LOGPROB_BYTES", 100_000)
    for stream in (False, True):  # the last events of a stream repeat them all
        _, refused = await plain.post(RESPONSES, {**body, "max_output_tokens": 100, "stream": stream})
        assert (refused["error"]["param"], refused["error"]["code"]) == ("top_logprobs", "invalid_value")


async def test_reasoning_as_its_summary(opens: FakeCluster) -> None:
    await write(opens, "let me see</think>\n\nForty-two.")
    async with (
        client_of(opens) as client,
        client.responses.stream(model="tiny", input="hello", reasoning={"summary": "auto"}) as events,
    ):
        said = [event.delta async for event in events if event.type == "response.reasoning_summary_text.delta"]
        final = await events.get_final_response()
    item: Any = final.output[0]
    assert "".join(said) == item.summary[0].text == "let me see" and not item.content
    # the item comes back as it came
    await opens.post(RESPONSES, {"input": [{"role": "user", "content": "hello"}, item.model_dump()]})


async def test_a_conversation_comes_back_as_input(plain: FakeCluster) -> None:
    await write(plain, "Fine.")
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    items = [{"role": "user", "content": "hello"}, call, result]
    _, body = await plain.post(RESPONSES, {"input": items, "tools": [FLAT]})
    assert body["output"][0]["content"][0]["text"] == "Fine."
    prompt = await prompt_of(plain)
    assert '"arguments": {"city": "Oslo"}' in prompt and "<|tool|>ok" in prompt


async def test_input_tokens_are_counted(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    async with client_of(plain) as client:
        counted = await client.responses.input_tokens.count(model="tiny", input="hello", instructions="Be brief.")
        whole = await client.responses.create(model="tiny", input="hello", instructions="Be brief.")
    assert whole.usage is not None and counted.input_tokens == whole.usage.input_tokens


async def test_responses_that_cannot_be_served(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    async with client_of(plain) as client:
        for param, value in (("previous_response_id", "resp_1"), ("background", True)):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="tiny", input="hello", **{param: value})  # type: ignore[call-overload]
            assert (refused.value.param, refused.value.code) == (param, "unsupported")
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="stores no responses"):
                await call("resp_1")
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            await client.responses.input_items.list("resp_1")
        with pytest.raises(openai.NotFoundError, match="serves 'tiny'"):
            await client.responses.create(model="huge", input="hello")
    response, body = await plain.post(RESPONSES, {"input": "hello " * 5000})
    assert (response.status, body["error"]["param"]) == (400, "input") and "'input'" in body["error"]["message"]
    response, body = await plain.post(RESPONSES, {**ASKED, "max_output_tokens": 100_000})
    assert (response.status, body["error"]["param"]) == (400, "max_output_tokens")


async def test_what_has_no_effect_is_named_in_a_header(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    response, body = await plain.post(RESPONSES, {**ASKED, "store": True, "include": ["reasoning.encrypted_content"]})
    assert response.headers["x-tandem-ignored"] == "include.reasoning.encrypted_content" and body["store"] is False


# -- Messages ---------------------------------------------------------------------------------------------------------


async def test_messages_of_text(plain: FakeCluster) -> None:
    await write(plain, "Hi there")
    response, whole = await plain.post(MESSAGES, SAID, headers={"anthropic-version": "2023-06-01"})
    assert response.status == 200 and response.headers["request-id"] == response.headers["x-request-id"]
    assert whole["content"] == [{"type": "text", "text": "Hi there"}] and whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"]["output_tokens"] == 9
    machine = await streamed(plain, MESSAGES, SAID, MessagesMachine())
    assert {**machine.message, "id": 0} == {**whole, "id": 0}
    _, cut = await plain.post(MESSAGES, {**SAID, "max_tokens": 2})
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hi")
    _, stopped = await plain.post(MESSAGES, {**SAID, "stop_sequences": ["x", "the"]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "the")
    assert stopped["content"][0]["text"] == "Hi "


@pytest.mark.parametrize("template", [PLAIN, OPENS])  # plain text, and text that a parser reads
async def test_a_stop_sequence_that_is_one_control_token_is_named(model: Path, template: str) -> None:
    async with open_cluster(model, chat_template=template) as cluster:
        token = cluster.services.model.text.tokenizer.token_to_id("<|end|>")
        said = letters("</think>Hi" if template == OPENS else "Hi")

        def script(request: Any, choice: int, position: int) -> int:
            written = said(request, choice, position)
            return token if written == EOS else written

        for role in ("prefill", "decode"):
            await cluster.add(role, script=script)
        body = {**SAID, "stop_sequences": ["never", "<|end|>"]}
        _, whole = await cluster.post(MESSAGES, body)
        assert whole["content"] == [{"type": "text", "text": "Hi"}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "<|end|>")
        machine = await streamed(cluster, MESSAGES, body, MessagesMachine())
        assert (machine.message["stop_reason"], machine.message["stop_sequence"]) == ("stop_sequence", "<|end|>")


async def test_more_tokens_than_fit_mean_what_fits(plain: FakeCluster) -> None:
    """Clients must send max_tokens, and most send more than a small model holds."""
    await write(plain, "Hi " * 2000)
    _, counted = await plain.post(COUNT, SAID)
    for stream in (False, True):
        body = {**SAID, "max_tokens": 100_000}
        if stream:
            shown = (await streamed(plain, MESSAGES, body, MessagesMachine())).message
        else:
            _, shown = await plain.post(MESSAGES, body)
        assert shown["stop_reason"] == "model_context_window_exceeded"
        length = plain.services.model.context_length
        assert shown["usage"]["output_tokens"] == length - counted["input_tokens"]
    response, shown = await plain.post(MESSAGES, {**SAID, "system": "x" * 3000})
    assert response.status == 400 and "maximum context length" in shown["error"]["message"]


async def test_messages_with_calls(plain: FakeCluster) -> None:
    await write(plain, f"Let me look. {CALL}\n{OTHER}")
    body = {**SAID, "tools": [TOOL]}
    _, whole = await plain.post(MESSAGES, body)
    assert whole["stop_reason"] == "tool_use" and whole["content"][0] == {"type": "text", "text": "Let me look."}
    assert [block["input"]["city"] for block in whole["content"][1:]] == ["Oslo", 'Bergen, "west"']
    machine = await streamed(plain, MESSAGES, body, MessagesMachine())
    for block in (*whole["content"], *machine.message["content"]):
        block.pop("id", None)
    assert machine.message["content"] == whole["content"]
    once = {"type": "auto", "disable_parallel_tool_use": True}
    one = await streamed(plain, MESSAGES, {**body, "tool_choice": once}, MessagesMachine())
    assert [block["type"] for block in one.message["content"]] == ["text", "tool_use"]


async def test_thinking_is_shown_if_it_is_asked_for(opens: FakeCluster) -> None:
    await write(opens, "let me see</think>\n\nForty-two.")
    said = [{"type": "text", "text": "Forty-two."}]
    _, hidden = await opens.post(MESSAGES, SAID)
    assert hidden["content"] == said and hidden["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    body = {**SAID, "thinking": {"type": "adaptive"}}
    _, shown = await opens.post(MESSAGES, body)
    (thinking, *rest) = shown["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "let me see") and thinking["signature"]
    assert rest == said
    machine = await streamed(opens, MESSAGES, body, MessagesMachine())
    assert machine.message["content"] == shown["content"]
    body = {**SAID, "thinking": {"type": "adaptive", "display": "omitted"}}
    _, omitted = await opens.post(MESSAGES, body)
    assert omitted["content"] == [{**thinking, "thinking": ""}, *said]
    machine = await streamed(opens, MESSAGES, body, MessagesMachine())
    assert machine.message["content"] == omitted["content"]


BUDGET = {"thinking": {"type": "enabled", "budget_tokens": 100}}


async def test_a_budget_reaches_the_workers_in_the_grammar(opens: FakeCluster) -> None:
    await write(opens, "let me see</think>\n\nForty-two.")
    for body in (SAID, {**SAID, **BUDGET}):
        assert (await opens.post(MESSAGES, body))[0].status == 200
    without, bounded = await prefilled(opens, 2)
    assert not without.sampling.grammar and "</think>" in bounded.sampling.grammar


async def test_a_budget_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """The markers of this model's reasoning are regular expressions of its own."""
    directory = fake_checkpoint(tmp_path / "m")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    thinking = {"open_pattern": r"(?:^|<why>\s*)", "close": "</why>"}
    fields = {"thinking": thinking, "tool_calls": {**LINES, "transform": TO_WEATHER}}
    settings["response_template"] = {"start_anchor": "x", "fields": fields}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    async with open_cluster(directory, "prefill", "decode") as cluster:
        response, shown = await cluster.post(MESSAGES, {**SAID, **BUDGET})
        assert response.status == 400 and "'thinking.budget_tokens' is not supported" in shown["error"]["message"]
        assert (await cluster.post(MESSAGES, SAID))[0].status == 200


async def test_a_budget_of_a_model_that_does_not_reason_has_no_effect_and_is_named(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    for fields in ({"thinking": {"type": "enabled", "budget_tokens": 100}}, {"max_reasoning_tokens": 100}):
        response, _ = await plain.post(MESSAGES, {**SAID, **fields, "foo": 1})
        name = "thinking.budget_tokens" if "thinking" in fields else "max_reasoning_tokens"
        assert response.status == 200 and response.headers["x-tandem-ignored"] == f"foo, {name}"


async def test_without_thinking_the_template_is_told_not_to_reason(model: Path) -> None:
    async with open_cluster(model, chat_template=REASONS) as cluster:
        await write(cluster, "Hi")
        counts = []
        for thinking in (None, {"type": "disabled"}, {"type": "adaptive"}):
            _, body = await cluster.post(COUNT, {**SAID, "thinking": thinking})
            counts.append(body["input_tokens"])
        assert counts[0] == counts[1] > counts[2], "the template closes the reasoning"


async def test_counted_tokens_are_those_of_the_message(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    body = {**SAID, "system": "Be brief.", "tools": [TOOL]}
    response, counted = await plain.post(COUNT, {name: value for name, value in body.items() if name != "max_tokens"})
    _, whole = await plain.post(MESSAGES, body)
    assert response.status == 200 and counted == {"input_tokens": whole["usage"]["input_tokens"]}


async def test_the_last_turn_is_continued(plain: FakeCluster) -> None:
    await write(plain, "Hi")
    await plain.post(MESSAGES, {**SAID, "messages": [*SAID["messages"], {"role": "assistant", "content": "Well, "}]})  # type: ignore[misc]
    prompt = await prompt_of(plain)
    assert prompt.endswith("<|assistant|>Well, ")


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_errors_of_messages_have_anthropics_form(plain: FakeCluster) -> None:
    for path, status, kind, body in (
        (MESSAGES, 400, "invalid_request_error", b"{"),
        (MESSAGES, 400, "invalid_request_error", {**SAID, "max_tokens": 0}),
        (MESSAGES, 404, "not_found_error", {**SAID, "model": "huge"}),
        (MESSAGES, 503, "overloaded_error", SAID),
        (COUNT, 400, "invalid_request_error", {}),
        ("/v1/messages/batches", 404, "not_found_error", {}),
    ):
        response, shown = await plain.post(path, body)
        assert response.status == status and shown["type"] == "error" and shown["error"]["type"] == kind, shown
        assert shown["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    response, shown = await plain.get(MESSAGES)
    assert response.status == 405 and shown["type"] == "error"
    response, shown = await plain.get("/v1/messagesx")
    assert response.status == 404 and "type" not in shown, "other paths have OpenAI's form"


async def test_a_body_that_is_too_large(model: Path) -> None:
    async with open_cluster(model, chat_template=PLAIN, max_body_bytes=1 << 20) as cluster:
        response, shown = await cluster.post(MESSAGES, b" " * (1 << 21))
        assert response.status == 413 and shown["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
async def test_every_path_needs_the_key(model: Path, header: str) -> None:
    async with open_cluster(model, chat_template=PLAIN, **KEYS) as cluster:
        await write(cluster, "Hi")
        key = KEYS["api_key"] if header == "x-api-key" else f"Bearer {KEYS['api_key']}"
        for path, body in ((RESPONSES, ASKED), (INPUT, ASKED), (MESSAGES, SAID), (COUNT, SAID)):
            response, shown = await cluster.post(path, body)
            assert response.status == 401 and "error" in shown
            assert path in (RESPONSES, INPUT) or shown["error"]["type"] == "authentication_error"
            response, _ = await cluster.post(path, body, headers={header: key})
            assert response.status == 200
        for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
            assert (await cluster.get(path))[0].status == 401
            assert (await cluster.get(path, headers={header: key}))[0].status == 404


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, ASKED), (MESSAGES, SAID)])
async def test_an_idle_stream_stays_alive_and_may_fail(
    model: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The first event comes before the first token; then pings or line breaks; then the error as an event."""
    for module in (sse, answer):
        monkeypatch.setattr(module, "KEEPALIVE_S", 0.1)
    async with open_cluster(model, chat_template=PLAIN, request_timeout=1.0) as cluster:
        await Gate(cluster).open()  # makes no token
        async with cluster.client.post(f"{cluster.url}{path}", json={**body, "stream": True}) as response:
            stream = await response.read()
        if path == MESSAGES:
            events = named_events(stream)
            assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
            assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "timeout_error"
            machine: Any = MessagesMachine()
        else:
            events = named_events(re.sub(rb"\n{3,}", b"\n\n", stream))
            assert b"\n\n\n\n" in stream
            assert events[-1]["type"] == "response.failed"
            machine = ResponsesMachine()
        for event in events:
            machine.accept(event)
        assert machine.state == "end"
        await until(lambda: not cluster.dispatcher.records, "the request ends")
