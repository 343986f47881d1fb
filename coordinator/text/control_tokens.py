"""Control tokens that no client can spell.

Owns a second tokenizer, equal to the first but for the spelling of its control tokens: in it each has a name that was
drawn at random when the process started. The text of a control token is ordinary text to it. What a chat template wrote
itself is spelled anew before it is tokenized, all in one piece, so that the ids are those of the first tokenizer.
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
"""Lower-case and of one byte, which every normalizer leaves alone."""
_SECRET_LETTERS = 24
_NUMBER_LETTERS = 4
_CONTROL_SHAPES = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""Added tokens of this shape steer the model also where its authors did not mark them as special (DeepSeek's roles);
llama.cpp's converter goes by the same rule."""


def control_tokens(tokenizer: Tokenizer, declared: Collection[str] = ()) -> list[str]:
    """Texts of all added tokens that steer the model and must not come from a client's string: those that are marked as
    special, those ``declared`` elsewhere (:mod:`coordinator.text.token_names`), and those of _CONTROL_SHAPES."""
    added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    texts = {token.content: token.special or token.content in declared for token in added.values()}
    return [text for text, special in texts.items() if text and (special or _CONTROL_SHAPES.fullmatch(text))]


class ControlTokens:
    """The second tokenizer, and the way to spell for it. ``texts`` are those of the control tokens."""

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
        """``text`` with each control token that the template wrote under its secret name, and no other."""
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
    """Beginnings and ends of all that the template wrote."""
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
    """Whether ``text`` is a single character of ordinary text, as a full stop that ends sequences."""
    return len(text) == 1 and (text.isprintable() or text.isspace())


def _is_known(text: str, tokenizer: Tokenizer) -> bool:
    """Whether ``tokenizer`` has tokens for ``text``, a character, that are not lost and not unknown."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return text in tokenizer.decode(ids, skip_special_tokens=False)


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """``tokenizer`` with tokens called by ``names`` wherever it looks them up, under the ids that they have."""
    if not names:
        return tokenizer
    settings = json.loads(tokenizer.to_str())
    settings["post_processor"] = None  # what it adds around a text is not for chats, and it knows tokens by name
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
