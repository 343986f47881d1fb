"""The model's tokenizer as grammars see it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLTokenizer


class ModelVocabulary:
    """The control tokens of an llguidance tokenizer: those that its masks treat as tokens rather than text.

    For a ``tokenizer.json`` these are the added tokens that are marked as special, and all other added tokens of the
    form ``<...>`` too. Such a token never matches text in a grammar, whatever it spells."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = {}
        for token in filter(tokenizer.is_special_token, range(tokenizer.vocab_size)):
            text = tokenizer.decode_bytes([token]).decode("utf-8", "replace")
            # llguidance marks control tokens by a byte FF, with which ordinary tokens of bytes may begin too
            if tokenizer.tokenize_str(text, parse_special=True) == [token]:
                self._ids[text] = token
        longest_first = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if longest_first else None

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token ``text``, None if there is none."""
        return self._ids.get(text)

    def split(self, text: str) -> list[str | int]:
        """Return ``text`` as a list of texts and ids of control tokens that it spells."""
        parts: list[str | int] = []
        at = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            if found.start() > at:
                parts.append(text[at : found.start()])
            parts.append(self._ids[found[0]])
            at = found.end()
        if at < len(text):
            parts.append(text[at:])
        return parts

    @property
    def end_ids(self) -> Sequence[int]:
        """Ids of the tokens that end a sequence."""
        return self._tokenizer.eos_tokens
