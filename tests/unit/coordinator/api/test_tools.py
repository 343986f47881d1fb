"""Tools of chat requests: which are accepted, in which form the template gets them, and how others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.fields import Fields, parse_json
from coordinator.api.openai import parse_chat
from coordinator.api.tools import parse_functions, parse_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Get it", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


def offered(**fields: Any) -> Any:
    return parse_tools(Fields(parse_json(json.dumps(fields).encode())))


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        offered(**fields)
    assert caught.value.status == 400 and caught.value.message
    return caught.value


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_tools_are_optional() -> None:
    for fields in ({}, {"tools": []}, {"tools": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert offered(**fields) == (None, None)


def test_choices_by_word() -> None:
    prompt, use = offered(tools=TOOLS)
    assert prompt == TOOLS and use.choice == "auto" and list(use.tools) == TOOLS and use.parallel
    assert use.params == ("tools[0].function.parameters", "tools[1].function.parameters")
    assert offered(tools=TOOLS, tool_choice="auto") == (prompt, use)
    assert offered(tools=TOOLS, tool_choice="none") == (None, None)
    prompt, use = offered(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert prompt == TOOLS and use.choice == "required" and not use.parallel


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "clock"}}, {"type": "function", "name": "clock"}]
)
def test_a_named_tool_is_the_only_callable_one_and_all_are_offered(choice: dict[str, Any]) -> None:
    prompt, use = offered(tools=TOOLS, tool_choice=choice)
    assert prompt == TOOLS and use.choice == "named" and names(use.tools) == ["clock"]


@pytest.mark.parametrize(
    "reference", [{"type": "function", "function": {"name": "clock"}}, {"type": "function", "name": "clock"}]
)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(reference: dict[str, Any], nested: bool, mode: str) -> None:
    allowed = {"mode": mode, "tools": [reference]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed} if nested else {"type": "allowed_tools", **allowed}
    prompt, use = offered(tools=TOOLS, tool_choice=choice)
    assert names(prompt) == names(use.tools) == ["clock"] and use.choice == mode


def test_the_flat_form_becomes_the_nested_one() -> None:
    flat = {"type": "function", "name": "weather", "description": "Get it", "parameters": SCHEMA, "strict": None}
    prompt, use = offered(tools=[flat])
    assert prompt == [WEATHER] and use.params == ("tools[0].parameters",)


def test_strict_is_for_the_server_and_not_for_the_template() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True, "description": None}}
    prompt, use = offered(tools=[strict])
    assert use.tools[0]["function"]["strict"] is True
    assert prompt[0]["function"] == {"name": "weather", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": ["x"]}, "tools[0]", "invalid_type"),
        ({"tools": [CLOCK, {"type": "magic"}]}, "tools[1].type", "invalid_value"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "name": 1}]}, "tools[0].name", "invalid_type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "invalid_type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
            "invalid_type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "invalid_type",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "invalid_value"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": []}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.type", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type", "unsupported"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "invalid_value"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "missing_required_parameter"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "never", "tools": [CLOCK]}},
            "tool_choice.mode",
            "invalid_value",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
            "missing_required_parameter",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["clock"]}},
            "tool_choice.tools[0]",
            "invalid_type",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}},
            "tool_choice.tools[0].name",
            "invalid_value",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)


# -- the deprecated form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mcp__a-B_9", "server.tool", "server/tool", "server:tool", "x" * 128])
def test_names_that_clients_give_tools(name: str) -> None:
    body = parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "name": name}]})
    assert body.tool_use is not None and body.tool_use.tools[0]["function"] == {"name": name}


@pytest.mark.parametrize(
    "name", ["", "a b", "a\n", '"a"', "a\\", "caf\N{LATIN SMALL LETTER E WITH ACUTE}", "<a>", "x" * 129]
)
def test_other_names_are_refused(name: str) -> None:
    """Not every notation of calls can carry them."""
    function = {"type": "function", "function": {"name": name}}
    with pytest.raises(RequestError) as caught:
        parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [function]})
    assert (caught.value.status, caught.value.param) == (400, "tools[0].function.name")


FUNCTION = {"name": "weather", "description": "Get it", "parameters": SCHEMA}


def former(**fields: Any) -> Any:
    return parse_functions(Fields(fields))


def test_functions_are_tools_of_which_one_may_be_called_once() -> None:
    assert former(tools=TOOLS) is None and former(functions=None, function_call=None) is None
    prompt, use = former(functions=[FUNCTION, {"name": "clock", "description": None}])
    assert prompt == list(use.tools) == TOOLS and use.former and not use.parallel and use.choice == "auto"
    assert use.params == ("functions[0].parameters", "functions[1].parameters")
    assert former(functions=[FUNCTION], function_call="auto").use.choice == "auto"
    for none in ({"functions": [FUNCTION], "function_call": "none"}, {"functions": []}, {"function_call": "auto"}):
        assert former(**none) == (None, None)
    prompt, use = former(functions=[FUNCTION, CLOCK["function"]], function_call={"name": "clock"})
    assert prompt == TOOLS and names(use.tools) == ["clock"] and use.choice == "named" and use.former
    assert not parse_chat({"messages": [{"role": "user", "content": "a"}], "functions": [FUNCTION]}).options.ignored


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"functions": {}}, "functions", "invalid_type"),
        ({"functions": ["f"]}, "functions[0]", "invalid_type"),
        ({"functions": [{}]}, "functions[0].name", "missing_required_parameter"),
        ({"functions": [{"name": "f", "parameters": "x"}]}, "functions[0].parameters", "invalid_type"),
        ({"functions": [FUNCTION, FUNCTION]}, "functions[1].name", "invalid_value"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call", "invalid_value"),
        ({"functions": [FUNCTION], "function_call": {}}, "function_call.name", "missing_required_parameter"),
        ({"functions": [FUNCTION], "function_call": {"name": "f"}}, "function_call.name", "invalid_value"),
        ({"function_call": {"name": "f"}}, "function_call.name", "invalid_value"),
        ({"functions": [FUNCTION], "tools": TOOLS}, "tools", "invalid_value"),
        ({"functions": [FUNCTION], "tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"function_call": "auto", "tools": TOOLS}, "tools", "invalid_value"),
    ],
)
def test_refusals_of_functions_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        former(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


# -- history ----------------------------------------------------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Oslo"}'}}


def history(*messages: dict[str, Any], as_text: bool = False) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": "a"}, *messages]
    return parse_chat({"messages": asked}, arguments_as_text=as_text).messages[1:]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_turn_of_calls_needs_no_content(content: dict[str, Any]) -> None:
    (turn,) = history({"role": "assistant", **content, "tool_calls": [CALL]})
    assert turn["content"] == "" and turn["tool_calls"][0]["id"] == "call_1"


def test_arguments_are_an_object_or_the_clients_own_text() -> None:
    turn = {"role": "assistant", "tool_calls": [CALL]}
    assert history(turn)[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert history(turn, as_text=True)[0]["tool_calls"][0]["function"]["arguments"] == '{"city":  "Oslo"}'
    empty = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]}
    assert history(empty, as_text=True)[0]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("as_text", [True, False])
def test_malformed_arguments_are_refused_in_both_forms(as_text: bool) -> None:
    turn = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}
    with pytest.raises(RequestError) as caught:
        history(turn, as_text=as_text)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_results_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (turn,) = history({"role": "tool", "tool_call_id": "call_1", "content": parts})
    assert turn == {"role": "tool", "content": "one\ntwo", "tool_call_id": "call_1"}


def test_the_deprecated_form_of_a_call_and_its_result_becomes_the_present_one() -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    call, result = history(asked, {"role": "function", "name": "f", "content": "7"})
    assert call["tool_calls"] == [
        {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    ]
    assert result == {"role": "tool", "content": "7", "tool_call_id": "call_f", "name": "f"}
    assert history({"role": "function", "name": "f", "content": None})[0]["content"] == ""
    with pytest.raises(RequestError) as caught:
        history({"role": "function", "content": "7"})
    assert caught.value.param == "messages[1].name"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_turns_is_kept_under_either_name(name: str) -> None:
    (turn,) = history({"role": "assistant", "content": None, name: "hm"})
    assert turn == {"role": "assistant", "content": "", "reasoning_content": "hm"}


def test_reasoning_effort_none_turns_reasoning_off_unless_the_client_sets_it() -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]}
    kwargs = parse_chat({**asked, "reasoning_effort": "none"}).template_kwargs
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    own = {"enable_thinking": True}
    kwargs = parse_chat({**asked, "reasoning_effort": "none", "chat_template_kwargs": own}).template_kwargs
    assert kwargs["enable_thinking"] is True
    assert parse_chat({**asked, "reasoning_effort": "high"}).template_kwargs == {"reasoning_effort": "high"}
