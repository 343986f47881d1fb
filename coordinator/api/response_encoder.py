"""Encodes tokens as OpenAI responses.

Owns :class:`Choice` (the text of one stream of tokens) and the two response shapes, chat and text completion, each as a
whole body and as stream chunks. Chunks are assembled from prepared bytes, because this code runs for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.core.errors import RequestError
from common.core.ids import unpack_tokens
from common.core.request import FinishReason
from common.net.messages import Logprobs
from coordinator.api.delta_encoder import delta_json, delta_members, encode
from coordinator.api.event_stream import ChunkStream
from coordinator.api.prompt_report import FLOOR, PromptReport, by_name, closed
from coordinator.output.deltas import Delta
from coordinator.requests.spec import Json, Options
from coordinator.text.tokenizer import StopStrings, StopWindow, TextModel


@dataclass(slots=True)
class Piece:
    """One token of a response. ``text`` is what it adds to the visible text and may be empty. ``delta``: all that it
    adds, of a choice whose output is parsed (:mod:`coordinator.api.parsed_choice`)."""

    text: str
    token: int
    logprobs: Logprobs | None
    delta: Delta | None = None


class Choice:
    """The state of one choice: incremental detokenization, stop strings, and the text and token ids so far."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_window", "delta", "finish_reason", "ids", "index",
                 "logprobs", "prompt", "reasoning_tokens", "report", "rest", "sent_chars", "text")  # fmt: skip

    def __init__(
        self, index: int, prompt: list[int], options: Options, text: TextModel, stops: StopStrings | None
    ) -> None:
        self.index, self.prompt = index, prompt
        self._detokenizer = text.detokenizer(skip_special_tokens=options.skip_special_tokens)
        self._window = StopWindow(stops) if stops else None
        self._include_stop, self._min_tokens = options.include_stop, options.sampling.min_tokens
        self.ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: dict[str, bytearray] = {}
        """Log-probability arrays of a whole answer by name. Each is an opening bracket and the encoded elements, each
        followed by a comma."""
        self.sent_chars = 0
        self.finish_reason: str | None = None
        self.delta: Delta | None = None
        """What the last token adds, of a parsed output."""
        self.rest = Delta()
        """Text that was held back when the output ended without another token."""
        self.reasoning_tokens: int | None = None
        """Tokens of reasoning so far, None if the output has no reasoning that can be told from its content."""
        self.report: PromptReport | None = None
        """Log-probabilities of the prompt, if the answer shows them."""

    def show_prompt(self, report: PromptReport) -> None:
        """Let the answer show the log-probabilities of the prompt, and its text if that is echoed."""
        self.report, self.sent_chars = report, report.chars

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> Iterator[Piece]:
        """Yield one :class:`Piece` per token, up to the token that ends the choice. ``finish`` belongs to the last
        id."""
        last = len(ids) - 1
        for at, token in enumerate(ids):
            ends = at == last and finish is not FinishReason.RUNNING
            text, stopped = self._advance(token, ends and finish is FinishReason.STOP, ends)
            logprob = logprobs[at] if at < len(logprobs) else None
            self.ids.append(token)
            self.text.append(text)
            if stopped or ends:
                self._end(by_length=not stopped and finish is FinishReason.LENGTH)
            yield Piece(text, token, logprob, self.delta)
            if stopped:
                return
        if not ids and finish is not FinishReason.RUNNING:
            self.rest = self._rest()
            self.text.append(self.rest.content)
            self._end(by_length=finish is FinishReason.LENGTH)

    def message(self) -> Json:
        """Return OpenAI's message of a whole answer."""
        return {"role": "assistant", "content": "".join(self.text), "refusal": None}

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return self._window.found if self._window is not None else None

    @property
    def stopped(self) -> bool:
        """Whether the choice has ended, for any reason."""
        return self.finish_reason is not None

    def keep_logprobs(self, shown: Json) -> None:
        """Append the elements of each array of ``shown``, encoded as JSON.

        A whole answer may have tens of megabytes of them. Encoding them per token does not block the event loop, as
        encoding them at the end would, and takes a fraction of the memory."""
        for name, elements in shown.items():
            self.logprobs.setdefault(name, bytearray(b"[")).extend(encode(elements)[1:-1] + b",")

    def take_logprobs(self, name: str) -> msgspec.Raw:
        """Remove and return a kept array as JSON; of a text completion that echoes its prompt, with the prompt's
        elements before it."""
        array = self.logprobs.pop(name, bytearray(b"["))
        return closed(array, b"") if self.report is None else self.report.echo(name, array[1:])

    def _advance(self, token: int, stop_token: bool, ends: bool) -> tuple[str, bool]:
        """Return the text that may be sent after ``token``, and whether a stop string is complete."""
        text = "" if stop_token and not self._include_stop else self._detokenizer.push(token)
        if ends:
            text += self._detokenizer.finish()
        return (text, False) if self._window is None else self._windowed(text, ends)

    def _windowed(self, text: str, ends: bool) -> tuple[str, bool]:
        """Return what may be sent of ``text``, which the present token adds, and whether a stop string is complete."""
        window = self._window
        assert window is not None
        if len(self.ids) + 1 <= self._min_tokens:
            return window.let_pass(text), False
        shown, stopped = window.push(text)
        if ends and not stopped:
            shown += window.finish()
        return shown, stopped

    def _end(self, *, by_length: bool) -> None:
        self.finish_reason = "length" if by_length else "stop"

    def _rest(self) -> Delta:
        rest = self._detokenizer.finish()
        return Delta(rest if self._window is None else self._window.let_pass(rest))


