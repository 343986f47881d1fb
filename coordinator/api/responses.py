"""Request bodies of OpenAI's Responses API: validates every field and converts JSON to the types of a chat request.

The API is served without state: nothing is stored, so a request brings its whole conversation as ``input``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from common.core.request import MAX_LOGPROBS, MAX_TOKENS
from coordinator.api.chat_messages import Arguments
from coordinator.api.delta_encoder import encode
from coordinator.api.fields import Fields, JsonBudget, refuse, wrong_type
from coordinator.api.openai import parse_stops
from coordinator.api.reasoning import Thinking, parse_bound, parse_thinking, template_variables
from coordinator.api.responses_items import read_items
from coordinator.api.single_answer import agreed, parse_options, refuse_present
from coordinator.api.structured import format_constraint
from coordinator.api.tools import parse_tools
from coordinator.api.unsupported import naming_ignored
from coordinator.requests.spec import ChatBody, Constraint, Json

SUMMARIES = ("auto", "concise", "detailed")
MAX_INCLUDES = 64
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_CHARS = 64, 512
_NOTHING_STORED = "this server stores no responses: send the whole conversation as 'input'."
UNSUPPORTED = {
    "previous_response_id": f"'previous_response_id' is not supported, because {_NOTHING_STORED}",
    "conversation": f"'conversation' is not supported, because {_NOTHING_STORED}",
    "background": "'background' is not supported, because this server stores no responses: wait for the answer.",
}
"""Fields that are refused, with the text that says why."""
LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log-probabilities."""
INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Other values of ``include``: they ask for what an answer of this server never has. They are ignored by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody:
    """A request of the Responses API. ``echo``: the members of the answer that repeat the request, encoded.
    ``summary``: whether reasoning is returned as its summary."""

    chat: ChatBody
    echo: dict[str, msgspec.Raw]
    summary: bool


def parse_responses(
    body: Json,
    budget: JsonBudget | None = None,
    check_chars: Callable[[int, str], None] | None = None,
    *,
    arguments_as_text: bool = False,
) -> ResponsesBody:
    """Parse the body of POST /v1/responses. ``budget`` counts the JSON values in the arguments of calls, which are
    given to the template as text if ``arguments_as_text`` is set. ``check_chars`` raises if that many characters cannot
    fit the context. Raises RequestError."""
    fields = Fields(body)
    refuse_present(fields, "responses", UNSUPPORTED.items())
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        refuse(
            "'truncation' must be disabled: a conversation that is too long is refused.", "truncation", "unsupported"
        )
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    fields.boolean("store", False)
    fields.skip("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention")
    limit = _limit(fields)
    constraint, verbosity = _text(fields)
    without_effect, wants = _includes(fields)
    logprobs = top if wants or top else None
    options = parse_options(fields, limit, parse_stops(fields.raw("stop"), "stop"), constraint, logprobs)
    _stream_options(fields, options.stream)
    without_effect += verbosity
    thinking = parse_thinking(fields)
    kwargs, summary = _reasoning_fields(fields, thinking, without_effect)
    bound = parse_bound(fields, thinking.bound)
    messages = read_items(fields, Arguments(budget or JsonBudget(), arguments_as_text), check_chars)
    tools = parse_tools(fields)
    echo = _echo(fields, check_chars)
    chat = ChatBody(
        options=options,
        messages=messages,
        tools=tools.prompt,
        template_kwargs=kwargs,
        add_generation_prompt=True,
        continue_final_message=False,
        tool_use=tools.use,
        include_reasoning=fields.boolean("include_reasoning", True),
        max_reasoning_tokens=bound.tokens,
        max_reasoning_param=bound.param,
    )
    return ResponsesBody(chat=naming_ignored(chat, fields, *without_effect), echo=echo, summary=summary)


def _limit(fields: Fields) -> int | None:
    """Return the longest output in tokens, under one of the names that OpenAI's APIs have for it."""
    limit = fields.integer("max_output_tokens", 1, MAX_TOKENS)
    for name, other in (
        ("max_completion_tokens", fields.tokens("max_completion_tokens", 1)),
        ("max_tokens", fields.tokens("max_tokens", 1)),
    ):
        limit = agreed(fields, "max_output_tokens", limit, name, other)
    return limit


