"""Special tokens that a checkpoint declares in files other than ``tokenizer.json``.

Reads ``tokenizer_config.json``, ``special_tokens_map.json``, and the token ids in ``config.json`` and
``generation_config.json``. transformers treats all tokens named there as special, whether ``tokenizer.json`` marks them
or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.core.errors import StartError, reason

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that chat templates can refer to."""
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("config.json", "generation_config.json")
_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_WORD_START = "▁"


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Texts of declared tokens. ``special``: declared special. ``control``: further control tokens. ``named``: the
    tokens of NAMED, for templates."""

    named: Mapping[str, str]
    special: frozenset[str]
    control: frozenset[str]


def read_token_names(directory: Path, tokenizer: Tokenizer) -> TokenNames:
    """Return the tokens that the files of ``directory`` declare. Tokens unknown to ``tokenizer`` only appear in
    ``named``. Raises StartError if a file cannot be read or has something other than a token where one is expected."""
    sources = [(file, read_json(file)) for file in map(directory.joinpath, _TOKEN_FILES)]
    named: dict[str, str] = {}
    special: set[str] = set()
    added = tokenizer.get_added_tokens_decoder()
    control = {added[index].content for index in _ids(directory) if index in added}
    for file, settings in sources:
        for name, text in _named(file, settings):
            special.add(text)
            if name in NAMED and text:
                named.setdefault(name, text)
        for name in _LISTS:
            special |= set(_listed(file, name, settings.get(name)))
        control |= set(_listed(file, "chat_control_tokens", settings.get("chat_control_tokens")))
        special |= set(_added(file, settings.get("added_tokens_decoder")))
    by_text = {token.content: token for token in added.values()}
    ordinary = {text for text in special | control if _is_ordinary(text, tokenizer, by_text.get(text))}
    return TokenNames(named, frozenset(special - ordinary), frozenset(control - ordinary))


def make_special(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Mark the tokens ``texts`` of the vocabulary of ``tokenizer`` as special, as transformers does: they are
    recognized anywhere in a text, and skipped when decoding without special tokens."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(texts)])


def _is_ordinary(text: str, tokenizer: Tokenizer, added: AddedToken | None) -> bool:
    """Return whether ``text`` must stay ordinary text although it is declared special.

    True if it is not a token, if it is white space, or if it is a word or sign of the vocabulary that
    ``tokenizer.json`` does not list as an ``added`` token. Some checkpoints declare ``!`` as padding or a full stop as
    the end of a sequence; in a text both must be tokenized as usual."""
    if tokenizer.token_to_id(text) is None:
        return True
    if added is not None:
        return text.isspace() and not added.special
    letters = text.replace(_WORD_START, "")
    return letters.isalnum() or not any(map(str.isalnum, letters))


def _named(file: Path, settings: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in settings.items():
        if name in NAMED and value is not None:
            yield name, _text(file, name, value)
        elif name.endswith("_token") and (text := token_text(value)) is not None:
            yield name, text  # model-specific tokens such as image_token


def _listed(file: Path, name: str, value: object) -> Iterable[str]:
    match value:
        case None:
            return ()
        case list():
            return [_text(file, name, each) for each in value]
        case dict():
            return [_text(file, name, each) for each in value.values()]
    raise _malformed(file, f"{name} is not a list of tokens")


def _added(file: Path, value: object) -> Iterable[str]:
    """Yield the tokens of ``added_tokens_decoder`` that are marked as special."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise _malformed(file, "added_tokens_decoder is not an object of tokens")
    for each in value.values():
        text = _text(file, "added_tokens_decoder", each)
        if isinstance(each, dict) and each.get("special"):
            yield text


def _ids(directory: Path) -> set[int]:
    """Return the ids of NAMED tokens in the model's configuration, most of which end a sequence."""
    found: set[int] = set()
    for file in map(directory.joinpath, _ID_FILES):
        settings = read_json(file)
        nested = settings.get("text_config")
        for source in (settings, nested if isinstance(nested, dict) else {}):
            for name in NAMED:
                value = source.get(f"{name}_id")
                found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return found


def token_text(value: object) -> str | None:
    """Return the text of a token, given as a string or as an object with ``content``. None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _text(file: Path, name: str, value: object) -> str:
    text = token_text(value)
    if text is None:
        raise _malformed(file, f"{name} has {json.dumps(value)[:100]}, which is not a token")
    return text


def read_json(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in ``file``, {} if the file does not exist. Raises StartError if it cannot be read."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _malformed(file, reason(error)) from error
    if not isinstance(value, dict):
        raise _malformed(file, "it is not a JSON object")
    return value


def _malformed(file: Path, why: str) -> StartError:
    return StartError(f"cannot read {file}", why, "download the model again")
