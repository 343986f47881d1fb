"""Which token ids end a sequence, and which file of the checkpoint says so.

Many checkpoints name their end-of-turn token only in the tokenizer's settings or in the chat template. A chat with
such a model would run to the end of its context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint.json_files import read_json
from common.checkpoint.template_end import written_after_answer
from common.checkpoint.token_files import added_tokens, template_texts, token_text, vocabulary

SPELLINGS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>"),
    *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|eot|>"),
    *("<｜end▁of▁sentence｜>", "[e~[", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|endofturn|>"),
)
"""Spellings of tokens that end a turn, if the tokenizer has them as added tokens and the chat template writes them.
Most are also found by rendering; these are there for tokens that end other turns than a plain answer, such as calls."""
_WORD_START = "▁"


@dataclass(frozen=True)
class EndToken:
    """A token that ends a sequence: its id, its text ("" if it is not an added token) and where it is declared."""

    id: int
    text: str
    why: str

    def __str__(self) -> str:
        return f"{self.text or 'token'} ({self.id}, {self.why})"


def find_end_tokens(
    directory: Path,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    vocab_size: int | None,
    made_from: str = "",
) -> tuple[tuple[EndToken, ...], tuple[str, ...]]:
    """Return the tokens that end a sequence, without duplicates, and notes on declared ones that cannot.

    They are, in this order: the ids of generation_config.json, or of config.json if that names none; ``eos_token`` of
    the tokenizer; and the end-of-turn tokens of the chat template, unless generation_config.json lists several ids and
    so is complete. ``made_from``: the format of which both files were made, whose ids are never taken to be complete.
    Tokens beyond ``vocab_size`` are left out. Raises StartError if a file cannot be read."""
    added = added_tokens(directory)
    texts = {index: text for text, index in added.items()}
    found, notes = dict[int, EndToken](), list[str]()
    declared = generation_config.get("eos_token_id")
    is_complete = not made_from and isinstance(declared, list) and len(declared) > 1
    for index, why in (
        *((index, made_from or file) for index, file in _of_configuration(config, generation_config)),
        *_of_tokenizer(directory, added),
        *(() if is_complete else ((added[text], "chat template") for text in _of_template(directory, added))),
    ):
        if vocab_size is not None and not 0 <= index < vocab_size:
            notes.append(f"{why} names the end token {index}, but the vocabulary has {vocab_size:,} tokens: ignored")
        else:
            found.setdefault(index, EndToken(index, texts.get(index, ""), why))
    return tuple(found.values()), tuple(dict.fromkeys(notes))


def _of_configuration(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    named = (("generation_config.json", generation), ("config.json", config), ("config.json", _text_config(config)))
    for file, source in named:
        value = source.get("eos_token_id")
        ids = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
        yield from ((each, file) for each in ids)
        if ids:
            return


def _of_tokenizer(directory: Path, added: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield the id of ``eos_token``. A word or a sign of the ordinary vocabulary, which some checkpoints declare, is
    none: it would end answers within a sentence."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        text = token_text((read_json(directory / file) or {}).get("eos_token"))
        if not text:
            continue
        index = added.get(text)
        if index is None and not is_word_or_sign(text):
            index = vocabulary(directory).get(text)
        if index is not None:
            yield index, file
        return


def is_word_or_sign(text: str) -> bool:
    """Return whether ``text`` is spelled as ordinary words or signs are, not as a control token."""
    letters = text.replace(_WORD_START, "")
    return letters.isalnum() or not any(map(str.isalnum, letters))


def _of_template(directory: Path, added: Mapping[str, int]) -> Iterator[str]:
    """Yield the end-of-turn tokens that the chat templates write: those after an assistant's message, and those of
    :data:`SPELLINGS`. ``<|end|>`` ends a message, but no turn, where other tokens end turns (the harmony format)."""
    templates = template_texts(directory)
    if not templates or not added:
        return
    is_harmony = {"<|return|>", "<|call|>"} <= added.keys() or {"<|calls|>", "<|flush|>"} <= added.keys()
    spelled = [text for text in SPELLINGS if text in added and any(text in each for each in templates)]
    for text in dict.fromkeys((*written_after_answer(directory, templates, added), *spelled)):
        if not (is_harmony and text == "<|end|>"):
            yield text


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
