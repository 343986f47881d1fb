"""The text model of a checkpoint: tokenization, chat templates, detokenization, stop strings.

Owns the tokenizer (the ``tokenizers`` library alone, because ``AutoTokenizer`` would import torch), the chat template,
incremental detokenization that never splits a character, and the window that holds back possible stop strings. All
calls are synchronous and may run in an executor thread. Long texts and lists use the library's batch calls, because
only those release the interpreter lock. Very long texts are tokenized in slices.
"""

from __future__ import annotations

import codecs
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders, normalizers

from common.core.errors import RequestError, StartError
from coordinator.requests.spec import ChatBody
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.control_tokens import ControlTokens, distinct_tokens
from coordinator.text.output_format import AUTO, choose_format, ends_in_reasoning, marker_tokens
from coordinator.text.slices import SLICE_CHARS, encode_slices
from coordinator.text.templates import ChatTemplates, template_sources
from coordinator.text.token_names import make_special, read_json, read_token_names

log = logging.getLogger("tandem.text")

LONG = 2_000
"""Characters or tokens from which on a call must release the interpreter lock. Below, switching threads costs more."""
_NFC_SHRINKS = 4
"""Maximum characters that Unicode normal form C composes to one."""
_VANISHING = 16
"""Factor for tokenizers that may drop text (white space, unknown words, accents): a prompt may have at most this many
times the characters of its tokens."""
_TRIAL: list[dict[str, object]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
SEEN_TOKENS = 8
"""Tokens before a stream that its decoder sees: whether a token begins with a space depends on the last of them that
has any text."""
MAX_WINDOW_TOKENS = 32
"""Tokens after which an incomplete character is emitted as it is, because it is not the beginning of a valid one."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat. ``text``: the prompt with control tokens under their secret names. ``chars``: its length before
    they were renamed. ``thinking``: whether the output continues reasoning that the prompt has opened."""

    text: str
    chars: int
    thinking: bool = False


class TextModel:
    """Tokenizer, chat templates and output format of one checkpoint directory. Raises StartError if they cannot be
    loaded. ``chat_template``, ``tool_call_parser`` and ``reasoning_parser``: the options of these names."""

    def __init__(
        self,
        directory: Path,
        *,
        vocab_size: int,
        chat_template: str | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # encode in the calling thread, a lane
        self.directory, self.vocab_size = directory, vocab_size
        self.tokenizer = _load_tokenizer(directory)
        self.distinct_tokens = distinct_tokens(self.tokenizer)
        """Texts of the tokens, by id, that only count as markers in an output where they are these tokens."""
        self.distinct_texts = frozenset(self.distinct_tokens.values())
        self._names = read_token_names(directory, self.tokenizer)
        special = self._names.special
        make_special(self.tokenizer, special)
        added = self.tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special or token.content in special)
        self._byte_level = isinstance(self.tokenizer.decoder, decoders.ByteLevel)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.chars_per_token = self._longest_token * _shrinks(self.tokenizer, self._byte_level)
        """Maximum characters of a prompt per token, averaged over the whole prompt."""
        self._bytes: dict[int, bytes] = {}
        self._around = _around(self.tokenizer)
        sources = template_sources(directory, chat_template)
        tokens = {token.content for token in added.values()}
        response = read_json(directory / "tokenizer_config.json").get("response_template")
        self.output = choose_format(sources, tokens, response, tool_call_parser, reasoning_parser)
        """How the model writes tool calls and reasoning, as far as it is known."""
        markers = marker_tokens(self.output, tokens)
        self._control = ControlTokens(self.tokenizer, special | self._names.control | markers)
        self.templates = self._load_templates(sources)

    # -- to tokens ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``. Control tokens spelled out in ``text`` are recognized: not for chats."""
        return list(chain.from_iterable(self.slices(text, add_special_tokens=add_special_tokens)))

    def slices(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the ids of :meth:`encode`, one slice at a time."""
        before, after = self._around if add_special_tokens else ([], [])
        parts = _slices(self.tokenizer, text, self._longest_token)
        yield before + next(parts)
        yield from parts
        yield after

    def bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of ``words`` that an output must not have: each word as it is and with a space
        before it, as in vLLM. The same word may be spelled by other tokens, which are not found."""
        bare = [word.lstrip() for word in words]
        found = [tuple(self.encode(text, add_special_tokens=False)) for word in bare for text in (word, f" {word}")]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def chat_text(self, body: ChatBody, most: int = sys.maxsize) -> ChatText:
        """Render the chat template. Raises RequestError if the model has no template or the template fails, TooMuchText
        if the text would have more than ``most`` characters."""
        if self.templates is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        text = self.templates.of(body).render(
            body.messages,
            tools=body.tools,
            documents=body.documents,
            kwargs=body.template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            most=most,
        )
        return ChatText(self._control.spell(text), len(text), ends_in_reasoning(text, body, self.output))

    def chat_slices(self, chat: ChatText) -> Iterator[list[int]]:
        """Yield the ids of a rendered chat, one slice at a time. Only control tokens that the template wrote are
        recognized."""
        return _slices(self._control.tokenizer, chat.text, max(self._longest_token, self._control.longest_name))

    def encode_chat(self, body: ChatBody) -> list[int]:
        """Return the token ids of the prompt of a chat."""
        return list(chain.from_iterable(self.chat_slices(self.chat_text(body))))

    # -- to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return ``ids`` as text. Incomplete characters become U+FFFD."""
        if self._byte_level:  # the library would decode the letters of added tokens as bytes
            kept = (token for token in ids if not (skip_special_tokens and self.is_special(token)))
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        if len(ids) < LONG:
            return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """Return ``ids`` as text, without an incomplete character at its end: a detokenizer ``after`` them shows it."""
        if self._byte_level:
            kept = (token for token in ids if not self.is_special(token))
            return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(self.token_bytes, kept)))
        end = len(ids)
        while end and self.decode(ids[max(0, len(ids) - SEEN_TOKENS) : end]).endswith("�"):
            end -= 1
        return self.decode(ids[:end])

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = (), echoed: bool = False
    ) -> Detokenizer:
        """Return a new incremental decoder for one stream of tokens. ``after``: the tokens before it, of whose text it
        is the continuation, with the space between them. Empty: the stream is a text of its own. ``echoed``: their text
        is shown too (:meth:`decode_prompt`). Otherwise an incomplete character at their end is only shown if the stream
        completes it."""
        kind = _ByteDetokenizer if self._byte_level else _WindowDetokenizer
        stream = kind(self, skip_special_tokens, after)
        tail = after[-SEEN_TOKENS:]
        if tail and not echoed and (before := self.decode(tail)).endswith("�"):
            return _Continuation(stream, before[len(self.decode_prompt(tail)) :])
        return stream

    def control_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """Return those of ``texts`` that are exactly the spelling of one special token, by its id."""
        ids = [(self.tokenizer.token_to_id(text), text) for text in texts]
        return {token: text for token, text in ids if token is not None and self.is_special(token)}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of ``token``, b"" for an id that the tokenizer does not have."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        """Return the text of ``token`` on its own. Parts of a character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` is a special token, such as the end of a sequence."""
        return token in self._special_ids

    def _spell(self, token: int) -> bytes:
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if self._byte_level:
            if token in self._added_ids or not _BYTE_OF.keys() >= set(spelled):
                return spelled.encode()  # literal, although its letters are in the byte alphabet
            return bytes(_BYTE_OF[char] for char in spelled)
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("▁", " ").encode()

    # -- loading --------------------------------------------------------------------------------------------------

    def _load_templates(self, sources: Mapping[str, str]) -> ChatTemplates | None:
        if not sources:
            return None
        templates = ChatTemplates(sources, dict(self._names.named))
        self._try_out(templates.default)
        return templates

    def _try_out(self, template: ChatTemplate) -> None:
        """Log a warning if ``template`` builds control tokens by operations that lose the origin of characters. They
        are then tokenized as ordinary text."""
        try:
            text = template.render(_TRIAL)
        except RequestError:
            return  # the template accepts other messages only
        if lost := sorted(name for name in self._control.texts if name in self._control.spell(text)):
            log.warning(
                "the chat template assembles %s from parts, so it is tokenized as text: write it as one string",
                ", ".join(lost),
            )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from printable characters to the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _load_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise StartError(
            f"{directory} has no tokenizer.json",
            "text is tokenized with the tokenizers library, which needs that file",
            "convert the model's tokenizer: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise StartError(f"cannot read {file}", str(error), "download the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _slices(tokenizer: Tokenizer, text: str, longest_token: int) -> Iterator[list[int]]:
    if len(text) < LONG:
        yield tokenizer.encode(text, add_special_tokens=False).ids
    elif len(text) <= SLICE_CHARS:
        yield tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    else:
        yield from encode_slices(tokenizer, text, longest_token)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    at = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def _shrinks(tokenizer: Tokenizer, byte_level: bool) -> int:
    """Return the maximum ratio of the characters of a text to those of its tokens."""
    added, normalizer = tokenizer.get_added_tokens_decoder().values(), tokenizer.normalizer
    keeps_text = normalizer is None or isinstance(normalizer, normalizers.NFC)
    whole = byte_level and _BYTE_OF.keys() <= tokenizer.get_vocab().keys()
    if not keeps_text or not whole or any(token.lstrip or token.rstrip for token in added):
        return _VANISHING
    return 1 if normalizer is None else _NFC_SHRINKS


# -- incremental decoding ---------------------------------------------------------------------------------------------


class Detokenizer(Protocol):
    """Converts the tokens of one stream to text, in whole characters."""

    def push(self, token: int) -> str:
        """Add ``token`` and return the text that is now complete, "" while a character is incomplete."""

    def finish(self) -> str:
        """Return the rest at the end of the stream. An incomplete character becomes U+FFFD."""


class _ByteDetokenizer:
    """For byte-level tokenizers: looks up the bytes of each id and decodes UTF-8 incrementally."""

    __slots__ = ("_decode", "_skip", "_spell")

    def __init__(self, text: TextModel, skip_special_tokens: bool, after: Sequence[int] = ()) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._spell = text.token_bytes
        self._decode(b"".join(map(self._spell, after[-SEEN_TOKENS:])))  # keeps the beginning of a character
        self._skip = text.is_special if skip_special_tokens else None

    def push(self, token: int) -> str:
        if self._skip is not None and self._skip(token):
            return ""
        return self._decode(self._spell(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """For any other tokenizer: decodes a short window with and without the new tokens and returns the difference,
    because the text of a token may depend on the tokens before it (sentencepiece spaces, byte fallback)."""

    __slots__ = ("_ids", "_read", "_skip", "_start", "_text")

    def __init__(self, text: TextModel, skip_special_tokens: bool, after: Sequence[int] = ()) -> None:
        self._text, self._skip = text, skip_special_tokens
        self._ids: list[int] = [*after[-SEEN_TOKENS:]]
        self._start, self._read = 0, len(self._ids)
        while self._read and text.decode(self._ids[: self._read], skip_special_tokens=self._skip).endswith("�"):
            self._read -= 1  # an incomplete character: shown as a whole with the token that completes it

    def push(self, token: int) -> str:
        self._ids.append(token)
        new = self._new()
        if (not new or new.endswith("�")) and len(self._ids) - self._read < MAX_WINDOW_TOKENS:
            return ""
        self._ids = self._ids[self._read :]
        self._start, self._read = 0, len(self._ids)
        return new

    def finish(self) -> str:
        new = self._new()
        self._start = self._read = len(self._ids)
        return new

    def _new(self) -> str:
        before = self._text.decode(self._ids[self._start : self._read], skip_special_tokens=self._skip)
        return self._text.decode(self._ids[self._start :], skip_special_tokens=self._skip)[len(before) :]


class _Continuation:
    """Decodes as ``stream``, without the ``unfinished`` character of the text before, unless the stream completes
    it."""

    __slots__ = ("_stream", "_unfinished")

    def __init__(self, stream: Detokenizer, unfinished: str) -> None:
        self._stream, self._unfinished = stream, unfinished

    def push(self, token: int) -> str:
        return self._own(self._stream.push(token))

    def finish(self) -> str:
        return self._own(self._stream.finish())

    def _own(self, text: str) -> str:
        if text and self._unfinished:
            text, self._unfinished = text.removeprefix(self._unfinished), ""
        return text


class StopStrings:
    """The stop strings of a request, for the windows of all its choices. ``tokens``: those that are one special token,
    by its id; such a token ends the output on the worker, and the text of an output does not have it."""

    __slots__ = ("chars", "include", "longest", "strings", "tokens")

    def __init__(self, strings: Sequence[str], include: bool, tokens: Mapping[int, str] | None = None) -> None:
        self.strings, self.include, self.tokens = strings, include, tokens or {}
        self.longest = max(map(len, strings), default=0)
        self.chars = frozenset("".join(stop[:-1] for stop in strings))
        """All characters of the stop strings but the last of each: a possible start of a stop string ends with one."""


class StopWindow:
    """Holds back the end of a text as long as it may be the beginning of a stop string."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop string that is complete."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add ``text`` and return (text that can be sent, whether a stop string is complete). What follows a complete
        stop string is dropped."""
        held = self._held + text
        found = [(at, stop) for stop in self._stops.strings if (at := held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            self._held, self.found = "", stop
            return held[: at + len(stop) if self._stops.include else at], True
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def end(self, token: int) -> None:
        """Note which stop string ``token``, after which the output ended, is: none of them if it is another token."""
        if self.found is None:
            self.found = self._stops.tokens.get(token)

    def shown(self, token: int) -> str:
        """Return the text of ``token``, after which the output ended, if it is a stop string that is to be shown, which
        detokenizers may leave out; otherwise ""."""
        return self._stops.tokens.get(token, "") if self._stops.include else ""

    def let_pass(self, text: str) -> str:
        """Return what was held back and ``text`` without looking for stop strings, for tokens before ``min_tokens``."""
        passed, self._held = self._held + text, ""
        return passed

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        return self.let_pass("")

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which a stop string begins."""
        if not text or text[-1] not in self._stops.chars:
            return 0
        for length in range(min(self._stops.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops.strings):
                return length
        return 0