# -- log-probabilities ------------------------------------------------------------------------------------------------


def _shown(text: TextModel, token: int) -> tuple[str, bytes]:
    return text.token_text(token), text.token_bytes(token)


def chat_logprob(text: TextModel, token: int, logprobs: Logprobs) -> Json:
    """Return one of OpenAI's ChatCompletionTokenLogprob objects."""
    top = [
        _entry(text, other, value) for other, value in zip(unpack_tokens(logprobs.top_ids), logprobs.top, strict=False)
    ]
    return {**_entry(text, token, logprobs.logprob), "top_logprobs": top}


def _entry(text: TextModel, token: int, logprob: float) -> Json:
    shown, spelled = _shown(text, token)
    return {"token": shown, "logprob": max(logprob, FLOOR), "bytes": list(spelled)}


def completion_logprobs(text: TextModel, pieces: Sequence[Piece], offset: int) -> Json:
    """Return OpenAI's ``logprobs`` object of text completions. ``offset``: number of characters before ``pieces``."""
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
        if piece.logprobs is None:
            continue
        name = _shown(text, piece.token)[0]
        value = max(piece.logprobs.logprob, FLOOR)
        tokens.append(name)
        values.append(value)
        pairs = zip(unpack_tokens(piece.logprobs.top_ids), piece.logprobs.top, strict=False)
        tops.append(by_name(text, [*pairs, (piece.token, value)]))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


# -- usage ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. ``reasoning``: those of ``completion`` that are reasoning, None if the model
    has no reasoning that can be told from its content."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int | None = None

    def json(self) -> Json:
        """Return OpenAI's ``usage`` object."""
        usage: Json = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


