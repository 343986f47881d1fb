"""A validated client request; every HTTP API parses its bodies into these types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Json = dict[str, object]
"""A parsed JSON object."""
ConstraintKind = Literal["json", "json_schema", "regex", "choice", "lark", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The text that a client wants the output to match (structured output).

    ``value`` by ``kind``: "json" (any JSON object) None; "json_schema" the schema, an object or a boolean, or JSON
    text; "regex" the expression, which the whole text must match; "choice" a list of strings; "lark" a grammar in Lark
    or GBNF; "structural_tag" an object. ``param`` is the path of the value in the request, for error messages.
    ``strict`` has OpenAI's meaning. ``whitespace`` is a regular expression for the white space between JSON tokens, ""
    for none, None for the default of :mod:`coordinator.grammar.expressions`. ``closed`` forbids properties that a
    schema does not name.
    """

    kind: ConstraintKind
    value: object = None
    param: str
    strict: bool = False
    whitespace: str | None = None
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling fields as the client set them; None stands for the model's default.

    ``max_tokens`` None: what fits the context, but at most ``default_tokens`` if these are given."""

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
    default_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Most likely tokens per prompt token that the workers report, for ``prompt_logprobs`` or for ``echo`` with
    ``logprobs``; None for no log-probabilities of the prompt."""
    allowed_token_ids: bytes = b""
    """Without duplicates, as little-endian uint32; empty for all."""
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The fields that chat and text completions share."""

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
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    """The field of that name: most likely tokens per prompt token in the answer's ``prompt_logprobs``."""
    truncate_prompt: int | None = None
    """Last tokens of the prompt to keep, 0 for as many as fit the context, None for all."""
    add_special_tokens: bool = True
    """Whether a text prompt begins with the tokens that the tokenizer adds, such as the beginning of a sequence."""
    tokens_as_ids: bool | None = None
    """Whether log-probabilities name tokens by their ids; None: as the server is configured."""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How an answer may call functions.

    ``tools``: those that it may call, in OpenAI's nested form, with ``strict`` if the client set it. ``params``: the
    paths of their parameters in the request, for error messages. ``choice``: whether it may call them (auto), must call
    at least one of them (required), or must call the only one (named). ``parallel``: whether it may make several
    calls. ``former``: whether the answer has its call as OpenAI's deprecated ``function_call``."""

    tools: tuple[Json, ...]
    params: tuple[str, ...]
    choice: Literal["auto", "required", "named"] = "auto"
    parallel: bool = True
    former: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody:
    """A chat completion request.

    ``tools``: the tools that the chat template is given. ``tool_use``: None if the answer must not call any.
    ``documents``: texts to answer from, for templates that know them. ``include_reasoning``: whether reasoning is
    returned. ``max_reasoning_tokens``: its maximum length, None if it is not limited; ``max_reasoning_param``: the path
    of the field that says so, for error messages."""

    options: Options
    messages: list[Json]
    tools: list[Json] | None
    template_kwargs: Json
    add_generation_prompt: bool
    continue_final_message: bool
    tool_use: ToolUse | None = None
    documents: list[Json] | None = None
    include_reasoning: bool = True
    max_reasoning_tokens: int | None = None
    max_reasoning_param: str = "max_reasoning_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBody:
    """A text completion request; each prompt is text or token ids."""

    options: Options
    prompts: list[str | list[int]]
    echo: bool
