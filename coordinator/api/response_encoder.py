"""Encodes choices as OpenAI's chat and text completions.

Owns both shapes, each as a whole body and as stream chunks. Chunks are assembled from prepared bytes, because this code
runs for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.net.messages import Logprobs
from coordinator.api.choice import Choice, Piece
from coordinator.api.delta_encoder import delta_json, delta_members, encode
from coordinator.api.event_stream import ChunkStream
from coordinator.api.logprobs import chat_logprob, completion_logprobs
from coordinator.api.prompt_report import TokenNames
from coordinator.api.shape import Head, Usage
from coordinator.requests.spec import Json, Options


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

    def __init__(self, head: Head, options: Options, names: TokenNames) -> None:
        self.head, self._options, self._names = head, options, names
        self._chunks = _Chunks("chat.completion.chunk", head, options.include_usage)

    def keep(self, choice: Choice, piece: Piece) -> None:
        if piece.logprobs is not None:
            choice.keep_logprobs({"content": [chat_logprob(self._names, piece.token, piece.logprobs)]})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        body = self.head.json("chat.completion")
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
            b'"content":%b' % encode(piece.text)
            if piece.delta is None
            else delta_members(piece.delta, first, choice.former_calls),
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
        content = [chat_logprob(self._names, piece.token, logprobs)]
        return b'},"logprobs":%b,"finish_reason":null' % encode({"content": content, "refusal": None})

    def end(self, choice: Choice, usage: Usage | None, extra: Json) -> bytes:
        delta, reason = delta_json(choice.rest, former=choice.former_calls), choice.finish_reason
        shown: Json = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunks.last([shown], usage.json() if usage else None, extra)

    def usage(self, usage: Usage, extra: Json) -> bytes:
        return self._chunks.last([], usage.json(), extra)


class CompletionShape(ChunkStream):
    """The shape of POST /v1/completions. ``echoes``: the prompt text per choice if ``echo`` is set, else empty."""

    def __init__(self, head: Head, options: Options, names: TokenNames, echoes: Sequence[str]) -> None:
        self.head, self._options, self._names, self._echoes = head, options, names, echoes
        self._chunks = _Chunks("text_completion", head, options.include_usage)

    def keep(self, choice: Choice, piece: Piece) -> None:
        if piece.logprobs is not None:
            choice.keep_logprobs(completion_logprobs(self._names, [piece], choice.sent_chars))
        choice.sent_chars += len(piece.text)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        body = self.head.json("text_completion")
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage.json()
        return body

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index] if self._echoes else ""

    def _choice(self, choice: Choice) -> Json:
        logprobs: Json | None = None
        if self._options.sampling.logprobs is not None:
            logprobs = {name: choice.take_logprobs(name) for name in completion_logprobs(self._names, [], 0)}
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
            arrays = completion_logprobs(self._names, pieces, choice.sent_chars)
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
