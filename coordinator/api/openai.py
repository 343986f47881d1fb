"""Request bodies of the OpenAI endpoints: validates every field and converts JSON to frozen dataclasses.

Owns the limits, the defaults that do not depend on the model, and the error messages. Checks that depend on the model
(vocabulary, sampling defaults, context length) are in :mod:`coordinator.api.sampling`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import msgspec

from common.core.ids import pack_tokens
from common.core.request import MAX_ALLOWED_IDS, MAX_CHOICES, MAX_LOGPROBS, MAX_TOKENS
from coordinator.api.chat_messages import parse_messages
from coordinator.api.fields import INT64, Fields, JsonBudget, checked_integer, checked_number, refuse, wrong_type
from coordinator.api.reasoning import parse_bound, parse_thinking, template_variables
from coordinator.api.structured import parse_constraint
from coordinator.api.tools import parse_functions, parse_tools
from coordinator.api.unsupported import naming_ignored, refuse_unsupported
from coordinator.requests.spec import ChatBody, CompletionBody, Json, Options, Sampling

MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of text completions."""
MAX_DOCUMENTS = 1024
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100
"""vLLM accepts any value above 0. Outside of these bounds logits overflow float32 before the penalty is useful."""
MAX_TOKEN_ID = (1 << 32) - 1
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]


# -- chat -----------------------------------------------------------------------------------------------------------


