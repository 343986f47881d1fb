"""Text and tokens: the only place where they meet.

Owns the tokenizer (the ``tokenizers`` library alone; ``AutoTokenizer`` would bring torch), the chat template,
incremental detokenisation that never splits a character, and the window that keeps stop strings from leaking. All of it
is synchronous and safe to call from an executor thread; long texts and lists go through the library's batch calls,
because only those let go of the interpreter lock.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, normalizers

from common.errors import RequestError, StartError, reason
from coordinator.openai import ChatBody
from coordinator.template import ChatTemplate, Typed, pick_template

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG = 2_000
"""Characters or tokens from which on the library must let go of the interpreter lock; below, threads cost more."""
_NFC_SHRINKS = 4
"""So many characters may become one in normal form C."""
MAX_WINDOW_TOKENS = 32
"""A character that is still incomplete after so many tokens is none."""


class TextModel:
    """Tokenizer and chat template of one checkpoint directory."""

    def __init__(self, directory: Path, *, vocab_size: int, chat_template: str | None = None) -> None:
        self.directory, self.vocab_size = directory, vocab_size
        self.tokenizer = _load_tokenizer(directory)
        added = self.tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._control = [token.content for token in added.values() if token.special]
        self._byte_level = isinstance(self.tokenizer.decoder, decoders.ByteLevel)
        self._token_chars = _token_chars(self.tokenizer) if self._byte_level else None
        self._bytes: dict[int, bytes] = {}
        self._plain: Tokenizer | None = None
        self._plain_lock = Lock()
        self.template = self._load_template(chat_template)

    # -- to tokens ------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of ``text``; control tokens spelled out in it are control tokens."""
        return _encode(self.tokenizer, text, add_special_tokens)

    def encode_typed(self, text: str) -> list[int]:
        """The ids of ``text`` with every control token in it taken as plain characters."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = Tokenizer.from_str(self.tokenizer.to_str())
                self._plain.encode_special_tokens = True
        return _encode(self._plain, text, False)

    def least_tokens(self, chars: int) -> int:
        """As few tokens can ``chars`` characters be; 0 where that cannot be told."""
        return chars // self._token_chars if self._token_chars else 0

    def encode_chat(self, body: ChatBody, check_chars: Callable[[int], None] = lambda chars: None) -> list[int]:
        """The prompt of a chat; RequestError if the model has no template or the template refuses it. ``check_chars``
        may refuse the length of the templated text before it becomes tokens."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        pieces = self.template.render(
            body.messages,
            tools=body.tools,
            kwargs=body.template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        check_chars(sum(map(len, pieces)))
        ids: list[int] = []
        for piece in pieces:
            typed = isinstance(piece, Typed)
            ids += self.encode_typed(piece) if typed else self.encode(piece, add_special_tokens=False)
        return ids

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
        settings = _read_json(self.directory / "tokenizer_config.json")
        source = _given_template(override) if override else self._own_template(settings)
        if source is None:
            return None
        legacy = _read_json(self.directory / "special_tokens_map.json")
        special: dict[str, str] = {}
        for name in _SPECIAL_NAMES:
            if text := _token_text(settings.get(name)) or _token_text(legacy.get(name)):
                special[name] = text
        return ChatTemplate(source, special, self._control)

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


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if len(text) < LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _token_chars(tokenizer: Tokenizer) -> int | None:
    """The most characters that become one token of a byte-level vocabulary; None where text may vanish on the way."""
    vocab, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder().values()
    normalizer = tokenizer.normalizer
    keeps_text = normalizer is None or isinstance(normalizer, normalizers.NFC)
    if not keeps_text or not _BYTE_OF.keys() <= vocab.keys() or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, vocab)) * (1 if normalizer is None else _NFC_SHRINKS)


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartError(f"cannot read {file}", str(error), "download the model again") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


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


class StopWindow:
    """Holds back the end of a text while it could still become a stop string."""

    __slots__ = ("_chars", "_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include
        self._longest = max(map(len, stops), default=0)
        self._chars = frozenset("".join(stop[:-1] for stop in stops))
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certainly before any stop string, whether a stop string is complete)."""
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda match: match[0])
            self._held = ""
            return held[: at + len(stop) if self._include else at], True
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
        if not text or text[-1] not in self._chars:
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