# -- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """The members with which every body and chunk of one response begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def json(self, kind: str) -> Json:
        """Return the members as a new JSON object, with ``kind`` as its ``object``."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Shape(Protocol):
    """The encoder of one kind of response. Chunks are complete server-sent events. ``extra``: members to add."""

    needs_pieces: bool
    """Whether :meth:`keep` must be called for each token of a non-streaming response, not only for those with
    log-probabilities."""
    keepalive: bytes
    """What is sent on an idle stream."""

    def keep(self, choice: Choice, piece: Piece) -> None:
        """Encode and keep what :meth:`whole` needs of one token."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """Return the body of a non-streaming response. Consumes the kept log-probabilities."""

    def begin(self, usage: Usage) -> bytes:
        """Return the events before the first chunk."""

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        """Return the chunk of one token, with ``usage`` if the client requested continuous usage."""

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        """Return the chunk with the finish reason of a choice."""

    def usage(self, usage: Usage, extra: Json) -> bytes:
        """Return the events after the ends of all choices, if the client requested usage."""

    def done(self) -> bytes:
        """Return what ends a complete stream."""

    def failed(self, error: RequestError) -> bytes:
        """Return the events that end a stream with ``error``."""


@dataclass(slots=True)
class _Chunks:
    """The constant parts of the chunks of one response. ``usage_null``: whether chunks without usage have it as
    null."""

    kind: str
    head: Head
    usage_null: bool
    start: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.start = b"data: " + encode(self.head.json(self.kind))[:-1] + b',"choices":['

    def close(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b'],"usage":' + encode(usage.json()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self.usage_null else b"]}\n\n"

    def last(self, choices: list[Json], usage: Json | None, extra: Json) -> bytes:
        body: Json = {**self.head.json(self.kind), "choices": choices}
        if usage is not None or self.usage_null:
            body["usage"] = usage
        return b"data: " + encode({**body, **extra}) + b"\n\n"


def _with_member(tail: bytes, member: bytes) -> bytes:
    """Return the end of a chunk, from the bracket that closes its choices on, with ``member`` after the choices."""
    return b"]," + member + (tail[1:] if tail[1:2] == b"," else b"}\n\n")


class ChatShape(ChunkStream):
    """The shape of POST /v1/chat/completions."""

    def __init__(self, head: Head, options: Options, text: TextModel) -> None:
        self._head, self._options, self._text = head, options, text
        self._chunks = _Chunks("chat.completion.chunk", head, options.include_usage)

    def keep(self, choice: Choice, piece: Piece) -> None:
        if piece.logprobs is not None:
            choice.keep_logprobs({"content": [chat_logprob(self._text, piece.token, piece.logprobs)]})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        body = self._head.json("chat.completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage.json()
        if self._options.return_token_ids:
            body["prompt_token_ids"] = choices[0].prompt
        if (report := choices[0].report) is not None:
            body["prompt_logprobs"] = report.field()
        return body

    def _choice(self, choice: Choice) -> Json:
        logprobs: Json | None = None
        if self._options.sampling.logprobs is not None:
            logprobs = {"content": choice.take_logprobs("content"), "refusal": None}
        shown: Json = {
            "index": choice.index,
            "message": choice.message(),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        return {**shown, "token_ids": choice.ids} if self._options.return_token_ids else shown

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        first = len(choice.ids) == 1
        opening = b'{"index":%d,"delta":{"role":"assistant",' if first else b'{"index":%d,"delta":{'
        parts = [
            self._chunks.start,
            opening % choice.index,
            b'"content":%b' % encode(piece.text) if piece.delta is None else delta_members(piece.delta, first),
            b'},"logprobs":null,"finish_reason":null'
            if piece.logprobs is None
            else self._logprobs(piece, piece.logprobs),
        ]
        tail = self._chunks.close(usage)
        if self._options.return_token_ids:
            parts.append(b',"token_ids":[%d]' % piece.token)
            if first and choice.index == 0:
                tail = _with_member(tail, b'"prompt_token_ids":' + encode(choice.prompt))
        if first and choice.index == 0 and choice.report is not None:
            tail = _with_member(tail, b'"prompt_logprobs":' + bytes(choice.report.field()))
        parts += (b"}", tail)
        return b"".join(parts)

    def _logprobs(self, piece: Piece, logprobs: Logprobs) -> bytes:
        """Return the members of a chunk behind its delta."""
        content = [chat_logprob(self._text, piece.token, logprobs)]
        return b'},"logprobs":%b,"finish_reason":null' % encode({"content": content, "refusal": None})

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        delta, reason = delta_json(choice.rest), choice.finish_reason
        shown: Json = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunks.last([shown], usage.json() if usage else None, extra)

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._chunks.last([], usage.json(), extra)


class CompletionShape(ChunkStream):
    """The shape of POST /v1/completions. ``echoes``: the prompt text per choice if ``echo`` is set, else empty."""

    def __init__(self, head: Head, options: Options, text: TextModel, echoes: Sequence[str]) -> None:
        self._head, self._options, self._text, self._echoes = head, options, text, echoes
        self._chunks = _Chunks("text_completion", head, options.include_usage)

    def keep(self, choice: Choice, piece: Piece) -> None:
        if piece.logprobs is not None:
            choice.keep_logprobs(completion_logprobs(self._text, [piece], choice.sent_chars))
        choice.sent_chars += len(piece.text)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        body = self._head.json("text_completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage.json()
        return body

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index] if self._echoes else ""

    def _choice(self, choice: Choice) -> Json:
        logprobs: Json | None = None
        if self._options.sampling.logprobs is not None:
            logprobs = {name: choice.take_logprobs(name) for name in completion_logprobs(self._text, [], 0)}
        shown: Json = {
            "index": choice.index,
            "text": self._echo(choice) + "".join(choice.text),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if self._options.return_token_ids:
            shown |= {"token_ids": choice.ids, "prompt_token_ids": choice.prompt}
        if choice.report is not None and choice.report.shows_field:
            shown["prompt_logprobs"] = choice.report.field()
        return shown

    def chunk(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        return self._chunk(choice, [piece], usage, first=len(choice.ids) == 1)

    def _chunk(self, choice: Choice, pieces: Sequence[Piece], usage: Usage | None, *, first: bool) -> bytes:
        """Return the chunk of at most one token. The ``first`` chunk of a choice shows its prompt, too."""
        text = "".join([piece.text for piece in pieces])
        logprobs = b"null"
        if self._options.sampling.logprobs is not None:
            arrays = completion_logprobs(self._text, pieces, choice.sent_chars)
            if first and choice.report is not None:
                for name, elements in arrays.items():
                    arrays[name] = choice.report.echo(name, encode(elements)[1:-1] + b"," if elements else b"")
            logprobs = encode(arrays)
        choice.sent_chars += len(text)
        parts = [
            self._chunks.start,
            b'{"index":%d,"text":' % choice.index,
            encode(self._echo(choice) + text if first and self._echoes else text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":null',
        ]
        if self._options.return_token_ids:
            parts.append(b',"token_ids":%s' % encode([piece.token for piece in pieces]))
            if first:
                parts.append(b',"prompt_token_ids":' + encode(choice.prompt))
        if first and choice.report is not None and choice.report.shows_field:
            parts.append(b',"prompt_logprobs":' + bytes(choice.report.field()))
        return b"".join((*parts, b"}", self._chunks.close(usage)))

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        text, reason = choice.rest.content, choice.finish_reason
        shown: Json = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": reason}
        prompt = b"" if choice.ids else self._chunk(choice, [], usage, first=True)  # no token's chunk has shown it
        return prompt + self._chunks.last([shown], usage.json() if usage else None, extra)

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._chunks.last([], usage.json(), extra)