def parse_chat(
    body: Json,
    budget: JsonBudget | None = None,
    check_chars: Callable[[int, str], None] | None = None,
    *,
    arguments_as_text: bool = False,
) -> ChatBody:
    """Parse the body of POST /v1/chat/completions. ``budget``, ``check_chars`` and ``arguments_as_text`` are passed to
    :func:`parse_messages`. Raises RequestError."""
    fields = Fields(body)
    refuse_unsupported(fields, "chat")
    if fields.boolean("add_special_tokens", False):
        refuse(
            "'add_special_tokens' is not supported for chats: the template writes them.",
            "add_special_tokens",
            "unsupported",
        )
    wants = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wants:
        refuse("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    longer = fields.tokens("max_completion_tokens", 1)
    limit = fields.tokens("max_tokens", 1)
    options = _options(fields, (top or 0) if wants else None, longer if fields.has("max_completion_tokens") else limit)
    thinking = parse_thinking(fields)
    bound = parse_bound(fields, thinking.bound)
    messages = parse_messages(fields, budget or JsonBudget(), check_chars, arguments_as_text=arguments_as_text)
    tools = parse_functions(fields) or parse_tools(fields)
    effort = fields.string("reasoning_effort", limit=64)
    template_kwargs = template_variables(fields.mapping("chat_template_kwargs"), effort, thinking.variables)
    documents = _documents(fields)
    generation = fields.boolean("add_generation_prompt", True)
    continues = fields.boolean("continue_final_message", False)
    if continues:
        if generation and fields.has("add_generation_prompt"):
            refuse("'continue_final_message' and 'add_generation_prompt' exclude each other.", "continue_final_message")
        if messages[-1]["role"] != "assistant":
            refuse("'continue_final_message' needs an assistant message at the end.", "continue_final_message")
    chat = ChatBody(
        options=options,
        messages=messages,
        tools=tools.prompt,
        template_kwargs=template_kwargs,
        add_generation_prompt=generation and not continues,
        continue_final_message=continues,
        tool_use=tools.use,
        documents=documents,
        include_reasoning=fields.boolean("include_reasoning", True),
        max_reasoning_tokens=bound.tokens,
        max_reasoning_param=bound.param,
    )
    return naming_ignored(chat, fields, *thinking.ignored)


def _documents(fields: Fields) -> list[Json] | None:
    documents: list[Json] = []
    for index, entry in enumerate(fields.array("documents", MAX_DOCUMENTS) or ()):
        if not isinstance(entry, dict):
            wrong_type(f"documents[{index}]", "an object", entry)
        documents.append(entry)
    return documents or None


# -- text completions ------------------------------------------------------------------------------------------------


def parse_completion(body: Json, context_length: int = MAX_TOKENS) -> CompletionBody:
    """Parse the body of POST /v1/completions. Raises RequestError, also for a prompt of more token ids than
    ``context_length`` that is not truncated."""
    fields = Fields(body)
    refuse_unsupported(fields, "text")
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    longer = fields.tokens("max_completion_tokens", 0)
    limit = fields.tokens("max_tokens", 0)
    limit = longer if fields.has("max_completion_tokens") else limit
    unlimited = fields.has("max_tokens") or fields.has("max_completion_tokens")
    default = None if unlimited else DEFAULT_COMPLETION_TOKENS
    echo = fields.boolean("echo", False)
    options = _options(fields, logprobs, limit, default, echoed=logprobs if echo else None)
    best_of = fields.integer("best_of", 1, 1 << 16)
    if best_of is not None and best_of > options.n:
        refuse("'best_of' above 'n' is not supported; ask for n choices and pick among them.", "best_of", "unsupported")
    truncates = options.truncate_prompt is not None
    prompts = _prompts(fields, MAX_TOKENS if truncates else context_length)
    return naming_ignored(CompletionBody(options=options, prompts=prompts, echo=echo), fields)


def _prompts(fields: Fields, context_length: int) -> list[str | list[int]]:
    value = fields.raw("prompt")
    if value is None:
        fields.missing("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        wrong_type("prompt", "a string, an array of strings, or arrays of token ids", value)
    if not value:
        refuse("'prompt' is an empty array.", "prompt")
    if isinstance(value[0], int | float) and not isinstance(value[0], bool):
        return [token_ids(value, "prompt", context_length)]
    if len(value) > MAX_PROMPTS:
        refuse(f"'prompt' has {len(value)} prompts, at most {MAX_PROMPTS} are allowed.", "prompt")
    prompts: list[str | list[int]] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list):
            prompts.append(token_ids(item, f"prompt[{index}]", context_length))
        else:
            wrong_type(f"prompt[{index}]", "a string or an array of token ids", item)
    return prompts


def token_ids(value: list[object], param: str, limit: int) -> list[int]:
    """Return ``value`` as token ids, at least one and at most ``limit``; RequestError otherwise. The vocabulary size is
    checked by :mod:`coordinator.api.sampling`."""
    if not value:
        refuse(f"{param!r} is empty: it needs at least one token.", param)
    if len(value) > limit:
        text = f"{param!r} has {len(value)} tokens, but this model's maximum context length is {limit} tokens."
        refuse(text, param, "context_length_exceeded")
    try:
        return msgspec.convert(value, _TokenIds)
    except msgspec.ValidationError:  # the slow path accepts 3.0, and its error names the entry
        return [checked_integer(item, f"{param}[{index}]", 0, MAX_TOKEN_ID) for index, item in enumerate(value)]


# -- fields of both endpoints -----------------------------------------------------------------------------------------


def _options(
    fields: Fields, logprobs: int | None, limit: int | None, default: int | None = None, *, echoed: int | None = None
) -> Options:
    """Parse the common fields. ``default``: :attr:`Sampling.default_tokens`. ``echoed``: most likely tokens per prompt
    token that ``echo`` shows, None for none."""
    fields.skip("user")
    keep = fields.tokens("truncate_prompt_tokens", 1)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    sampling = parse_sampling(fields, logprobs, limit, default)
    to_report = [each for each in (prompt_logprobs, echoed) if each is not None]
    stream = fields.boolean("stream", False)
    extra = fields.nested("stream_options")
    if extra is not None and not stream:
        refuse("'stream_options' is only allowed with 'stream': true.", "stream_options")
    usage = extra is not None and extra.boolean("include_usage", False)
    continuous = extra is not None and extra.boolean("continuous_usage_stats", False)
    return Options(
        model=fields.string("model", limit=1024),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        sampling=replace(sampling, prompt_logprobs=max(to_report, default=None)),
        stop=parse_stops(fields.raw("stop"), "stop"),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and continuous,
        return_token_ids=fields.boolean("return_token_ids", False),
        return_metrics=fields.boolean("return_metrics", False),
        cache_salt=parse_cache_salt(fields),
        priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        constraint=parse_constraint(fields),
        prompt_logprobs=prompt_logprobs,
        truncate_prompt=(keep or 0) if fields.has("truncate_prompt_tokens") else None,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        tokens_as_ids=parse_tokens_as_ids(fields),
    )


def parse_sampling(fields: Fields, logprobs: int | None, limit: int | None, default: int | None = None) -> Sampling:
    """Return the sampling fields, with ``logprobs`` and ``limit``, the maximum number of output tokens, which each API
    names differently. ``default``: :attr:`Sampling.default_tokens`. Raises RequestError."""
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    top_p = fields.number("top_p", 0, 1)
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    most = default if limit is None else limit
    if most is not None and min_tokens > most:
        refuse(f"'min_tokens' ({min_tokens}) is above 'max_tokens' ({most}).", "min_tokens")
    return Sampling(
        temperature=fields.number("temperature", 0, 2),
        top_p=None if top_p is None else max(top_p, 1e-9),  # 0 means greedy: only the most likely token
        top_k=None if top_k is None else max(top_k, 0),
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(fields),
        min_tokens=min_tokens,
        max_tokens=limit,
        default_tokens=default if limit is None else None,
        seed=fields.integer("seed", -INT64, INT64 - 1),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos", False),
        logprobs=logprobs,
        allowed_token_ids=_allowed_token_ids(fields),
        bad_words=_bad_words(fields),
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.mapping("logit_bias", MAX_BIASES) or {}).items():
        param = f"logit_bias.{key[:32]}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            refuse(f"Keys of 'logit_bias' are token ids, not {key[:32]!r}.", param)
        bias[int(key)] = checked_number(value, param, -100, 100)
    return bias


def parse_stops(value: object, name: str) -> tuple[str, ...]:
    """Return the stop strings in ``value`` of the field ``name``: one string or an array of them. Raises
    RequestError."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        wrong_type(name, "a string or an array of strings", value)
    if len(items) > MAX_STOPS:
        refuse(f"{name!r} has {len(items)} entries, at most {MAX_STOPS} are allowed.", name)
    stops: list[str] = []
    for index, item in enumerate(items):
        param = name if isinstance(value, str) else f"{name}[{index}]"
        if not isinstance(item, str):
            wrong_type(param, "a string", item)
        if not 0 < len(item) <= MAX_STOP_CHARS:
            refuse(f"{param!r} must have between 1 and {MAX_STOP_CHARS} characters.", param)
        stops.append(item)
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    items = fields.array("stop_token_ids", MAX_STOP_IDS) or []
    return tuple(checked_integer(item, f"stop_token_ids[{at}]", 0, MAX_TOKEN_ID) for at, item in enumerate(items))


def _allowed_token_ids(fields: Fields) -> bytes:
    if not fields.has("allowed_token_ids"):
        return b""
    given = fields.array("allowed_token_ids", MAX_ALLOWED_IDS) or []
    return pack_tokens(sorted(set(token_ids(given, "allowed_token_ids", MAX_ALLOWED_IDS))))


def _bad_words(fields: Fields) -> tuple[str, ...]:
    words: list[str] = []
    for index, word in enumerate(fields.array("bad_words", MAX_BAD_WORDS) or ()):
        param = f"bad_words[{index}]"
        if not isinstance(word, str):
            wrong_type(param, "a string", word)
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            refuse(f"{param!r} must have between 1 and {MAX_BAD_WORD_CHARS} characters, not only white space.", param)
        words.append(word)
    return tuple(words)


def parse_tokens_as_ids(fields: Fields) -> bool | None:
    """Return the field ``return_tokens_as_token_ids``, None if absent. Raises RequestError."""
    given = fields.has("return_tokens_as_token_ids")
    return fields.boolean("return_tokens_as_token_ids", False) if given else None


def parse_cache_salt(fields: Fields) -> str:
    """Return the field ``cache_salt``, "" if absent. Raises RequestError."""
    salt = fields.string("cache_salt", limit=1024)
    if salt == "":
        refuse("'cache_salt' must not be empty.", "cache_salt")
    return salt or ""
