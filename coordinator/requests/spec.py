"""What a client asked for, validated: every interface reads its bodies into these."""

from __future__ import annotations

from dataclasses import dataclass, field

Json = dict[str, object]
"""A JSON object as it was parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling fields as the client set them; None where the model's default counts."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What chat and text completions have in common."""

    model: str | None
    n: int
    sampling: Sampling
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_metrics: bool
    cache_salt: str
    priority: int
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody:
    options: Options
    messages: list[Json]
    tools: list[Json] | None
    template_kwargs: Json
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody:
    options: Options
    prompts: list[str | list[int]]
    echo: bool
