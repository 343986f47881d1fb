"""Protection of control tokens: a client cannot insert them into a prompt by spelling them.

Owns a second tokenizer, a copy of the model's in which each control token is renamed to a secret name drawn at random
when the process starts. To this tokenizer the original spelling of a control token is ordinary text. Before
tokenization, control tokens that the chat template wrote are replaced by their secret names in the rendered prompt. The
whole prompt is then tokenized in one piece, so that the ids equal those of the model's tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from coordinator.text.traced import Traced, origins

_LETTERS = "bcdfghjklmnpqrstvwxyz"
"""Lower-case ASCII letters, which no normalizer changes."""
_SECRET_LETTERS = 24
_NUMBER_LETTERS = 4
_CONTROL_SHAPES = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""Added tokens of this shape are control tokens even if they are not marked as special, as DeepSeek's role tokens.
llama.cpp's converter applies the same rule."""


def control_tokens(tokenizer: Tokenizer, declared: Collection[str] = ()) -> list[str]:
    """Return the texts of all control tokens, which must not come from a client's string: the added tokens that are
    marked as special, are ``declared`` elsewhere (:mod:`coordinator.text.token_names`), or match _CONTROL_SHAPES."""
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    texts = {token.content: token.special or token.content in declared for token in added.values()}
    return [text for text, special in texts.items() if text and (special or _CONTROL_SHAPES.fullmatch(text))]


def distinct_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the added tokens, by id, that grammars tell apart from text that spells them: those that
    ``tokenizer.json`` marks as special, and those of the form ``<...>``, as llguidance does. Words and single
    characters are left out, since they are text too."""
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return {
        token: each.content
        for token, each in added.items()
        if (each.special or (each.content.startswith("<") and each.content.endswith(">")))
        and len(each.content) > 1
        and not each.content.isalnum()
    }


class ControlTokens:
    """The tokenizer with renamed control tokens, and the replacement of control tokens in a prompt. ``texts``: the
    original spellings of the control tokens."""

    def __init__(self, tokenizer: Tokenizer, declared: Collection[str] = ()) -> None:
        self.texts = control_tokens(tokenizer, declared)
        secret = "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_LETTERS))
        names = {text: secret + _number(at) for at, text in enumerate(self.texts)}
        renamed = _renamed(tokenizer, names)
        if letters := {text for text in names if _is_letter(text) and not _is_known(text, renamed)}:
            self.texts = [text for text in self.texts if text not in letters]
            names = {text: name for text, name in names.items() if text not in letters}
            renamed = _renamed(tokenizer, names)
        self.tokenizer, self._names = renamed, names
        longest_first = sorted(map(re.escape, self.texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first)) if longest_first else None
        self.longest_name = _SECRET_LETTERS + _NUMBER_LETTERS

    def spell(self, text: Traced) -> str:
        """Return ``text`` with each control token written by the template replaced by its secret name. Characters of a
        client are never part of a replaced token."""
        if self._pattern is None:
            return str.__str__(text)
        parts: list[str] = []
        at = 0
        for start, end in _runs(origins(text)):
            for found in self._pattern.finditer(text, start, end):
                parts += (str.__getitem__(text, slice(at, found.start())), self._names[found[0]])
                at = found.end()
        parts.append(str.__getitem__(text, slice(at, None)))
        return "".join(parts)


def _runs(own: bytes) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) ranges that the template wrote."""
    start = own.find(b"\1")
    while start >= 0:
        end = own.find(b"\0", start)
        end = len(own) if end < 0 else end
        yield start, end
        start = own.find(b"\1", end)


def _number(value: int) -> str:
    letters = ""
    for _ in range(_NUMBER_LETTERS):
        value, digit = divmod(value, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters


def _is_letter(text: str) -> bool:
    """Return whether ``text`` is a single ordinary character. Some models end sequences with a full stop, for
    example."""
    return len(text) == 1 and (text.isprintable() or text.isspace())


def _is_known(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether ``tokenizer`` can encode the character ``text`` without losing it or making it unknown."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return text in tokenizer.decode(ids, skip_special_tokens=False)


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """Return a copy of ``tokenizer`` in which the tokens in ``names`` have new texts and keep their ids."""
    if not names:
        return tokenizer
    settings = json.loads(tokenizer.to_str())
    settings["post_processor"] = None  # it refers to tokens by name, and chats need no tokens around the text
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model: dict[str, Any] = settings["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:  # unigram
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges)
        model["merges"] = [merge for merge, pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    return Tokenizer.from_str(json.dumps(settings))
