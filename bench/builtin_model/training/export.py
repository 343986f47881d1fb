# ruff: noqa: E501 (the model card is prose)
"""Writes the files of a checkpoint: configuration, bf16 weights, generation settings and the model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from bench.builtin_model.corpus import LATER_SHARES, SHARES
from bench.builtin_model.training.recipe import DRAFT, MODEL
from bench.builtin_model.training.tokenizer import CONTEXT, VOCABULARY, Encoder

SAMPLING = {"do_sample": True, "temperature": 0.3, "top_p": 0.95}
"""The checkpoint's default sampling: some variety in stories, little where the model is certain."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write(model: LlamaForCausalLM, encoder: Encoder, directory: Path, tokenizer_from: Path) -> None:
    """Write a directory that transformers and Tandem can load. The tied output layer is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    _write_json(directory / "config.json", config)
    generation = {"bos_token_id": encoder.bos, "eos_token_id": encoder.stop, "pad_token_id": encoder.pad}
    _write_json(directory / "generation_config.json", generation | SAMPLING)
    if directory != tokenizer_from:
        for name in _TOKENIZER_FILES:
            shutil.copyfile(tokenizer_from / name, directory / name)


def device() -> torch.device:
    """Return the GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read(directory: Path) -> LlamaForCausalLM:
    """Load an exported model in bf16, on the GPU if there is one."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    torch.nn.Module.to(model, device())
    model.train(False)
    return model


def write_card(
    figures: dict[str, float],
    counts: Mapping[str, int],
    model: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    directory: Path,
) -> None:
    """Write the model card. ``counts`` holds the golden items per skill; figures that belong to no skill are over all
    items."""
    total = sum(counts.values())
    items = {name: counts.get(name.removesuffix("_valid"), total) for name in figures}
    rows = "\n".join(f"| {name} | {items[name]} | {value:.1%} |" for name, value in figures.items())
    shares = ", ".join(f"{name} {share} then {LATER_SHARES[name]}" for name, share in SHARES.items())
    card = _CARD.format(
        parameters=_millions(model), draft=_millions(draft), vocabulary=VOCABULARY, context=CONTEXT, rows=rows,
        shares=shares, hidden=MODEL.hidden, layers=MODEL.layers, steps=MODEL.steps, later=MODEL.later, batch=MODEL.batch_tokens,
        seed=MODEL.seed, draft_hidden=DRAFT.hidden, draft_layers=DRAFT.layers, draft_steps=DRAFT.steps,
    )  # fmt: skip
    (directory / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def _millions(model: LlamaForCausalLM) -> str:
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f}"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_CARD = """# The built-in model

A chat model of {parameters} million parameters that comes with Tandem, so that `make up` answers in real sentences
without a download, an account or a GPU. It is for trying and for testing the server, not for work.

## What it can

Small talk, questions about a tiny world (animals, colours, opposites, calendars, counting, uses, capitals), addition and
subtraction up to three digits with its working, sorting and copying short lists, JSON answers to a schema that stands in
the prompt, calls of three tools (weather, calculator, clock) and answers made of their results, very short stories, and
questions about Tandem itself. It speaks only English.

## What it cannot

Anything else. It knows no facts beyond its corpus, cannot multiply without a tool, cannot translate, code or reason, and
answers a question it does not understand with the nearest one it does. Conversations of its training were mostly shorter
than 300 tokens, none longer than {context}. Nothing that it says should be relied on.

## Figures

Greedy answers in bf16 to the golden set (`bench/eval/golden/builtin.jsonl`), which is held out from training by the content of
each item: pairs of numbers, lists, schemas, wordings of questions, names of cities. `tandem eval` measures them again.

| skill | items | right |
|---|---|---|
{rows}

`json_valid` is the share of JSON answers that parse and fit the schema. `draft_agreement` is how often the draft's most
likely token is the model's own, over all tokens of the golden answers.

## How it was made

- Architecture: Llama, hidden size {hidden}, {layers} layers, tied embeddings, byte-level BPE of {vocabulary} tokens in which every
  digit is a token of its own, context {context}.
- Corpus: `bench/builtin_model/corpus`, a deterministic generator of grammars and templates written for this project; no text
  of others. Shares in items before and after {later:.0%} of the steps: {shares}.
- Training: {steps} steps of about {batch} tokens from seed {seed}, loss on what the assistant says, Muon for matrices and
  AdamW for the rest, cosine schedule.
- `loss.png` shows the loss, and the skills as they were measured on the way; `draft/loss.png` that of the draft.
- The draft in `draft/` for speculative decoding: {draft} million parameters, hidden size {draft_hidden}, {draft_layers} layers, the same
  tokenizer, {draft_steps} steps with the model as teacher.
- `make builtin-model` makes all of it again.

License: Apache-2.0, like Tandem.
"""
