"""What the grammar of a request depends on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.anthropic import parse_messages
from coordinator.api.fields import parse_json
from coordinator.api.openai import parse_chat, parse_completion
from coordinator.grammar.requests import GrammarRequest, for_chat, for_completion
from coordinator.grammar.task import MAX_TASK, Answer, Task, Tool, encode
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.output.regions import load
from tests.golden.other_apis import LEAST
from tests.unit.coordinator.output.reading import JSON_LINES

FORM = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = {"response_format": {"type": "json_object"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TOOLS = {"tools": [tool("f"), tool("g")]}
F, G = Tool("f", SCHEMA, 0), Tool("g", SCHEMA, 1)


def chat(form: OutputFormat = FORM, *, thinking: bool = False, **fields: Any) -> GrammarRequest | None:
    body = parse_chat(parse_json(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()))
    return for_chat(body, form, thinking)


def test_plain_requests_have_no_grammar() -> None:
    assert chat() is None and chat(**TOOLS, tool_choice="none") is None
    assert chat(OutputFormat(), **TOOLS) is None
    assert for_completion(parse_completion({"prompt": "a"}).options) is None


def test_a_completion_has_its_constraint_alone() -> None:
    wanted = for_completion(parse_completion({"prompt": "a", "guided_regex": "b"}).options)
    assert wanted is not None and wanted.encoded == encode(wanted.task)
    assert (wanted.task, wanted.params) == (Task(Answer("regex", "b")), {None: "guided_regex"})


@pytest.mark.parametrize(
    ("fields", "task", "optional"),
    [
        (JSON, Task(Answer("json"), reasoning=FORM.reasoning), False),
        (TOOLS, Task(tools=(F, G), tool_format=FORM.tools, reasoning=FORM.reasoning), True),
        (
            {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            Task(tools=(F, G), forced=True, parallel=False, tool_format=FORM.tools, reasoning=FORM.reasoning),
            False,
        ),
        (
            {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            Task(
                tools=(Tool("g", SCHEMA, 0),),
                forced=True,
                parallel=False,
                tool_format=FORM.tools,
                reasoning=FORM.reasoning,
            ),
            False,
        ),
        (
            {"tools": [tool("f", strict=True)]},
            Task(tools=(Tool("f", SCHEMA, 0, True),), tool_format=FORM.tools, reasoning=FORM.reasoning),
            False,
        ),
        (
            {**TOOLS, **JSON},
            Task(Answer("json"), tools=(F, G), tool_format=FORM.tools, reasoning=FORM.reasoning),
            False,
        ),
        ({"max_reasoning_tokens": 5}, Task(reasoning=FORM.reasoning, max_reasoning_tokens=5), False),
    ],
)
def test_constraints_tools_and_bounds_make_one_task(fields: dict[str, Any], task: Task, optional: bool) -> None:
    wanted = chat(**fields)
    assert wanted is not None
    assert (wanted.task, wanted.optional) == (task, optional)
    thinking = chat(thinking=True, **fields)
    assert thinking is not None and thinking.task.thinking


def test_errors_name_the_tool_s_parameters() -> None:
    wanted = chat(**TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    assert wanted is not None and wanted.params[0] == "tools[1].function.parameters"
    wanted = chat(**TOOLS, **JSON)
    assert wanted is not None and wanted.params[None] == "response_format.type"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"tools": [tool("f"), tool("g", strict=True)]}, "tools[1].function.strict"),
        ({"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "auto"}, "tools[0].strict"),
    ],
)
def test_what_needs_an_unknown_notation_is_unsupported(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(OutputFormat(), **fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported")


def test_a_bound_on_the_reasoning_of_a_response_template_is_refused_by_its_name() -> None:
    form = OutputFormat(regions=load(JSON_LINES))
    body = parse_messages({**LEAST, "thinking": {"type": "enabled", "budget_tokens": 3}})
    assert form.reads_reasoning
    with pytest.raises(RequestError, match=r"'thinking\.budget_tokens' is not supported") as caught:
        for_chat(body, form, False)
    assert (caught.value.param, caught.value.code) == ("thinking.budget_tokens", "unsupported")


def test_schemas_that_are_too_large_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        chat(**TOOLS, guided_json={"description": "x" * MAX_TASK})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "guided_json", "grammar_too_complex")
