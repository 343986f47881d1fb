"""Encodes an answer in the form of Anthropic's Messages API, as a whole body or as its named events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.core.errors import RequestError
from coordinator.api.blocks import Block, BlockKind, BlockReader, Step
from coordinator.api.choice import Choice, Piece
from coordinator.api.delta_encoder import encode
from coordinator.api.event_stream import named_event
from coordinator.api.responses_encoder import added
from coordinator.api.shape import Head, Usage
from coordinator.requests.spec import Json

SIGNATURE = "unsigned"
"""Signature of thinking blocks, which clients require. Blocks that come back are taken as they are."""
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
_ADDED: dict[BlockKind, bytes] = {
    "call": b',"delta":{"type":"input_json_delta","partial_json":',
    "reasoning": b',"delta":{"type":"thinking_delta","thinking":',
    "text": b',"delta":{"type":"text_delta","text":',
}
"""The part of a delta event between the index of its block and its text."""
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: RequestError, request_id: str | None = None) -> Json:
    """Return ``error`` as Anthropic's error object, which has no member for the field: the message names it."""
    message = error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shown: Json = {"type": kind, "message": message}
    if error.param == "thread":  # Anthropic's tool runner then sends the whole conversation, without the field
        shown["details"] = {"error_code": "thread_unsupported_request"}
    body: Json = {"type": "error", "error": shown}
    return body if request_id is None else {**body, "request_id": request_id}


class MessagesShape:
    """The shape of POST /v1/messages. ``max_tokens``: what the client asked for. ``omits_thinking``: whether thinking
    blocks have no text."""

    needs_pieces = True
    keepalive = named_event("ping", {})

    def __init__(self, head: Head, max_tokens: int, *, omits_thinking: bool = False) -> None:
        self.head, self._max_tokens, self._omits_thinking = head, max_tokens, omits_thinking
        self._reader = BlockReader()
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    # -- whole ----------------------------------------------------------------------------------------------------

    def keep(self, choice: Choice, piece: Piece) -> None:
        self._reader.push(added(piece))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        self._finish(choices[0])
        return self._message(usage)

    # -- stream ---------------------------------------------------------------------------------------------------

    def begin(self, usage: Usage) -> bytes:
        return named_event("message_start", {"message": self._message(usage)})

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        return self._events(self._reader.push(added(piece)))

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        return self._events(self._finish(choice))

    def usage(self, usage: Usage, extra: Json) -> bytes:
        delta = named_event("message_delta", {"delta": self._stop, "usage": _usage(usage), **extra})
        return delta + named_event("message_stop", {})

    def done(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        return named_event("error", anthropic_error(error))

    def _events(self, steps: Sequence[Step]) -> bytes:
        if self._omits_thinking:
            steps = [step for step in steps if step.what != "add" or step.block.kind != "reasoning"]
        return b"".join(map(_event, steps))

    # -- objects --------------------------------------------------------------------------------------------------

    def _finish(self, choice: Choice) -> list[Step]:
        """End the answer and return the steps that this takes."""
        cut = choice.finish_reason == "length"
        steps = [*self._reader.push(choice.rest), *self._reader.finish(cut=cut)]
        if cut:
            reason = "max_tokens" if len(choice.ids) >= self._max_tokens else "model_context_window_exceeded"
        elif choice.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if any(block.kind == "call" for block in self._reader.blocks) else "end_turn"
        self._stop = {"stop_reason": reason, "stop_sequence": choice.stop_string}
        return steps

    def _message(self, usage: Usage) -> Json:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": list(map(self._content, self._reader.blocks)),
            **self._stop,
            "usage": _usage(usage),
            "system_fingerprint": self.head.system_fingerprint,
        }

    def _content(self, block: Block) -> Json:
        return _block(block, "" if self._omits_thinking and block.kind == "reasoning" else block.text, SIGNATURE)


def _event(step: Step) -> bytes:
    block = step.block
    at: Json = {"index": block.index}
    match step.what:
        case "open":
            return named_event("content_block_start", {**at, "content_block": _block(block, "")})
        case "add":
            return _delta(block, step.text)
        case "close":
            stop = named_event("content_block_stop", at)
            if block.kind != "reasoning":
                return stop
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return named_event("content_block_delta", {**at, "delta": signed}) + stop


def _delta(block: Block, text: str) -> bytes:
    """Return the event that adds ``text``, assembled from prepared bytes because it comes for every token."""
    return b"%b%d%b%b}}\n\n" % (_DELTA, block.index, _ADDED[block.kind], encode(text))


def _block(block: Block, text: str, signature: str = "") -> Json:
    """Return ``block`` as a content block with ``text``, "" if it was just opened. ``signature``: of thinking."""
    match block.kind:
        case "call":
            call: Json = {"id": block.call_id, "name": block.name}
            return {"type": "tool_use", **call, "input": msgspec.Raw(text.encode()) if text else {}}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": signature}
        case "text":
            return {"type": "text", "text": text}


def _usage(usage: Usage) -> Json:
    """Return Anthropic's usage, whose ``input_tokens`` are those of the prompt that were not in the prefix cache."""
    counts: Json = {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
    if usage.reasoning is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return counts
