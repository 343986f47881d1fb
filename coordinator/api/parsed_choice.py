"""Choices whose output is read: separated into reasoning, content and tool calls.

Owns the state of one such choice. The plain :class:`~coordinator.api.choice.Choice` serves requests without
tools of models without reasoning, at no cost of a parser. Must not know how an answer is encoded.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.api.choice import Choice
from coordinator.output.deltas import CallDelta, Delta
from coordinator.output.formats import OutputFormat
from coordinator.output.parser import OutputParser
from coordinator.requests.spec import Json, Options, ToolUse
from coordinator.text.tokenizer import StopStrings, TextModel

_ID_LETTERS = string.ascii_letters + string.digits
_ID_CHARS = 24


def new_call_id() -> str:
    """Return a new identifier of a tool call, in OpenAI's form."""
    return "call_" + "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_CHARS))


@dataclass(frozen=True, slots=True)
class OutputReading:
    """How the outputs of one request are read. ``tools``: None if they cannot have calls. ``thinking``: whether they
    continue reasoning that the prompt has opened. ``include_reasoning``: whether the answer has the reasoning.
    ``calls_first``: as of :class:`OutputParser`."""

    format: OutputFormat
    tools: ToolUse | None
    thinking: bool
    include_reasoning: bool
    calls_first: bool = False

    def parser(self, tokens: frozenset[str] = frozenset()) -> OutputParser:
        """Return the parser of one output. ``tokens``: as of :class:`OutputParser`."""
        return OutputParser(
            self.format,
            self.tools.tools if self.tools else (),
            thinking=self.thinking,
            parse_tools=self.tools is not None,
            new_id=new_call_id,
            tokens=tokens,
            calls_first=self.calls_first,
        )


@dataclass(slots=True)
class ToolCall:
    """A tool call of a whole answer. ``arguments``: the parts of a JSON text, in order."""

    id: str
    name: str
    arguments: list[str]

    def json(self) -> Json:
        """Return OpenAI's form."""
        return {"id": self.id, "type": "function", "function": self.function()}

    def function(self) -> Json:
        """Return OpenAI's deprecated form."""
        return {"name": self.name, "arguments": "".join(self.arguments)}


class ParsedChoice(Choice):
    """A choice whose output a parser reads. Stop strings are looked for in the content alone.

    ``text`` has the content, ``reasoning`` the reasoning, ``calls`` the tool calls so far."""

    __slots__ = ("_parser", "_reading", "_skip_special", "_text", "calls", "reasoning")

    def __init__(
        self,
        index: int,
        prompt: list[int],
        options: Options,
        text: TextModel,
        stops: StopStrings | None,
        reading: OutputReading,
        *,
        continues: bool = False,
    ) -> None:
        super().__init__(index, prompt, options, text, stops, continues=continues)
        # special tokens are given to the parser apart
        self._detokenizer = text.detokenizer(skip_special_tokens=True, after=prompt if continues else ())
        self._text, self._reading, self._parser = text, reading, reading.parser(text.distinct_texts)
        self._skip_special = options.skip_special_tokens
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0 if reading.format.reads_reasoning else None

    def message(self) -> Json:
        content = "".join(self.text)
        message: Json = {"role": "assistant", "content": content or (None if self.calls else ""), "refusal": None}
        if self._reading.format.reads_reasoning and self._reading.include_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning) or None
        if self.calls and self.former_calls:
            message["function_call"] = self.calls[0].function()
        elif self.calls:
            message["tool_calls"] = [call.json() for call in self.calls]
        return message

    @property
    def former_calls(self) -> bool:
        return self._reading.tools is not None and self._reading.tools.former

    def _end(self, *, by_length: bool) -> None:
        super()._end(by_length=by_length)
        named = self._reading.tools is not None and self._reading.tools.choice == "named"
        if self.calls and not by_length and not named:  # OpenAI ends the call of a named tool with "stop"
            self.finish_reason = "function_call" if self.former_calls else "tool_calls"

    def _advance(self, token: int, stop_token: bool, ends: bool) -> tuple[str, bool]:
        deltas = [self._read(token, stop_token)]
        if ends:
            deltas += [self._parser.push(self._detokenizer.finish()), self._parser.finish()]
        return self._keep(_merged(deltas), ends)

    def _read(self, token: int, stop_token: bool) -> Delta:
        """Give ``token`` to the parser. One that ends the output is only shown to it if it is a control token, which
        may be a marker."""
        before, ends = self._parser.reasoning, stop_token and not self._include_stop
        if self._text.is_special(token):
            shown = stop_token and self._window is not None and self._window.shown(token)
            text, hidden = self._detokenizer.push(token), ends or (self._skip_special and not shown)
            spelled = self._text.token_text(token)
            delta = _merged([self._parser.push(text), self._parser.push(spelled, hidden, whole=True)])
        elif ends:
            return Delta()
        else:
            text, marker = self._detokenizer.push(token), self._text.distinct_tokens.get(token, "")
            if marker and text.endswith(marker):
                text = text.removesuffix(marker)
                delta = _merged([self._parser.push(text), self._parser.push(marker, whole=True)])
            else:
                delta = self._parser.push(text)
        if self.reasoning_tokens is not None and (before or delta.reasoning or self._parser.reasoning):
            self.reasoning_tokens += 1
        return delta

    def _keep(self, delta: Delta, ends: bool) -> tuple[str, bool]:
        """Add ``delta`` to the answer. Returns the content that may be sent, and whether the choice ends early."""
        stopped, content = False, delta.content
        if self._reading.tools is not None and not self._reading.tools.parallel:
            first = [call for call in delta.calls if call.index == 0]
            stopped = len(first) < len(delta.calls)  # a second call begins: the answer is complete
            delta.calls = first
        if self._window is not None:
            content, found = self._windowed(content, ends)
            stopped = stopped or found
        if not self._reading.include_reasoning:
            delta.reasoning = ""
        delta.content = content
        self.delta = delta
        self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(ToolCall(call.id or "", call.name or "", []))
            self.calls[call.index].arguments.append(call.arguments)
        return content, stopped

    def _rest(self) -> Delta:
        deltas = [self._parser.push(self._detokenizer.finish()), self._parser.finish()]
        self._keep(_merged(deltas), True)
        return self.delta or Delta()


def _merged(deltas: Iterable[Delta]) -> Delta:
    """Return one delta that adds what ``deltas`` add one after the other."""
    merged = Delta()
    for delta in deltas:
        merged.content += delta.content
        merged.reasoning += delta.reasoning
        for call in delta.calls:
            if merged.calls and merged.calls[-1].index == call.index:
                merged.calls[-1].arguments += call.arguments
            else:
                merged.calls.append(CallDelta(call.index, call.id, call.name, call.arguments))
    return merged
