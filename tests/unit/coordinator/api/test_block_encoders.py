"""The blocks of an answer, and their encoding by the Responses API and the Messages API: order of events, and that a
stream gives what a whole answer has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.core.errors import RequestError
from common.core.ids import pack_tokens
from common.net.messages import Logprobs
from coordinator.api.anthropic_encoder import MessagesShape, anthropic_error
from coordinator.api.blocks import BlockReader
from coordinator.api.choice import Choice, Piece
from coordinator.api.delta_encoder import encode
from coordinator.api.prompt_report import TokenNames
from coordinator.api.responses import parse_responses
from coordinator.api.responses_encoder import ResponsesShape
from coordinator.api.shape import Head, Usage
from coordinator.output.deltas import CallDelta, Delta
from coordinator.text.tokenizer import TextModel
from tests.unit.coordinator.api.event_machines import MessagesMachine, ResponsesMachine, named_events

USAGE = Usage(prompt=10, completion=7, cached=4, reasoning=3)
HEAD = Head("resp_0123456789abcdef", 1_700_000_000, "tiny", "print")
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@dataclass
class Ended:
    """A choice that has ended, as far as the encoders look at it."""

    finish_reason: str = "stop"
    stop_string: str | None = None
    rest: Delta = field(default_factory=Delta)
    ids: Sequence[int] = range(7)


def deltas_of(seed: int) -> list[Delta]:
    """Return an answer of random blocks, cut into random pieces of which some are empty."""
    random_ = random.Random(seed)
    deltas: list[Delta] = []
    calls = 0
    for _ in range(random_.randrange(5)):
        kind = random_.choice(("content", "reasoning", "call"))
        words = ["".join(random_.choices('ab "\n{é', k=random_.randint(1, 3))) for _ in range(random_.randint(1, 4))]
        if kind == "content":
            deltas += [Delta(content=word) for word in words]
        elif kind == "reasoning":
            deltas += [Delta(reasoning=word) for word in words]
        else:
            deltas.append(Delta(calls=[CallDelta(calls, f"call_{calls}", "f", "")]))
            text = encode({"a": "".join(words)}).decode()
            at = random_.randrange(len(text))
            deltas += [Delta(calls=[CallDelta(calls, None, None, part)]) for part in (text[:at], text[at:])]
            calls += 1
        deltas += [Delta()] * random_.randrange(2)
    return deltas


def streamed(shape: Any, deltas: Sequence[Delta], ended: Ended) -> list[dict[str, Any]]:
    """Return the events of a complete stream."""
    choice = cast(Choice, ended)
    parts = [shape.begin(USAGE)]
    parts += [shape.chunk(choice, Piece(delta.content, 0, None, delta), None) for delta in deltas]
    parts += [shape.end(choice, None, {}), shape.usage(USAGE, {}), shape.done()]
    return named_events(b"".join(parts))


def whole(shape: Any, deltas: Sequence[Delta], ended: Ended) -> dict[str, Any]:
    """Return the body of a whole answer."""
    choice = cast(Choice, ended)
    for delta in deltas:
        shape.keep(choice, Piece(delta.content, 0, None, delta))
    body: dict[str, Any] = msgspec.json.decode(encode(shape.whole([choice], USAGE)))
    return body


def responses_shape(**fields: Any) -> ResponsesShape:
    body = parse_responses({"input": "a", "instructions": "b", **fields})
    return ResponsesShape(HEAD, body.echo, TokenNames(cast(TextModel, Letters())), summary=body.summary)


class Letters:
    """A vocabulary in which each token is the byte of its id."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_text(self, token: int) -> str:
        return chr(token)


ENDS = [Ended(), Ended("length"), Ended("stop", "END"), Ended("stop", None, Delta("rest"))]


@pytest.mark.parametrize("seed", range(60))
def test_the_events_of_a_response_come_in_order_and_give_the_whole_answer(seed: int) -> None:
    ended, deltas = ENDS[seed % len(ENDS)], deltas_of(seed)
    machine = ResponsesMachine()
    asked: dict[str, Any] = {"reasoning": {"summary": "auto"}} if seed % 2 else {}
    for event in streamed(responses_shape(**asked), deltas, ended):
        _EVENTS.validate_python(event)
        machine.accept(event)
    assert machine.state == "end"
    body = whole(responses_shape(**asked), deltas, ended)
    Response.model_validate(body)
    assert {**body, "completed_at": 0} == {**machine.response, "completed_at": 0}
    assert body["status"] == ("incomplete" if ended.finish_reason == "length" else "completed")
    assert body["incomplete_details"] == ({"reason": "max_output_tokens"} if ended.finish_reason == "length" else None)
    cut = [item["status"] == "incomplete" for item in body["output"]]
    assert cut == [False] * (len(cut) - 1) + [ended.finish_reason == "length"], "only the last item is cut"


