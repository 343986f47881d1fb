"""Text and tokens: the only place where they meet.

Owns the tokenizer (the ``tokenizers`` library alone; ``AutoTokenizer`` would bring torch), the chat template,
incremental detokenisation that never splits a character, and the window that keeps stop strings from leaking. All of it
is synchronous and safe to call from an executor thread; long texts and lists go through the library's batch calls,
because only those let go of the interpreter lock. Very long ones come out a slice at a time.
"""

from __future__ import annotations

import codecs
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, normalizers

from common.core.errors import RequestError, StartError, reason
from coordinator.requests.spec import ChatBody
from coordinator.text.chat_template import ChatTemplate, pick_template
from coordinator.text.control_tokens import ControlTokens
from coordinator.text.slices import SLICE_CHARS, encode_slices
from coordinator.text.token_names import make_special, read_json, read_token_names

log = logging.getLogger("tandem.text")

LONG = 2_000
"""Characters or tokens from which on the library must let go of the interpreter lock; below, threads cost more."""
_NFC_SHRINKS = 4
"""So many characters may become one in normal form C."""
_VANISHING = 16
"""Where text may vanish on the way to tokens (white space, unknown words, accents), a prompt may have so many times
the characters that its longest tokens stand for."""
_TRIAL: list[dict[str, object]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
MAX_WINDOW_TOKENS = 32
"""A character that is still incomplete after so many tokens is none."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A templated chat: ``text`` with control tokens under their secret names, ``chars`` as long as it was before."""

    text: str
    chars: int


class TextModel:
    """Tokenizer and chat template of one checkpoint directory."""

    def __init__(self, directory: Path, *, vocab_size: int, chat_template: str | None = None) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # work stays in its thread, whose lane it is in
        self.directory, self.vocab_size = directory, vocab_size
        self.tokenizer = _load_tokenizer(directory)
        self._names = read_token_names(directory, self.tokenizer)
        special = self._names.special
        make_special(self.tokenizer, special)
        added = self.tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special or token.content in special)
        self._byte_level = isinstance(self.tokenizer.decoder, decoders.ByteLevel)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        self.chars_per_token = self._longest_token * _shrinks(self.tokenizer, self._byte_level)
        """The most characters of text that one token may stand for, in a prompt as a whole."""
        self._bytes: dict[int, bytes] = {}
        self._around = _around(self.tokenizer)
        self._control = ControlTokens(self.tokenizer, special | self._names.control)
        self.template = self._load_template(chat_template)

    # -- to tokens ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; control tokens spelled out in it are control tokens."""
        return list(chain.from_iterable(self.slices(text, add_special_tokens=add_special_tokens)))

    def slices(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """:meth:`encode`, some ids at a time."""
        before, after = self._around if add_special_tokens else ([], [])
        parts = _slices(self.tokenizer, text, self._longest_token)
        yield before + next(parts)
        yield from parts
        yield after

    def chat_text(self, body: ChatBody, most: int = sys.maxsize) -> ChatText:
        """The templated chat; RequestError if the model has no template or the template refuses it, TooMuchText if it
        would make more than ``most`` characters of it."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        text = self.template.render(
            body.messages,
            tools=body.tools,
            kwargs=body.template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            most=most,
        )
        return ChatText(self._control.spell(text), len(text))

    def chat_slices(self, chat: ChatText) -> Iterator[list[int]]:
        """The ids of a templated chat, some at a time: control tokens are those that the template wrote."""
        return _slices(self._control.tokenizer, chat.text, max(self._longest_token, self._control.longest_name))

    def encode_chat(self, body: ChatBody) -> list[int]:
        """The prompt of a chat."""
        return list(chain.from_iterable(self.chat_slices(self.chat_text(body))))

    # -- to text --------------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All of ``ids`` as text; incomplete characters become U+FFFD."""
        if self._byte_level:  # the library would take the letters of added tokens for bytes
            kept = (token for token in ids if not (skip_special_tokens and self.is_special(token)))
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        if len(ids) < LONG:
            return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one stream of tokens."""
        if self._byte_level:
            return _ByteDetokenizer(self, skip_special_tokens)
        return _WindowDetokenizer(self, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for, b"" for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        """``token`` on its own as text, parts of a character as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def _spell(self, token: int) -> bytes:
        spelled = self.tokenizer.id_to_token(token)
        if spelled is None:
            return b""
        if self._byte_level:
            if token in self._added_ids or not _BYTE_OF.keys() >= set(spelled):
                return spelled.encode()  # as it is, although its letters may stand for bytes elsewhere
            return bytes(_BYTE_OF[char] for char in spelled)
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("▁", " ").encode()

    # -- loading --------------------------------------------------------------------------------------------------

    def _load_template(self, override: str | None) -> ChatTemplate | None:
        settings = read_json(self.directory / "tokenizer_config.json")
        source = _given_template(override) if override else self._own_template(settings)
        if source is None:
            return None
        template = ChatTemplate(source, dict(self._names.named))
        self._try_out(template)
        return template

    def _try_out(self, template: ChatTemplate) -> None:
        """Warns of a template that makes control tokens in a way in which it cannot be seen that it made them."""
        try:
            text = template.render(_TRIAL)
        except RequestError:
            return  # this one wants other messages
        if lost := sorted(name for name in self._control.texts if name in self._control.spell(text)):
            log.warning("what the chat template makes of %s is taken for text: write it in one piece", ", ".join(lost))

    def _own_template(self, settings: Mapping[str, Any]) -> str | None:
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        return pick_template(settings.get("chat_template"))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
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
    """The ids that belong before and behind every text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    at = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]


def _shrinks(tokenizer: Tokenizer, byte_level: bool) -> int:
    """How many times the characters of its tokens a text can have at most."""
    added, normalizer = tokenizer.get_added_tokens_decoder().values(), tokenizer.normalizer
    keeps_text = normalizer is None or isinstance(normalizer, normalizers.NFC)
    whole = byte_level and _BYTE_OF.keys() <= tokenizer.get_vocab().keys()
    if not keeps_text or not whole or any(token.lstrip or token.rstrip for token in added):
        return _VANISHING
    return 1 if normalizer is None else _NFC_SHRINKS


def _given_template(option: str) -> str:
    """``--chat-template``: a file, or the template itself."""
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"cannot read the chat template {option}", reason(error), "correct --chat-template") from error


# -- incremental decoding ---------------------------------------------------------------------------------------------


class Detokenizer(Protocol):
    """Tokens of one stream in, whole characters out."""

    def push(self, token: int) -> str:
        """The text that is complete with ``token``, "" while a character is not."""

    def finish(self) -> str:
        """What is left at the end, an incomplete character as U+FFFD."""


class _ByteDetokenizer:
    """Byte-level tokenizers: a table from ids to bytes and an incremental UTF-8 decoder."""

    __slots__ = ("_decode", "_skip", "_spell")

    def __init__(self, text: TextModel, skip_special_tokens: bool) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._spell = text.token_bytes
        self._skip = text.is_special if skip_special_tokens else None

    def push(self, token: int) -> str:
        if self._skip is not None and self._skip(token):
            return ""
        return self._decode(self._spell(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """Any tokenizer: decodes a short window twice and takes the difference, because a token's text may depend on the
    ones before it (spaces of sentencepiece, byte fallback)."""

    __slots__ = ("_ids", "_read", "_skip", "_start", "_text")

    def __init__(self, text: TextModel, skip_special_tokens: bool) -> None:
        self._text, self._skip = text, skip_special_tokens
        self._ids: list[int] = []
        self._start = self._read = 0

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


class StopStrings:
    """The stop strings of a request, for the windows of all its choices."""

    __slots__ = ("chars", "include", "longest", "strings")

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self.strings, self.include = strings, include
        self.longest = max(map(len, strings), default=0)
        self.chars = frozenset("".join(stop[:-1] for stop in strings))
        """Those that may stand at the end of a text that begins one."""


class StopWindow:
    """Holds back the end of a text while it could still become a stop string."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certainly before any stop string, whether a stop string is complete)."""
        held = self._held + text
        found = [(at, stop) for stop in self._stops.strings if (at := held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            self._held = ""
            return held[: at + len(stop) if self._stops.include else at], True
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def let_pass(self, text: str) -> str:
        """``text`` unchecked: stop strings do not count yet (min_tokens)."""
        passed, self._held = self._held + text, ""
        return passed

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return self.let_pass("")

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        if not text or text[-1] not in self._stops.chars:
            return 0
        for length in range(min(self._stops.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops.strings):
                return length
        return 0
