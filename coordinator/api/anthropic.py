"""Request bodies of Anthropic's Messages API: validates every field and converts JSON to a chat request."""

from __future__ import annotations

from common.core.request import MAX_TOKENS
from coordinator.api.anthropic_content import read_messages
from coordinator.api.chat_messages import Arguments
from coordinator.api.fields import Fields, JsonBudget, refuse, wrong_type
from coordinator.api.openai import parse_stops
from coordinator.api.reasoning import KINDS, Bound, parse_bound, template_variables
from coordinator.api.single_answer import agreed, parse_options, refuse_present
from coordinator.api.structured import format_constraint
from coordinator.api.tools import MAX_TOOLS, OfferedTools, tool_name
from coordinator.api.unsupported import naming_ignored
from coordinator.requests.spec import ChatBody, Constraint, Json, ToolUse

OMITTED = "omitted"
"""The value of ``thinking.display`` with which thinking blocks have only a signature."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
UNSUPPORTED = {
    "container": "Containers are not supported: this server runs no code.",
    "thread": "Threads are not supported, because this server stores no messages: send the whole conversation.",
    "mcp_servers": "'mcp_servers' is not supported: this server opens no outbound connection.",
}
"""Fields that are refused, with the text that says why."""


def parse_messages(
    body: Json, budget: JsonBudget | None = None, *, arguments_as_text: bool = False, counting: bool = False
) -> ChatBody:
    """Parse the body of POST /v1/messages. ``counting``: it is one of POST /v1/messages/count_tokens, which needs no
    ``max_tokens``. ``arguments_as_text``: whether the chat template gets the input of earlier calls as text. Raises
    RequestError."""
    fields = Fields(body)
    refuse_present(fields, "messages", UNSUPPORTED.items())
    fields.skip("metadata", "service_tier")
    limit = fields.integer("max_tokens", 1, MAX_TOKENS)
    if limit is None and not counting:
        fields.missing("max_tokens")
    if not fields.has("model"):
        fields.missing("model")
    constraint, effort = _output_config(fields)
    stops = parse_stops(fields.raw("stop_sequences"), "stop_sequences") or None
    stops = agreed(fields, "stop_sequences", stops, "stop", parse_stops(fields.raw("stop"), "stop") or None)
    options = parse_options(fields, limit, stops or (), constraint)
    variables, shown, bound = _thinking(fields, limit)
    bound = parse_bound(fields, bound)
    shown = fields.boolean("include_reasoning", True) and shown
    variables = {**variables, **template_variables(fields.mapping("chat_template_kwargs"), effort)}
    messages = read_messages(fields, Arguments(budget or JsonBudget(), arguments_as_text))
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        refuse("The tool_use blocks at the end of 'messages' have no tool_result blocks.", "messages")
    tools = _offered(fields)
    chat = ChatBody(
        options=options,
        messages=messages,
        tools=tools.prompt,
        template_kwargs=variables,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tool_use=tools.use,
        include_reasoning=shown,
        max_reasoning_tokens=bound.tokens,
        max_reasoning_param=bound.param,
    )
    return naming_ignored(chat, fields)


def _output_config(fields: Fields) -> tuple[Constraint | None, str | None]:
    """Return the constraint in ``output_config.format`` or its older name ``output_format``, and the effort."""
    config = fields.nested("output_config")
    form, effort = fields.nested("output_format"), None
    if config is not None:
        effort = config.choice("effort", EFFORTS)
        if form is not None and config.has("format"):
            refuse("'output_format' and 'output_config.format' exclude each other.", "output_format")
        form = config.nested("format") or form
    if form is not None:
        form.choice("type", ("json_schema",))
    other = fields.string("reasoning_effort", limit=64)
    effort = agreed(fields, "output_config.effort", effort, "reasoning_effort", other)
    return None if form is None else format_constraint(form), effort


def _thinking(fields: Fields, limit: int | None) -> tuple[Json, bool, Bound]:
    """Return variables of the template, whether the answer shows reasoning, and the bound on it.

    Without ``thinking`` these variables turn reasoning off, and the answer shows none: clients that did not request
    thinking expect an answer to begin with its text."""
    thinking = fields.nested("thinking")
    kind = "disabled"
    if thinking is not None:
        kind = thinking.choice("type", KINDS) or thinking.missing("type")
    if thinking is None or kind == "disabled":
        return {"enable_thinking": False, "thinking": False}, False, Bound()
    most = thinking.integer("budget_tokens", 1, MAX_TOKENS)
    if kind == "enabled" and most is None:
        thinking.missing("budget_tokens")
    if most is not None and limit is not None and most >= limit:
        text = f"'max_tokens' ({limit}) must be greater than 'thinking.budget_tokens' ({most})."
        refuse(text, "thinking.budget_tokens")
    thinking.choice("display", ("summarized", OMITTED))
    return {"enable_thinking": True, "thinking": True}, True, Bound(most, "thinking.budget_tokens")


def omits_thinking(body: Json) -> bool:
    """Return whether thinking blocks of the answer to the valid ``body`` are empty."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("display") == OMITTED


