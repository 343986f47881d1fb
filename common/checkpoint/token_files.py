"""Added tokens and templates of a checkpoint as its JSON files list them, read without the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checkpoint.json_files import read_json

_KEY = '"added_tokens"'
_HEAD_CHARS = 4 << 20
"""Characters of tokenizer.json before its vocabulary; the added tokens are among them, as the library writes them."""


def token_text(value: object) -> str | None:
    """Return the text of a token, given as a string or as an object with ``content``. None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def added_tokens(directory: Path) -> dict[str, int]:
    """Return the ids of all added tokens by their text: of tokenizer.json, else of ``added_tokens_decoder`` in
    tokenizer_config.json, else of added_tokens.json. Raises StartError if a file cannot be read."""
    found = dict(_in_added_tokens(directory))
    settings = read_json(directory / "tokenizer_config.json") or {}
    found |= dict(_in_decoder(settings.get("added_tokens_decoder")))
    return found | dict(_in_tokenizer(directory / "tokenizer.json"))


def vocabulary_id(directory: Path, text: str) -> int | None:
    """Return the id of ``text`` in the vocabulary of tokenizer.json, None if it has none. Reads the whole file."""
    model = (read_json(directory / "tokenizer.json") or {}).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        found = vocab.get(text)
        return found if isinstance(found, int) else None
    pieces = vocab if isinstance(vocab, list) else []
    return next((at for at, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [text]), None)


def template_text(directory: Path) -> str:
    """Return the sources of all chat templates, one after the other."""
    files = [directory / "chat_template.jinja", *sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    for name in ("tokenizer_config.json", "chat_template.json"):
        texts += _templates((read_json(directory / name) or {}).get("chat_template"))
    return "\n".join(texts)


def _templates(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (str(each.get("template", "")) for each in value if isinstance(each, dict))


def _in_tokenizer(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (text, id) of the list ``added_tokens``. Its vocabulary, most of the file, is not parsed if possible."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as opened:
        head = opened.read(_HEAD_CHARS)
    listed = _list_in(head)
    if listed is None:
        listed = (read_json(file) or {}).get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int) and (text := token_text(token)) is not None:
            yield text, token["id"]


def _list_in(head: str) -> list[Any] | None:
    """Return the first list that is the value of a key ``added_tokens`` in ``head``, None if none is whole."""
    at = head.find(_KEY)
    while at >= 0:
        value = head[at + len(_KEY) : at + len(_KEY) + 64].lstrip()
        if value.startswith(":") and value[1:].lstrip().startswith("["):
            try:
                found, _ = json.JSONDecoder().raw_decode(head, head.index("[", at))
            except (ValueError, RecursionError):
                return None
            return found if isinstance(found, list) else None
        at = head.find(_KEY, at + 1)
    return None


def _in_decoder(value: Any) -> Iterator[tuple[str, int]]:
    for index, token in value.items() if isinstance(value, dict) else ():
        if str(index).isdecimal() and (text := token_text(token)) is not None:
            yield text, int(index)


def _in_added_tokens(directory: Path) -> Iterator[tuple[str, int]]:
    for text, index in (read_json(directory / "added_tokens.json") or {}).items():
        if isinstance(index, int):
            yield text, index
