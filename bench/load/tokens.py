"""Tokenizers of the server under test, to make prompts with an exact number of tokens.

Uses the server's own ``/tokenize`` and ``/detokenize`` (Tandem and vLLM have them), or a ``tokenizer.json`` for servers
without. The ids for random prompts come from encoding English prose, so they contain no special tokens and none outside
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from common.core.errors import StartError, reason
from common.net.http_client import HttpClient, HttpError

PROSE_CHARACTERS = 100_000
PIECE_CHARACTERS = 2_000
"""Maximum characters per request to ``/tokenize``: servers reject a text that cannot fit into their context."""
_TODO = "give --tokenizer FILE, the model's tokenizer.json"


class Tokenizer(Protocol):
    """Converts text to token ids and back, without adding special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""


class ServerTokenizer:
    """The tokenizer of a running server. Its methods raise StartError if the server has no such endpoints."""

    def __init__(self, server: HttpClient, model: str) -> None:
        self._server, self._model = server, model

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``. Long text is encoded in pieces, which may give an extra token at each joint."""
        return [token for piece in pieces(text) for token in self._encode(piece)]

    def _encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._ask("/tokenize", body, "tokens")]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        return str(self._ask("/detokenize", {"model": self._model, "tokens": list(ids)}, "prompt"))

    def _ask(self, path: str, body: dict[str, Any], field: str) -> Any:
        try:
            return self._server.post(path, body)[field]
        except (OSError, HttpError, LookupError, TypeError) as error:
            why = reason(error)
            raise StartError(f"{self._server.url}{path} failed", why, _TODO) from error


class FileTokenizer:
    """The tokenizer in a ``tokenizer.json``, or in a directory that contains one."""

    def __init__(self, path: Path) -> None:
        import tokenizers  # slow to import, and needed only with --tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for invalid files
            raise StartError(f"cannot read the tokenizer {file}", reason(error), "correct --tokenizer") from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces of at most PIECE_CHARACTERS, cut before a space if there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind(" ", start + 1, start + PIECE_CHARACTERS + 1)
        end = end if end > 0 else start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def ordinary_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token ids for random prompts, ascending: those that occur in Python's own documentation."""
    from pydoc_data.topics import topics

    ids = sorted(set(tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:PROSE_CHARACTERS])))
    if not ids:
        raise StartError(
            "the tokenizer makes no tokens of English text", "random prompts are made of such tokens", _TODO
        )
    return ids
