"""Added tokens and templates of a checkpoint as its JSON files list them, read without the tokenizers library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checkpoint.json_files import read_json

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


def vocabulary(directory: Path) -> dict[str, int]:
    """Return the ids of the vocabulary of tokenizer.json, without added tokens. Reads the whole file."""
    model = (read_json(directory / "tokenizer.json") or {}).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return {text: index for text, index in vocab.items() if isinstance(index, int)}
    pieces = vocab if isinstance(vocab, list) else []
    return {str(piece[0]): at for at, piece in enumerate(pieces) if isinstance(piece, list) and piece}


def template_texts(directory: Path) -> list[str]:
    """Return the sources of all chat templates."""
    files = [directory / "chat_template.jinja", *sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    for name in ("tokenizer_config.json", "chat_template.json"):
        texts += _templates((read_json(directory / name) or {}).get("chat_template"))
    return texts


def _templates(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (str(each.get("template", "")) for each in value if isinstance(each, dict))


def head_value(file: Path, key: str) -> Any:
    """Return the value of ``key`` in the tokenizer.json ``file``, a list or an object, else None. Its vocabulary, most
    of the file, is not parsed if the value comes before it. Raises StartError if the file cannot be read."""
    if not file.is_file():
        return None
    with file.open(encoding="utf-8", errors="replace") as opened:
        head = opened.read(_HEAD_CHARS)
    found = _value_in(head, key)
    return (read_json(file) or {}).get(key) if found is None else found


def _in_tokenizer(file: Path) -> Iterator[tuple[str, int]]:
    """Yield (text, id) of the list ``added_tokens``."""
    listed = head_value(file, "added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int) and (text := token_text(token)) is not None:
            yield text, token["id"]


def _value_in(head: str, key: str) -> Any:
    """Return the first list or object that is the value of ``key`` in ``head``, None if none is whole. A token of the
    vocabulary that is spelled like the key has a number as its value."""
    for found in re.finditer(rf'"{key}"\s*:\s*(?=[\[{{])', head):
        try:
            return json.JSONDecoder().raw_decode(head, found.end())[0]
        except (ValueError, RecursionError):
            return None
    return None


def _in_decoder(value: Any) -> Iterator[tuple[str, int]]:
    for index, token in value.items() if isinstance(value, dict) else ():
        if str(index).isdecimal() and (text := token_text(token)) is not None:
            yield text, int(index)


def _in_added_tokens(directory: Path) -> Iterator[tuple[str, int]]:
    for text, index in (read_json(directory / "added_tokens.json") or {}).items():
        if isinstance(index, int):
            yield text, index
