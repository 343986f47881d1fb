"""Encodes an answer in the form of OpenAI's Responses API, as a whole body or as its named events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from common.core.errors import RequestError
from coordinator.api.blocks import Block, BlockReader, Step
from coordinator.api.choice import Choice, Piece
from coordinator.api.delta_encoder import encode
from coordinator.api.event_stream import KEEPALIVE, named_event
from coordinator.api.logprobs import TextLogprobs
from coordinator.api.prompt_report import TokenNames, closed
from coordinator.api.shape import Head, Usage
from coordinator.output.deltas import Delta
from coordinator.requests.spec import Json

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""Beginnings of the ids of output items."""


class ResponsesShape:
    """The shape of POST /v1/responses. ``echo``: encoded members that repeat the request, and the sampling fields as
    they take effect. ``names``: how log-probabilities name tokens. ``summary``: whether reasoning is sent as its
    summary."""

    needs_pieces = True
    keepalive = KEEPALIVE

    def __init__(
        self, head: Head, echo: Mapping[str, msgspec.Raw], names: TokenNames, *, summary: bool = False
    ) -> None:
        self.head, self._echo, self._summary = head, echo, summary
        self._reader = BlockReader()
        self._tokens = TextLogprobs(names)
        self._entries = b""
        """The log-probabilities of the tokens whose text was added last: encoded, each followed by a comma."""
        self._kept: dict[int, bytearray] = {}
        """All log-probabilities so far by the index of their block, each array as in :attr:`Choice.logprobs`."""
        self._sequence = -1
        self._status: Status = "in_progress"
        self._delta = b"", b""
        """The bytes of a delta event of the open block before its number, and between that and its text."""

    # -- whole ----------------------------------------------------------------------------------------------------

    def keep(self, choice: Choice, piece: Piece) -> None:
        self._push(piece)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        self._finish(choices[0])
        return self._response(usage)

    def _push(self, piece: Piece) -> list[Step]:
        """Add a token to the answer and return the steps that this takes."""
        delta = added(piece)
        return self._attach(self._reader.push(delta), self._tokens.push(piece, delta))

    def _attach(self, steps: list[Step], entries: list[Json]) -> list[Step]:
        """Keep the log-probabilities of the text that ``steps`` add. Returns ``steps``."""
        self._entries = encode(entries)[1:-1] + b"," if entries else b""
        if entries:
            (block,) = [step.block for step in steps if step.what == "add" and step.block.kind == "text"]
            self._kept.setdefault(block.index, bytearray(b"[")).extend(self._entries)
        return steps

    # -- stream ---------------------------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> bytes:
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        return self._events(self._push(piece))

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        return self._events(self._finish(choice))

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._event(f"response.{self._status}", response={**self._response(usage), **extra})

    def done(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        self._status = "failed"
        self._reader.abandon()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response(None)
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **members: object) -> bytes:
        self._sequence += 1
        return named_event(kind, {"sequence_number": self._sequence, **members})

    def _events(self, steps: Sequence[Step]) -> bytes:
        return b"".join(map(self._step, steps))

    def _step(self, step: Step) -> bytes:
        block = step.block
        match step.what:
            case "open":
                return self._opened(block)
            case "add":
                self._sequence += 1
                shown = b"[%b]" % self._entries[:-1]
                place = self._delta[1] if block.kind != "text" else b'%b,"logprobs":%b' % (self._delta[1], shown)
                return b'%b%d%b,"delta":%b}\n\n' % (self._delta[0], self._sequence, place, encode(step.text))
            case "close":
                return self._closed(block)

    def _opened(self, block: Block) -> bytes:
        """Return the events that open ``block``, and prepare those of its text, which come for every token."""
        kind = f"{self._text_event(block)}.delta".encode()
        place = encode(self._place(block))[1:-1]
        self._delta = b'event: %b\ndata: {"type":"%b","sequence_number":' % (kind, kind), b",%b" % place
        opened = self._event("response.output_item.added", output_index=block.index, item=self._item(block, True))
        return opened if block.kind == "call" else opened + self._part("added", block, self._content(block, True))

    def _closed(self, block: Block) -> bytes:
        """Return the events that close ``block``."""
        kind = f"{self._text_event(block)}.done"
        if block.kind == "call":
            done = self._at(kind, block, arguments=block.text, name=block.name)
        else:
            logprobs = {"logprobs": self._logprobs(block)} if block.kind == "text" else {}
            done = self._at(kind, block, text=block.text, **logprobs)
            done += self._part("done", block, self._content(block))
        return done + self._event("response.output_item.done", output_index=block.index, item=self._item(block, False))

    def _at(self, kind: str, block: Block, **members: object) -> bytes:
        """Return an event about the text of ``block``."""
        return self._event(kind, **self._place(block), **members)

    def _place(self, block: Block) -> Json:
        """Return the members of events about the text of ``block``, besides the text."""
        place: Json = {"item_id": self._id(block), "output_index": block.index}
        if block.kind != "call":
            place["summary_index" if self._summarized(block) else "content_index"] = 0
        return place

    def _part(self, what: str, block: Block, part: Json) -> bytes:
        """Return the event that says that the only ``part`` of ``block`` was added or is done."""
        kind = "reasoning_summary_part" if self._summarized(block) else "content_part"
        return self._at(f"response.{kind}.{what}", block, part=part)

    def _text_event(self, block: Block) -> str:
        """Return the beginning of the names of events about the text of ``block``."""
        match block.kind:
            case "call":
                return "response.function_call_arguments"
            case "reasoning":
                return "response.reasoning_summary_text" if self._summary else "response.reasoning_text"
            case "text":
                return "response.output_text"

    # -- objects --------------------------------------------------------------------------------------------------

    def _finish(self, choice: Choice) -> list[Step]:
        """End the answer and return the steps that this takes."""
        cut = choice.finish_reason == "length"
        self._status = "incomplete" if cut else "completed"
        rest = self._attach(self._reader.push(choice.rest), self._tokens.take(choice.rest))
        return [*rest, *self._reader.finish(cut=cut)]

    def _response(self, usage: Usage | None) -> Json:
        """Return the response object. ``usage``: None while the answer is not complete."""
        incomplete = self._status == "incomplete"
        output = [] if self._status == "in_progress" else [self._item(block, False) for block in self._reader.blocks]
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "max_tool_calls": None,
            "model": self.head.model,
            "output": output,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self.head.system_fingerprint,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **self._echo,
        }

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.head.id.removeprefix('resp_')}{block.index:04x}"

    def _item(self, block: Block, opened: bool) -> Json:
        """Return ``block`` as an output item, empty if it was just ``opened``."""
        status = "in_progress" if opened else "incomplete" if block.cut else "completed"
        item: Json = {"id": self._id(block), "status": status}
        match block.kind:
            case "call":
                arguments = "" if opened else block.text
                call: Json = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
                return {"type": "function_call", **item, **call}
            case "reasoning":
                parts = [] if opened else [self._content(block)]
                shown = {"summary": parts, "content": []} if self._summary else {"summary": [], "content": parts}
                return {"type": "reasoning", **item, **shown}
            case "text":
                parts = [] if opened else [self._content(block)]
                return {"type": "message", **item, "role": "assistant", "content": parts}

    def _summarized(self, block: Block) -> bool:
        return self._summary and block.kind == "reasoning"

    def _content(self, block: Block, opened: bool = False) -> Json:
        """Return the only part of ``block``, empty if it was just ``opened``."""
        text = "" if opened else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self._summary else "reasoning_text", "text": text}
        logprobs = [] if opened else self._logprobs(block)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, block: Block) -> msgspec.Raw:
        """Return the log-probabilities of the tokens of ``block`` so far."""
        return closed(self._kept.get(block.index, b"["), b"")


def added(piece: Piece) -> Delta:
    """Return what one token adds to an answer."""
    return Delta(piece.text) if piece.delta is None else piece.delta


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }
