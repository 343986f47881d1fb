"""Compares a quantized checkpoint with the original: perplexity and most likely tokens on the golden answers.

Only two numbers per token are kept, so that vocabularies of any size fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.eval.evaluate import GOLDEN, read_golden
from bench.eval.quality import LONGEST, REFERENCE, Chat, rendered, rows
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from coordinator.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Agreement:
    """Perplexity of the answers before and after, and the fraction of ``tokens`` with the same most likely one."""

    answers: int
    tokens: int
    before: float
    after: float
    same_token: float
    as_chats: bool

    @property
    def change(self) -> float:
        """Relative change of the perplexity."""
        return self.after / self.before - 1


def measure(original: Checkpoint, quantized: Checkpoint, answers: int) -> Agreement:
    """Compare both in float32 on about ``answers`` golden items, evenly taken from all skills. Raises StartError if a
    model cannot be loaded, for example since it does not fit into memory."""
    chats, as_chats = sample(original, answers)
    tokens = torch.tensor([token for chat in chats for token in chat.tokens[chat.prompt :]])
    likelihood, top = _predictions(original, chats, tokens)
    likelihood_after, top_after = _predictions(quantized, chats, tokens)
    return Agreement(
        len(chats), len(tokens), _perplexity(likelihood), _perplexity(likelihood_after),
        float((top == top_after).float().mean()), as_chats,
    )  # fmt: skip


def sample(checkpoint: Checkpoint, most: int) -> tuple[list[Chat], bool]:
    """Return golden items as the model's chats, those that it can take, and True; without a chat template as plain text
    and False. Raises StartError if it can take none."""
    text = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size)
    records = read_golden(GOLDEN)[0]
    chats, plain = list[Chat](), list[Chat]()
    for record in records:
        try:
            chats.append(rendered(text, record))
        except StartError:
            words = [message.get("content") for message in (*record["messages"], record["reference"])]
            if all(isinstance(each, str) for each in words):
                prompt = text.encode("\n".join(words[:-1]) + "\n")
                plain.append(Chat(prompt + text.encode(words[-1], add_special_tokens=False), len(prompt)))
    limit = min(LONGEST, checkpoint.position_limit)
    found = [chat for chat in chats or plain if chat.prompt < len(chat.tokens) <= limit]
    if not found:
        raise StartError("quality cannot be measured", f"{checkpoint.name} can take no golden item", "give --answers 0")
    step = max(1, len(found) // most)
    return found[::step][:most], bool(chats)


def _predictions(
    checkpoint: Checkpoint, chats: Sequence[Chat], tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probability of each of ``tokens``, and the most likely token in its place."""
    starts = torch.tensor([0, *(len(chat.tokens) - chat.prompt for chat in chats)]).cumsum(0).tolist()
    likelihood, top = torch.full(tokens.shape, torch.nan), torch.full(tokens.shape, -1)
    for place, row in rows(checkpoint, REFERENCE, chats):
        at = starts[place]
        likelihood[at], top[at] = row[tokens[at]], row.argmax()
        starts[place] += 1
    return likelihood, top


def _perplexity(likelihood: torch.Tensor) -> float:
    return float((-likelihood.mean()).exp())
