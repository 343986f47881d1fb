"""State machines that check the order of the events of a stream and put its answer together again."""

from __future__ import annotations

import json
import re
from typing import Any

Event = dict[str, Any]
_EVENT = re.compile(r"event: ([^\n]+)\ndata: ([^\n]+)\n\n")


def named_events(stream: bytes) -> list[Event]:
    """Return the data of all events of ``stream``, which consists of nothing but events whose name is their type."""
    text = stream.decode()
    assert _EVENT.sub("", text) == "", "only named events"
    events = []
    for match in _EVENT.finditer(text):
        events.append(json.loads(match[2]))
        assert events[-1]["type"] == match[1]
    return events


class ResponsesMachine:
    """Accepts the events of one response. ``response``: that of the last event. ``items``: what the deltas gave.

    States: ``start``, ``created``, ``between`` items, in an ``item``, ``end``."""

    def __init__(self) -> None:
        self.state = "start"
        self.items: list[Event] = []
        self.response: Event = {}
        self._next = 0
        self._open: Event = {}
        self._part = "none"
        self._scores: list[Event] = []

    def accept(self, event: Event) -> None:
        assert event["sequence_number"] == self._next
        self._next += 1
        kind = event["type"]
        match self.state, kind:
            case "start", "response.created":
                self.state = "created"
                assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
            case "created", "response.in_progress":
                self.state = "between"
                assert event["response"]["status"] == "in_progress" and event["response"]["output"] == []
            case "between", "response.output_item.added":
                self._added(event)
            case "between", "response.completed" | "response.incomplete":
                self._ended(event)
            case "between" | "item", "response.failed":
                self.response, self.state = event["response"], "end"
                assert self.response["status"] == "failed" and self.response["error"]["message"]
            case "item", _:
                self._in_item(kind, event)
            case _:
                raise AssertionError(f"{kind} in the state {self.state}")

    def _added(self, event: Event) -> None:
        self.state, self._open, self._part = "item", event["item"], "none"
        assert event["output_index"] == len(self.items) and self._open["status"] == "in_progress"
        self._open["said"], self._scores = "", []

    def _in_item(self, kind: str, event: Event) -> None:
        item, name = self._open, kind.removeprefix("response.")
        assert event["output_index"] == len(self.items)
        if name != "output_item.done":
            assert event["item_id"] == item["id"]
        texts = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        parted = item["type"] != "function_call"
        if item["type"] == "reasoning" and "reasoning_summary" in name:
            assert "content_index" not in event
            name = name.replace("reasoning_summary_text", "reasoning_text").replace("reasoning_summary", "content")
            event = {**event, "content_index": event["summary_index"]}
        if parted and name != "output_item.done":
            assert event["content_index"] == 0
        match self._part, name.removeprefix(texts[item["type"]]):
            case "none", "content_part.added" if parted:
                self._part = "open"
                assert event["part"]["text"] == "" and not event["part"].get("logprobs")
                item["summarized"] = event["part"]["type"] == "summary_text"
            case ("open", ".delta") | ("none", ".delta") if (self._part == "open") == parted:
                assert event["delta"]
                item["said"] += event["delta"]
                self._scores += event.get("logprobs", [])
            case ("open", ".done") | ("none", ".done") if (self._part == "open") == parted:
                self._part = "said"
                assert event["text" if parted else "arguments"] == item["said"]
                assert event.get("logprobs", []) == self._scores
            case "said", "content_part.done" if parted:
                self._part = "closed"
                assert event["part"]["text"] == item["said"]
                assert (event["part"]["type"] == "summary_text") == item["summarized"]
            case ("closed", "output_item.done") | ("said", "output_item.done") if (self._part == "closed") == parted:
                self._done(event["item"])
            case _:
                raise AssertionError(f"{kind} in an item of type {item['type']}, part {self._part}")

    def _done(self, item: Event) -> None:
        said = self._open.pop("said")
        parts = "summary" if self._open.pop("summarized", False) else "content"
        assert item["status"] in ("completed", "incomplete")
        assert {**item, "status": "", parts: 0} == {**self._open, "status": "", parts: 0} | (
            {"arguments": said} if item["type"] == "function_call" else {}
        )
        assert item["type"] == "function_call" or [part["text"] for part in item[parts]] == [said]
        self.items.append(item)
        self.state = "between"

    def _ended(self, event: Event) -> None:
        self.response, self.state = event["response"], "end"
        assert event["type"] == f"response.{self.response['status']}"
        assert self.response["output"] == self.items, "the last event repeats the items"


class MessagesMachine:
    """Accepts the events of one message. ``message``: what the events give.

    States: ``start``, ``between`` blocks, in a ``block``, ``signed``, ``stopping``, ``end``."""

    _DELTAS = {"text": "text_delta", "tool_use": "input_json_delta", "thinking": "thinking_delta"}
    _MEMBERS = {"text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking"}

    def __init__(self) -> None:
        self.state = "start"
        self.message: Event = {}
        self._said = ""

    def accept(self, event: Event) -> None:
        match self.state, event["type"]:
            case _, "ping":
                assert event == {"type": "ping"}
            case "start", "message_start":
                self.message, self.state = event["message"], "between"
                assert self.message["content"] == [] and self.message["stop_reason"] is None
            case "between", "content_block_start":
                assert event["index"] == len(self.message["content"])
                self.message["content"].append(event["content_block"])
                self._said, self.state = "", "block"
            case "block", "content_block_delta":
                assert event["index"] == len(self.message["content"]) - 1
                self._delta(event["delta"])
            case "block" | "signed", "content_block_stop":
                self._stop()
            case "between", "message_delta":
                self.message.update(event["delta"], usage=event["usage"])
                self.state = "stopping"
            case "stopping", "message_stop":
                self.state = "end"
            case "start" | "between" | "block", "error":
                self.state = "end"
            case _:
                raise AssertionError(f"{event['type']} in the state {self.state}")

    def _delta(self, delta: Event) -> None:
        block = self.message["content"][-1]
        if delta["type"] == "signature_delta":
            assert block["type"] == "thinking" and delta["signature"]
            block["signature"], self.state = delta["signature"], "signed"
            return
        assert delta["type"] == self._DELTAS[block["type"]] and delta[self._MEMBERS[delta["type"]]]
        self._said += delta[self._MEMBERS[delta["type"]]]

    def _stop(self) -> None:
        block = self.message["content"][-1]
        assert (block["type"] == "thinking") == (self.state == "signed"), "a thinking block ends with its signature"
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(self._said or "{}")
        else:
            assert block[block["type"]] == ""
            block[block["type"]] = self._said
        self.state = "between"
