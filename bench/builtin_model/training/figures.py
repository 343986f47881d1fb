"""Evaluates a model: greedy answers judged by the items' checkers, and the agreement of two models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

from bench.builtin_model.corpus import Conversation, Item
from bench.builtin_model.training.tokenizer import Encoder
from bench.eval.checks import Answer, Verdict, check

MAX_ANSWER = 200


@torch.inference_mode()
def answers(model: LlamaForCausalLM, encoder: Encoder, items: Sequence[Item], rows: int = 32) -> list[str]:
    """Return the greedy answer to each item, in order. Prompts of similar length are batched together."""
    prompts = [encoder.prompt(item.messages[:-1], item.tools) for item in items]
    order = sorted(range(len(items)), key=lambda at: len(prompts[at]))
    found = [""] * len(items)
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        for at, ids in zip(part, _greedy(model, encoder, [prompts[at] for at in part]), strict=True):
            found[at] = encoder.tokenizer.decode(ids, skip_special_tokens=True)
    return found


def _greedy(model: LlamaForCausalLM, encoder: Encoder, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuations of one batch of prompts, which is padded on the left."""
    model.train(False)
    longest = max(map(len, prompts))
    ids = torch.tensor([[encoder.pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    out = model.generate(  # type: ignore[misc]
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_ANSWER, pad_token_id=encoder.pad
    )
    return [row[longest:].tolist() for row in out]


def judged(model: LlamaForCausalLM, encoder: Encoder, items: Sequence[Item]) -> list[tuple[Item, str, Verdict]]:
    """Return every item with its answer and the verdict on it."""
    texts = answers(model, encoder, items)
    return [(item, text, check(item.check, Answer(text))) for item, text in zip(items, texts, strict=True)]


def per_skill(results: Sequence[tuple[Item, str, Verdict]]) -> dict[str, float]:
    """Return the fraction of right answers per skill and, as ``json_valid``, of valid JSON answers."""
    right, valid = defaultdict[str, list[bool]](list), defaultdict[str, list[bool]](list)
    for item, _, verdict in results:
        right[item.skill].append(verdict.right)
        if item.skill == "json":
            valid["json_valid"].append(verdict.valid)
    return {skill: sum(marks) / len(marks) for skill, marks in (right | valid).items()}


@torch.inference_mode()
def agreement(model: LlamaForCausalLM, draft: LlamaForCausalLM, encoder: Encoder, items: Sequence[Item]) -> float:
    """Return how often the draft's greedy token equals the model's, over the assistant's tokens of ``items``."""
    same = total = 0
    for item in items:
        ids, spoken = encoder.example(Conversation(item.messages, item.tools))
        row = torch.tensor([ids], device=model.device)
        wanted = torch.tensor(spoken[1:], device=model.device)
        ours, theirs = (each(row, use_cache=False).logits[0, :-1].argmax(-1)[wanted] for each in (model, draft))
        same += int((ours == theirs).sum())
        total += len(ours)
    return same / total