@pytest.mark.parametrize("seed", range(60))
def test_the_events_of_a_message_come_in_order_and_give_the_whole_answer(seed: int) -> None:
    ended, deltas = ENDS[seed % len(ENDS)], deltas_of(seed)
    machine = MessagesMachine()
    for event in streamed(MessagesShape(HEAD, 7), deltas, ended):
        machine.accept(event)
    assert machine.state == "end"
    assert whole(MessagesShape(HEAD, 7), deltas, ended) == machine.message


@pytest.mark.parametrize("seed", range(10))
def test_omitted_thinking_has_only_a_signature(seed: int) -> None:
    deltas = deltas_of(seed)
    shown, machine = whole(MessagesShape(HEAD, 7), deltas, Ended()), MessagesMachine()
    for event in streamed(MessagesShape(HEAD, 7, omits_thinking=True), deltas, Ended()):
        machine.accept(event)
    for block in shown["content"]:
        if block["type"] == "thinking":
            block["thinking"] = ""
    assert machine.state == "end" and machine.message == shown
    assert whole(MessagesShape(HEAD, 7, omits_thinking=True), deltas, Ended()) == shown


def test_the_members_of_a_response() -> None:
    deltas = [Delta(reasoning="hm"), Delta("so"), Delta(calls=[CallDelta(0, "call_1", "f", "{}")])]
    body = whole(responses_shape(), deltas, Ended("tool_calls"))
    reasoning, message, call = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and reasoning["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_1", "f", "{}")
    assert len({item["id"] for item in body["output"]}) == 3 and call["id"].startswith("fc_")
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 17,
    }
    assert body["store"] is False and body["status"] == "completed" and body["instructions"] == "b"


def test_the_reasoning_takes_the_place_of_its_summary() -> None:
    deltas = [Delta(reasoning="hm"), Delta(reasoning=" so"), Delta("yes")]
    shape = responses_shape(reasoning={"summary": "detailed"})
    (item, _) = whole(shape, deltas, Ended())["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm so"}] and item["content"] == []
    events = streamed(responses_shape(reasoning={"generate_summary": "auto"}), deltas, Ended())
    kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in events]
    assert kinds[3:8] == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
    assert all(event["summary_index"] == 0 and "content_index" not in event for event in events[3:8])


CALLS = [CallDelta(0, "call_1", "f", "{}")]


@pytest.mark.parametrize(
    ("deltas", "spelled"),
    [
        ([("a", Delta("a")), ("b", Delta("b"))], "ab"),
        ([("<", Delta()), ("b", Delta("<b")), ("\n", Delta())], "<b"),  # withheld, then shown; the end is no text
        ([("h", Delta(reasoning="h")), ("/", Delta()), ("\n", Delta()), ("a", Delta("a"))], "a"),
        ([("a", Delta("a")), ("<", Delta()), (">", Delta(calls=CALLS)), ("b", Delta("b"))], "ab"),
        ([("a", Delta()), ("<", Delta("a")), (">", Delta(calls=CALLS))], "a"),
        ([("\xc3", Delta()), ("\xa9", Delta("é")), ("a", Delta("a"))], "\xc3\xa9a"),
        ([("a", Delta("a")), ("E", Delta()), ("N", Delta())], "aEN"),  # text that the end sets free
    ],
)
def test_logprobs_are_those_of_the_tokens_of_the_text(deltas: list[tuple[str, Delta]], spelled: str) -> None:
    known = [Logprobs(-float(ord(char)), pack_tokens([ord(char)]), (-1.0,)) for char, _ in deltas]
    pieces = [Piece(delta.content, ord(char), each, delta) for (char, delta), each in zip(deltas, known, strict=True)]
    ended = cast(Choice, Ended("stop", None, Delta("EN" if spelled.endswith("EN") else "")))
    shape = responses_shape(include=["message.output_text.logprobs"])
    for piece in pieces:
        shape.keep(ended, piece)
    body = msgspec.json.decode(encode(shape.whole([ended], USAGE)))
    Response.model_validate(body)
    entries = [each for item in body["output"] if item["type"] == "message" for each in item["content"][0]["logprobs"]]
    assert [entry["token"] for entry in entries] == list(spelled)
    assert [entry["logprob"] for entry in entries] == [-float(ord(char)) for char in spelled]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
    stream = responses_shape(top_logprobs=1)
    parts = [stream.begin(USAGE), *(stream.chunk(ended, piece, None) for piece in pieces), stream.end(ended, None, {})]
    machine, seen = ResponsesMachine(), []
    for event in named_events(b"".join([*parts, stream.usage(USAGE, {})])):
        _EVENTS.validate_python(event)
        machine.accept(event)
        if event["type"] == "response.output_text.delta":
            seen += event["logprobs"]
    assert seen == entries and machine.response["top_logprobs"] == 1
    assert [item["content"] for item in machine.items if item["type"] == "message"] == [
        item["content"] for item in body["output"] if item["type"] == "message"
    ]


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        (Ended(), "end_turn", None),
        (Ended("length"), "max_tokens", None),
        (Ended("length", ids=range(6)), "model_context_window_exceeded", None),
        (Ended("stop", "END"), "stop_sequence", "END"),
    ],
)
def test_why_a_message_ended(ended: Ended, reason: str, sequence: str | None) -> None:
    body = whole(MessagesShape(HEAD, 7), [Delta("a")], ended)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    assert body["usage"]["input_tokens"] == 6 and body["usage"]["cache_read_input_tokens"] == 4
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
def test_a_message_with_a_call_ended_for_it(finish: str) -> None:
    body = whole(MessagesShape(HEAD, 7), [Delta(calls=[CallDelta(0, "call_1", "f", '{"a":1}')])], Ended(finish))
    assert body["stop_reason"] == "tool_use"
    assert body["content"] == [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}]


