"""Validates the fields of a chat request with which an answer may call functions.

Owns ``tools``, ``tool_choice`` and ``parallel_tool_calls``, each in OpenAI's nested form and in the flat form of the
Responses API, which some clients also send to chat completions, and the deprecated ``functions`` and ``function_call``.
Must not know how a model spells a call.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, NamedTuple, NoReturn

from coordinator.api.fields import Fields, refuse, wrong_type
from coordinator.requests.spec import Json, ToolUse

MAX_TOOLS = 1024
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")
"""Names of tools. OpenAI allows letters, digits, - and _; the Model Context Protocol also . and /, and 128 characters;
gateways put : between a server's name and that of its tool."""
FORMER = ("functions", "function_call")
"""Deprecated fields of chat completions, for one call at most."""
_OTHER_KINDS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Beginnings of the names of OpenAI's kinds of tools that this server cannot offer."""


class OfferedTools(NamedTuple):
    """``prompt``: the tools for the chat template, None if it gets none. ``use``: None if the answer must not call
    any."""

    prompt: list[Json] | None
    use: ToolUse | None


class _Tool(NamedTuple):
    """A tool in its nested form, and the path of its parameters in the request."""

    json: Json
    params: str


_Tools = dict[str, _Tool]
"""Tools by name."""


def parse_tools(fields: Fields) -> OfferedTools:
    """Return the tools of a chat request. Raises RequestError for an invalid tool, two tools of one name, or a
    ``tool_choice`` that the tools cannot satisfy.

    The template gets no tools with ``tool_choice`` none, and only the allowed ones with ``allowed_tools``, so that a
    model is never offered a function that it must not call."""
    tools = _tools(fields)
    parallel = fields.boolean("parallel_tool_calls", True)
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        return _object_choice(Fields(choice, "tool_choice"), tools, parallel)
    if choice not in (None, "auto", "none", "required"):
        refuse("'tool_choice' must be one of none, auto, required, or an object.", "tool_choice")
    if choice == "required":
        _check_there_are(tools)
        return _offer(tools, _use(tools, "required", parallel))
    if choice == "none" or not tools:
        return OfferedTools(None, None)
    return _offer(tools, _use(tools, "auto", parallel))


def _use(tools: _Tools, choice: Literal["auto", "required", "named"], parallel: bool) -> ToolUse:
    """Return the use of all ``tools``."""
    every = tools.values()
    return ToolUse(
        tools=tuple(tool.json for tool in every),
        params=tuple(tool.params for tool in every),
        choice=choice,
        parallel=parallel,
    )


def _offer(tools: _Tools, use: ToolUse) -> OfferedTools:
    """Return ``tools`` for the template, without ``strict``, which is meant for the server."""
    return OfferedTools([_without_strict(tool.json) for tool in tools.values()], use)


def _without_strict(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict)
    if "strict" not in function:
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}


def parse_functions(fields: Fields) -> OfferedTools | None:
    """Return the functions of a chat request in the deprecated fields FORMER as tools, None if it has neither field.
    Raises RequestError as :func:`parse_tools` does, and if the request has fields of both forms."""
    if not any(map(fields.has, FORMER)):
        return None
    for name in ("tools", "tool_choice"):
        if fields.has(name):
            refuse(f"{name!r} and its older form ('functions', 'function_call') exclude each other.", name)
    fields.boolean("parallel_tool_calls", True)  # there is one call at most
    tools: _Tools = {}
    for index, entry in enumerate(fields.array("functions", MAX_TOOLS) or ()):
        at = f"functions[{index}]"
        if not isinstance(entry, dict):
            wrong_type(at, "an object", entry)
        function = Fields(entry, at)
        name = _function_name(function)
        if name in tools:
            refuse(f"Two functions have the name {name[:64]!r}.", f"{at}.name")
        inner = {key: value for key, value in entry.items() if value is not None}
        tools[name] = _Tool({"type": "function", "function": inner}, function.at("parameters"))
    choice = fields.raw("function_call")
    if isinstance(choice, dict):
        named = Fields(choice, "function_call")
        name = named.string("name") or named.missing("name")
        if name not in tools:
            refuse(f"'functions' has no function of the name {name[:64]!r}.", "function_call.name")
        return _offer(tools, replace(_use({name: tools[name]}, "named", False), former=True))
    if choice not in (None, "auto", "none"):
        refuse("'function_call' must be one of none, auto, or an object with a name.", "function_call")
    if choice == "none" or not tools:
        return OfferedTools(None, None)
    return _offer(tools, replace(_use(tools, "auto", False), former=True))


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(fields: Fields) -> _Tools:
    tools: _Tools = {}
    for index, entry in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        at = f"tools[{index}]"
        name, tool = _tool(entry, at)
        if name in tools:
            refuse(f"Two tools have the name {name[:64]!r}.", f"{at}.function.name")
        tools[name] = tool
    return tools


