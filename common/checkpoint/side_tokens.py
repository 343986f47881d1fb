"""Tokens of a tokenizer that only files beside tokenizer.json have.

transformers adds them when it loads a tokenizer. Here they are written into a tokenizer.json of their own, which all
processes and libraries then read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.json_files import read_json
from common.checkpoint.token_files import added_tokens, head_value, token_text, vocabulary
from common.core.errors import StartError, reason

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def missing(directory: Path, vocab_size: int | None) -> str:
    """Return in words how the added tokens of tokenizer.json are not those of the model: the files beside it have more,
    or the model has no ids for some; "" if they are. Reads its vocabulary only if a special token is not among its
    added tokens. ``vocab_size``: the ids that the model has."""
    found = head_value(directory / "tokenizer.json", "added_tokens")
    listed = found if isinstance(found, list) else []
    own = {token_text(token) for token in listed}
    words = [f"without {text}, for which the model has no id" for text in _beyond(listed, vocab_size)[:1]]
    settings = read_json(directory / "tokenizer_config.json") or {}
    declared = {text: index for index, text, _ in _declared(directory, settings, vocab_size)}
    tokens = [text for text in declared if text not in own]
    if unknown := [text for text in _special_texts(directory, settings) if text not in own and text not in declared]:
        ids = declared | added_tokens(directory) | vocabulary(directory)
        if vocab_size is None or max(ids.values(), default=-1) + 1 < vocab_size:
            tokens += [text for text in unknown if text not in ids]
    if tokens:
        words.insert(0, f"with {len(tokens)} tokens of other files, such as {tokens[0]}")
    return ", ".join(words)


def merge(directory: Path, vocab_size: int | None) -> str:
    """Return the content of tokenizer.json in ``directory`` with the tokens of the other files at their ids, and
    without those for which the model has none. Raises StartError if a token cannot have its id."""
    from tokenizers import Tokenizer  # here, since most checkpoints need no change

    file = directory / "tokenizer.json"
    settings = read_json(directory / "tokenizer_config.json") or {}
    declared = list(_declared(directory, settings, vocab_size))
    try:
        text = within(json.loads(file.read_text(encoding="utf-8")), vocab_size)
        tokenizer = Tokenizer.from_str(text)
        wanted = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        new = [each for each in declared if tokenizer.token_to_id(each[1]) is None]  # others keep their ids
        wanted |= {each: index for index, each, _ in new}
        if new:
            tokenizer = Tokenizer.from_str(_with_vocabulary(text, tokenizer, new))
        _add(tokenizer, declared)
        _add_named(tokenizer, directory, settings, vocab_size)
    except Exception as error:  # the library raises bare Exception
        raise StartError(f"cannot read {file}", reason(error), "download the model again") from error
    for each, index in wanted.items():
        if (got := tokenizer.token_to_id(each)) != index:
            raise StartError(
                f"cannot read the tokenizer in {directory}",
                f"{each} is declared to have the id {index}, but in tokenizer.json it would have {got}",
                "save the tokenizer again: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)",
            )
    return str(tokenizer.to_str())


def within(content: dict[str, Any], vocab_size: int | None) -> str:
    """Return ``content``, that of a tokenizer.json, as text without added tokens that the model has no ids for."""
    tokens = content.get("added_tokens") or []
    beyond = set(_beyond(tokens, vocab_size))
    content["added_tokens"] = [token for token in tokens if token_text(token) not in beyond]
    return json.dumps(content, ensure_ascii=False)


def _beyond(listed: Any, vocab_size: int | None) -> list[str]:
    tokens = [token for token in listed or () if isinstance(token, dict) and isinstance(token.get("id"), int)]
    return [str(token_text(token)) for token in tokens if vocab_size is not None and token["id"] >= vocab_size]


def _declared(
    directory: Path, settings: Mapping[str, Any], vocab_size: int | None
) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield (id, text, flags) of added_tokens_decoder and added_tokens.json, by id, as far as the model has ids."""
    special = set(_special_texts(directory, settings))
    found: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for text, index in (read_json(directory / "added_tokens.json") or {}).items():
        if isinstance(index, int):
            found[index] = text, {"special": text in special, "normalized": text not in special}
    decoder = settings.get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        if str(key).isdecimal() and (declared := token_text(token)) is not None:
            found[int(key)] = declared, token if isinstance(token, dict) else {"special": True, "normalized": False}
    yield from ((index, *found[index]) for index in sorted(found) if vocab_size is None or index < vocab_size)


def _special_texts(directory: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the texts of special tokens that have a name or are listed. As in transformers, special_tokens_map.json
    counts only without ``added_tokens_decoder``."""
    sources = [settings]
    if "added_tokens_decoder" not in settings:
        sources.append(read_json(directory / "special_tokens_map.json") or {})
    found = list[str]()
    for source in sources:
        found += [text for name in _NAMED if (text := token_text(source.get(name)))]
        for name in _LISTS:
            listed = source.get(name)
            values = listed if isinstance(listed, list) else listed.values() if isinstance(listed, dict) else ()
            found += [text for each in values if (text := token_text(each))]
    return list(dict.fromkeys(found))


def _with_vocabulary(text: str, tokenizer: Any, new: list[tuple[int, str, Mapping[str, Any]]]) -> str:
    """Return tokenizer.json with the added and the ``new`` tokens in its vocabulary, where they have their ids even if
    there are gaps before them: the library numbers tokens that are only added from the end of the vocabulary. A
    unigram model has no ids of its own and stays as it is."""
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        for token in content["added_tokens"]:
            vocab.setdefault(token["content"], token["id"])
        used = set(tokenizer.get_vocab(with_added_tokens=True).values())
        vocab.update({each: index for index, each, _ in new if index not in used})
    return json.dumps(content)


def _add(tokenizer: Any, declared: list[tuple[int, str, Mapping[str, Any]]]) -> None:
    from tokenizers import AddedToken

    for _, text, flags in declared:
        given = {name: bool(flags[name]) for name in _FLAGS if name in flags}
        token = AddedToken(text, **({"normalized": not given.get("special", False)} | given))
        tokenizer.add_special_tokens([token]) if given.get("special") else tokenizer.add_tokens([token])


def _add_named(tokenizer: Any, directory: Path, settings: Mapping[str, Any], vocab_size: int | None) -> None:
    """Add special tokens that have a name but no id, as transformers does, as long as the model has ids for them."""
    from tokenizers import AddedToken

    for text in _special_texts(directory, settings):
        following = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if tokenizer.token_to_id(text) is None and (vocab_size is None or following < vocab_size):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