def test_a_token_may_end_one_block_and_begin_others() -> None:
    reader = BlockReader()
    reader.push(Delta(calls=[CallDelta(0, "a", "f", "{")]))
    steps = reader.push(Delta("text", "", [CallDelta(0, None, None, "}"), CallDelta(1, "b", "g", "{}")]))
    assert [(step.what, step.block.index, step.text) for step in steps] == [
        ("add", 0, "}"),
        ("close", 0, ""),
        ("open", 1, ""),
        ("add", 1, "text"),
        ("close", 1, ""),
        ("open", 2, ""),
        ("add", 2, "{}"),
    ]
    assert [block.text for block in reader.blocks] == ["{}", "text", "{}"]


@pytest.mark.parametrize("deltas", [[], [Delta("a")]])
def test_a_stream_that_fails(deltas: list[Delta]) -> None:
    error = RequestError("The workers are gone.", status=500, type="server_error", code="worker_lost")
    shape, messages = responses_shape(), MessagesShape(HEAD, 7)
    choice = cast(Choice, Ended())
    machine, other = ResponsesMachine(), MessagesMachine()
    pieces = [Piece(delta.content, 0, None, delta) for delta in deltas]
    stream = shape.begin(USAGE) + b"".join(shape.chunk(choice, piece, None) for piece in pieces) + shape.failed(error)
    for event in named_events(stream):
        _EVENTS.validate_python(event)
        machine.accept(event)
    assert machine.response["error"] == {"code": "server_error", "message": "The workers are gone."}
    assert [item["content"][0]["text"] for item in machine.response["output"]] == [delta.content for delta in deltas]
    assert all(item["status"] == "incomplete" for item in machine.response["output"])
    stream = messages.begin(USAGE) + b"".join(messages.chunk(choice, piece, None) for piece in pieces)
    for event in named_events(stream + messages.failed(error)):
        other.accept(event)
    assert (machine.state, other.state) == ("end", "end")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_types_of_errors_of_messages(status: int, kind: str) -> None:
    assert anthropic_error(RequestError("No.", status=status), "req-1") == {
        "type": "error",
        "error": {"type": kind, "message": "No."},
        "request_id": "req-1",
    }


def test_an_error_of_messages_names_its_field() -> None:
    shown = anthropic_error(RequestError("No.", param="a[0].b"))["error"]
    assert shown == {"type": "invalid_request_error", "message": "a[0].b: No."}
    shown = anthropic_error(RequestError("No 'thread'.", param="thread"))["error"]
    assert shown["details"] == {"error_code": "thread_unsupported_request"}  # the client continues without threads
    shown = anthropic_error(RequestError("'a' is bad.", param="a"))["error"]
    assert shown == {"type": "invalid_request_error", "message": "'a' is bad."}