def _tool(entry: object, at: str) -> tuple[str, _Tool]:
    """Return the name and the tool of one element of ``tools``."""
    if not isinstance(entry, dict):
        wrong_type(at, "an object", entry)
    tool = Fields(entry, at)
    kind = tool.string("type")
    if kind != "function":
        _refuse_kind(kind, "function", f"{at}.type")
    flat = not tool.has("function") and tool.has("name")
    function = tool if flat else tool.nested("function") or tool.missing("function")
    name = _function_name(function)
    nested = entry
    if flat or None in function.values.values():
        inner = {
            key: value for key, value in function.values.items() if value is not None and not (flat and key == "type")
        }
        nested = {"type": "function", "function": inner} if flat else {**entry, "function": inner}
    return name, _Tool(nested, function.at("parameters"))


def tool_name(tool: Fields) -> str:
    """Return the field ``name`` of a tool. Raises RequestError unless it is one that every notation of calls can
    carry."""
    name = tool.string("name") or tool.missing("name")
    if TOOL_NAME.fullmatch(name) is None:
        refuse(f"{tool.at('name')!r} must have 1 to 128 letters of ASCII, digits, or - _ . : /.", tool.at("name"))
    return name


def _function_name(function: Fields) -> str:
    """Return the name of a function after checking its other members."""
    name = tool_name(function)
    function.string("description", limit=1 << 26)
    function.mapping("parameters")
    function.boolean("strict", False)
    return name


def _refuse_kind(kind: str | None, allowed: str, at: str) -> NoReturn:
    if kind is not None and kind.startswith(_OTHER_KINDS):
        refuse(
            f"Tools of type {kind[:64]!r} are not supported: this server calls functions of clients only.",
            at,
            "unsupported",
        )
    refuse(f"{at!r} must be {allowed}.", at)


# -- tool_choice ------------------------------------------------------------------------------------------------------


def _check_there_are(tools: _Tools) -> None:
    if not tools:
        refuse("'tool_choice' can only require a call if 'tools' has functions.", "tool_choice")


def _object_choice(choice: Fields, tools: _Tools, parallel: bool) -> OfferedTools:
    kind = choice.string("type")
    if kind == "function":
        name = _named(choice, tools)
        return _offer(tools, _use({name: tools[name]}, "named", parallel))
    if kind != "allowed_tools":
        _refuse_kind(kind, "function or allowed_tools", "tool_choice.type")
    return _allowed(choice.nested("allowed_tools") or choice, tools, parallel)


def _allowed(allowed: Fields, tools: _Tools, parallel: bool) -> OfferedTools:
    """Return the choice among some of ``tools``: those listed in the field ``tools`` of ``allowed``."""
    mode = allowed.choice("mode", ("auto", "required")) or allowed.missing("mode")
    entries = allowed.array("tools", MAX_TOOLS)
    if not entries:
        allowed.missing("tools")
    chosen: _Tools = {}
    for index, entry in enumerate(entries):
        at = f"{allowed.at('tools')}[{index}]"
        if not isinstance(entry, dict):
            wrong_type(at, "an object", entry)
        tool = Fields(entry, at)
        tool.choice("type", ("function",))
        name = _named(tool, tools)
        chosen[name] = tools[name]
    return _offer(chosen, _use(chosen, "required" if mode == "required" else "auto", parallel))


def _named(reference: Fields, tools: _Tools) -> str:
    """Return the function name in ``reference``, in either form. Raises RequestError if no tool has it."""
    function = reference if reference.has("name") else reference.nested("function") or reference.missing("function")
    name = function.string("name") or function.missing("name")
    _check_there_are(tools)
    if name not in tools:
        refuse(f"No tool has the name {name[:64]!r}.", function.at("name"))
    return name