# -- tools ------------------------------------------------------------------------------------------------------------


def _offered(fields: Fields) -> OfferedTools:
    """Return the tools of a request. Raises RequestError for an invalid tool, two tools of one name, or a
    ``tool_choice`` that the tools cannot satisfy."""
    tools: dict[str, tuple[Json, str]] = {}
    for index, entry in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        at = f"tools[{index}]"
        if not isinstance(entry, dict):
            wrong_type(at, "an object", entry)
        tool = _tool(Fields(entry, at))
        name = str(tool["name"])
        if name in tools:
            refuse(f"Two tools have the name {name[:64]!r}.", f"{at}.name")
        tools[name] = tool, f"{at}.input_schema"
    return _chosen(fields.nested("tool_choice"), tools, fields.boolean("parallel_tool_calls", True))


def _tool(tool: Fields) -> Json:
    """Return a tool as the function in OpenAI's nested form."""
    kind = tool.string("type")
    if kind not in (None, "custom", "function"):
        refuse(
            f"Tools of type {kind[:64]!r} are not supported: this server calls functions of clients only.",
            tool.at("type"),
            "unsupported",
        )
    function: Json = {"name": tool_name(tool)}
    if (description := tool.string("description", limit=1 << 26)) is not None:
        function["description"] = description
    schema = tool.mapping("input_schema")
    function["parameters"] = schema if schema is not None else tool.missing("input_schema")
    if tool.boolean("strict", False):
        function["strict"] = True
    return function


def _chosen(choice: Fields | None, tools: dict[str, tuple[Json, str]], parallel: bool) -> OfferedTools:
    """Return the tools that the answer may or must call. ``parallel``: whether it may make several calls, unless
    ``choice`` forbids them."""
    kind = "auto"
    if choice is not None:
        kind = choice.choice("type", ("auto", "any", "tool", "none")) or choice.missing("type")
        parallel = not choice.boolean("disable_parallel_tool_use", False) and parallel
    if kind in ("any", "tool") and not tools:
        refuse("'tool_choice' can only require a call if 'tools' has tools.", "tool_choice")
    if kind == "none" or not tools:
        return OfferedTools(None, None)
    chosen = tools
    if kind == "tool":
        assert choice is not None
        name = choice.string("name") or choice.missing("name")
        if name not in tools:
            refuse(f"No tool has the name {name[:64]!r}.", "tool_choice.name")
        chosen = {name: tools[name]}
    use = ToolUse(
        tools=tuple({"type": "function", "function": function} for function, _ in chosen.values()),
        params=tuple(path for _, path in chosen.values()),
        choice="required" if kind == "any" else "named" if kind == "tool" else "auto",
        parallel=parallel,
    )
    return OfferedTools([_for_template(function) for function, _ in chosen.values()], use)


def _for_template(function: Json) -> Json:
    """Return a tool for the chat template, without ``strict``, which is meant for the server."""
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "strict"}}