def _text(fields: Fields) -> tuple[Constraint | None, list[str]]:
    """Return the constraint in ``text.format``, and the names of members of ``text`` that have no effect."""
    text = fields.nested("text")
    if text is None:
        return None, []
    form = text.nested("format")
    constraint = None if form is None else format_constraint(form)
    return constraint, [f"text.{name}" for name in text.ignored()]


def _stream_options(fields: Fields, stream: bool) -> None:
    options = fields.nested("stream_options")
    if options is None:
        return
    if not stream:
        refuse("'stream_options' is only allowed with 'stream': true.", "stream_options")
    options.boolean("include_obfuscation", False)


def _includes(fields: Fields) -> tuple[list[str], bool]:
    """Return the values of ``include`` that have no effect, and whether it asks for log-probabilities."""
    ignored, logprobs = [], False
    for index, value in enumerate(fields.array("include", MAX_INCLUDES) or ()):
        at = f"include[{index}]"
        if not isinstance(value, str):
            wrong_type(at, "a string", value)
        if value == LOGPROBS:
            logprobs = True
        elif value in INCLUDES:
            ignored.append(f"include.{value}")
        else:
            refuse(f"'include' has the unknown value {value[:64]!r}.", at)
    return ignored, logprobs


def _reasoning_fields(fields: Fields, thinking: Thinking, ignored: list[str]) -> tuple[Json, bool]:
    """Return the variables of the template, and whether reasoning is returned as its summary. Adds to ``ignored`` the
    members of ``reasoning`` and ``thinking`` that have no effect.

    No summary is written: the whole reasoning takes its place, so a concise one is named as ignored."""
    reasoning = fields.nested("reasoning")
    effort, summary = None, None
    if reasoning is not None:
        effort = reasoning.string("effort", limit=64)
        older = reasoning.choice("generate_summary", SUMMARIES)
        summary = reasoning.choice("summary", SUMMARIES) or older
        if reasoning.has("max_tokens"):
            at = reasoning.at("max_tokens")
            refuse(f"{at!r} is not supported: use 'max_reasoning_tokens'.", at, "unsupported")
        ignored += [f"reasoning.{name}" for name in reasoning.ignored()]
        ignored += ["reasoning.summary"] * (summary == "concise")
    ignored += thinking.ignored
    other = fields.string("reasoning_effort", limit=64)
    effort = agreed(fields, "reasoning.effort", effort, "reasoning_effort", other)
    given = fields.mapping("chat_template_kwargs")
    return template_variables(given, effort, thinking.variables), summary is not None


def _echo(fields: Fields, check_chars: Callable[[int, str], None] | None) -> dict[str, msgspec.Raw]:
    """Return the members of the answer that repeat the request. Raises RequestError if they are longer than the
    context, because an answer repeats them several times."""
    tools = fields.raw("tools")
    text = fields.raw("text")
    reasoning = fields.raw("reasoning")
    shown: Json = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "metadata": _metadata(fields),
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "prompt_cache_key": fields.string("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **(reasoning if isinstance(reasoning, dict) else {})},
        "safety_identifier": fields.string("safety_identifier"),
        "text": {"format": {"type": "text"}, **(text if isinstance(text, dict) else {})},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "top_logprobs": fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0,
        "tools": [_flat(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else [],
        "user": fields.string("user"),
    }
    echo = {name: encode(value) for name, value in shown.items()}
    if check_chars is not None:
        check_chars(len(echo["tools"]) + len(echo["text"]) + len(echo["reasoning"]) + len(echo["tool_choice"]), "tools")
    return {name: msgspec.Raw(value) for name, value in echo.items()}


def _flat(tool: Json) -> Json:
    """Return a valid tool in the form of the Responses API."""
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    known = {name: inner.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", **known, "strict": bool(inner.get("strict"))}


def _metadata(fields: Fields) -> Json:
    metadata = fields.mapping("metadata", MAX_METADATA) or {}
    for name, value in metadata.items():
        at = f"metadata.{name[:MAX_METADATA_KEY]}"
        if not isinstance(value, str):
            wrong_type(at, "a string", value)
        if len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_CHARS:
            refuse(f"Keys of 'metadata' have at most {MAX_METADATA_KEY} characters, values {MAX_METADATA_CHARS}.", at)
    return metadata
