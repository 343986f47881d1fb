"""The tokenizer and the chat template: converts conversations to token ids and marks the assistant's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.builtin_model.corpus import Conversation, conversation
from common.builtin import path

VOCABULARY = 2048
BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
CALL = ("<tool_call>", "</tool_call>")
"""Single tokens, but not special ones: they must remain in decoded text, where tool calls are parsed."""
CONTEXT = 2048
_SEED, _SAMPLE = 11, 20000


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer on the corpus; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL),
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CALL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def _texts() -> Iterator[str]:
    rng = Random(_SEED)
    for _ in range(_SAMPLE):
        example = conversation(rng)
        yield example.raw
        yield from (json.dumps(tool["function"]) for tool in example.tools)
        for message in example.messages:
            yield message["content"]
            yield from (json.dumps(call["function"]) for call in message.get("tool_calls", ()))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer files that transformers and the coordinator read."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class Encoder:
    """Converts conversations to token ids with the shipped chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._template = template()
        self.bos, self.pad, self._assistant, self._end = map(self.id, (BOS, PAD, "<|assistant|>", END))
        self.stop = [self._end, self.id(EOS)]

    def id(self, text: str) -> int:
        """Return the id of the token ``text``."""
        found: int | None = self.tokenizer.token_to_id(text)
        assert found is not None, text
        return found

    def example(self, example: Conversation) -> tuple[list[int], list[bool]]:
        """Return the ids of a training example, and for each whether the model has to generate it."""
        if example.raw:
            ids = self._ids(f"{BOS}{example.raw}{EOS}")
            return ids, [False, *[True] * (len(ids) - 1)]
        ids = self._ids(self._render(example.messages, example.tools, False))
        return ids, self._spoken(ids)

    def prompt(self, messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...] = ()) -> list[int]:
        """Return the ids up to the point where the assistant's answer begins."""
        return self._ids(self._render(messages, tools, True))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _render(self, messages: tuple[dict[str, Any], ...], tools: tuple[Any, ...], prompt: bool) -> str:
        return self._template.render(
            messages=list(messages), tools=list(tools) or None, add_generation_prompt=prompt, bos_token=BOS
        )

    def _spoken(self, ids: list[int]) -> list[bool]:
        speaking, marks = False, []
        for token in ids:
            marks.append(speaking)
            speaking = token == self._assistant or (speaking and token != self._end)
        return marks


@cache
def template() -> jinja2.Template:
    """Compile the chat template as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((path() / "chat_template.jinja").read_text(encoding="utf-8"))
