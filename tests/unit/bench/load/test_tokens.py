"""How ``tandem bench`` asks a server for token ids."""

from __future__ import annotations

from typing import Any

import pytest

from bench.load.tokens import PIECE_CHARACTERS, ServerTokenizer, ordinary_ids, pieces
from common.net.http_client import HttpError


@pytest.mark.parametrize(
    "text", ["", "a", "a b", "x" * 10_000, "word " * 3_000, " " * 5_000, "\n".join(["line"] * 2_000)]
)
def test_pieces_are_the_whole(text: str) -> None:
    found = list(pieces(text))
    assert "".join(found) == text and all(len(piece) <= PIECE_CHARACTERS for piece in found)
    assert len(found) == 1 or all(found)


def test_words_stay_whole() -> None:
    assert all(set(piece.split()) <= {"word"} for piece in pieces("word " * 3_000))


class Small:
    """A server that refuses text longer than its context, as Tandem does. A word is a token."""

    url = "http://small"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/tokenize" and not body["add_special_tokens"]
        if len(body["prompt"]) > 2 * PIECE_CHARACTERS:
            raise HttpError("too long", 400)
        return {"tokens": [hash(word) for word in body["prompt"].split()]}


def test_prose_longer_than_a_context_gives_ids() -> None:
    server: Any = Small()
    assert len(ordinary_ids(ServerTokenizer(server, "tiny"))) > 1_000


def test_a_long_text_has_the_ids_of_its_words() -> None:
    server: Any = Small()
    words = [f"word{number}" for number in range(5_000)]
    assert ServerTokenizer(server, "tiny").encode(" ".join(words)) == list(map(hash, words))
