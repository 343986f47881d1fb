"""Encodes what one token adds to a parsed output as members of OpenAI's ``delta`` object."""

from __future__ import annotations

import msgspec

from coordinator.output.deltas import CallDelta, Delta
from coordinator.requests.spec import Json

encode = msgspec.json.Encoder().encode


def delta_members(delta: Delta, first: bool, former: bool = False) -> bytes:
    """Return the encoded members of a chunk's ``delta``, b"" if it adds nothing. The ``first`` one has a content in any
    case. ``former``: as for :func:`delta_json`."""
    return encode(delta_json(delta, first, former))[1:-1]


def delta_json(delta: Delta, first: bool = False, former: bool = False) -> Json:
    """Return a chunk's ``delta``. ``former``: whether its only call is the deprecated ``function_call``."""
    shown: Json = {}
    if delta.content or first:
        shown["content"] = delta.content or None
    if delta.reasoning:
        shown["reasoning_content"] = shown["reasoning"] = delta.reasoning
    if delta.calls and former:
        (call,) = delta.calls
        begun = {} if call.id is None else {"name": call.name}
        shown["function_call"] = {**begun, "arguments": call.arguments}
    elif delta.calls:
        shown["tool_calls"] = list(map(_call_chunk, delta.calls))
    return shown


def _call_chunk(call: CallDelta) -> Json:
    """Return what ``call`` adds as OpenAI's ChatCompletionMessageToolCallChunk."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
