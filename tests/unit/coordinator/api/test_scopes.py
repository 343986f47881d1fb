"""Fields that only some endpoints know: each endpoint obeys them or refuses them, and never ignores one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.core.errors import RequestError
from coordinator.api.anthropic import parse_messages
from coordinator.api.fields import Fields
from coordinator.api.openai import parse_chat, parse_completion
from coordinator.api.responses import parse_responses
from coordinator.api.scopes import PATHS, SCOPES, Api
from coordinator.api.unsupported import UNSUPPORTED, naming_ignored, refuse_ignored
from coordinator.requests.spec import ChatBody, CompletionBody
from tests.golden.other_apis import HELLO, LEAST

Parsed = ChatBody | CompletionBody
TOOL = {"type": "function", "name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}, "name": "s"}
ASSISTANT = [*HELLO, {"role": "assistant", "content": "So"}]

PARSERS: dict[Api, tuple[Callable[[dict[str, Any]], Parsed], dict[str, Any]]] = {
    "chat": (parse_chat, {"messages": HELLO}),
    "text": (parse_completion, {"prompt": "hello"}),
    "responses": (lambda body: parse_responses(body).chat, {"input": "hello"}),
    "messages": (parse_messages, LEAST),
}
ASKING: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_json": {"guided_json": {"type": "object"}},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "guided_json_object": {"guided_json_object": True},
    "text": {"text": {"format": SCHEMA}},
    "output_config": {"output_config": {"format": SCHEMA}},
    "output_format": {"output_format": SCHEMA},
    "stop_sequences": {"stop_sequences": ["a"]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "reasoning_effort": {"reasoning_effort": "low"},
    "include_reasoning": {"include_reasoning": False, "thinking": {"type": "adaptive"}},
    "thinking": {"thinking": {"type": "adaptive"}},
    "enable_thinking": {"enable_thinking": True},
    "reasoning": {"reasoning": {"effort": "low"}},
    "tools": {"tools": [TOOL]},
    "tool_choice": {"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]},
    "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": {"name": "f"}, "functions": [{"name": "f"}]},
    "messages": {"messages": [{"role": "user", "content": "other"}]},
    "input": {"input": "other"},
    "prompt": {"prompt": "other"},
    "instructions": {"instructions": "Be brief."},
    "system": {"system": "Be brief."},
    "documents": {"documents": [{"text": "a"}]},
    "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
    "continue_final_message": {"continue_final_message": True, "messages": ASSISTANT},
    "add_generation_prompt": {"add_generation_prompt": False},
    "add_special_tokens": {"add_special_tokens": True},
    "logprobs": {"logprobs": 2},
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
    "echo": {"echo": True},
    "return_token_ids": {"return_token_ids": True},
    "skip_special_tokens": {"skip_special_tokens": False},
}
"""A request of something by each field of the table, with the other fields that it needs; 3 for all others."""
OTHERS: dict[tuple[str, Api], dict[str, Any]] = {
    ("logprobs", "chat"): {"logprobs": True},
    ("top_logprobs", "responses"): {"top_logprobs": 2},
    ("tool_choice", "chat"): {"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]},
    ("tool_choice", "responses"): {"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]},
    ("add_special_tokens", "text"): {"add_special_tokens": False},
}
"""Where an endpoint has its own form of a field."""
ELSEWHERE = {("prompt", "responses"), ("add_special_tokens", "chat"), ("best_of", "text")}
"""Endpoints that know a field and refuse what is asked here, or do not change their request for it."""


def asking(name: str, api: Api) -> dict[str, Any]:
    return OTHERS.get((name, api)) or ASKING.get(name) or {name: 3}


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", SCOPES)
def test_a_field_is_obeyed_or_refused(name: str, api: Api) -> None:
    parse, body = PARSERS[api]
    fields = asking(name, api)
    if api not in SCOPES[name].obeyed:
        alone = {name: fields[name]}
        with pytest.raises(RequestError) as caught:
            parse({**body, **alone})
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported", name)
        assert PATHS[api] in caught.value.message and len(caught.value.message) > 30
        if "" not in SCOPES[name].neutral and name not in body:
            for neutral in SCOPES[name].neutral:
                assert not parse({**body, name: neutral}).options.ignored
    elif (name, api) not in ELSEWHERE:
        without = {other: value for other, value in fields.items() if other != name}
        found = parse({**body, **fields})
        assert not found.options.ignored and found != parse({**body, **without}), "it has no effect"


NAMED_ONLY = (
    "max_new_tokens repeat_penalty n_predict thinking_budget_tokens reasoning_budget extra_body options format "
    "thinking_token_budget thinking_budget enable_thinking thinking echo max_reasoning_tokens top_logprobs tools"
)


@pytest.mark.parametrize("name", NAMED_ONLY.split())
def test_constraints_of_other_servers_are_in_a_table(name: str) -> None:
    assert name in SCOPES or name in UNSUPPORTED


# -- two names of one field --------------------------------------------------------------------------------------------


def chat(**fields: Any) -> ChatBody:
    return parse_chat({"messages": HELLO, **fields})


def answer(**fields: Any) -> ChatBody:
    return parse_responses({"input": "hello", **fields}).chat


def message(**fields: Any) -> ChatBody:
    return parse_messages({**LEAST, **fields})


@pytest.mark.parametrize("name", ["max_reasoning_tokens", "thinking_token_budget", "thinking_budget"])
def test_the_bound_on_reasoning_has_three_names(name: str) -> None:
    for parse in (chat, answer, message):
        for value, tokens in ((0, 0), (5, 5), (-1, None)):
            body = parse(**{name: value})
            assert (body.max_reasoning_tokens, body.options.ignored) == (tokens, ())
        assert parse(**{name: 5}).max_reasoning_param == name
        with pytest.raises(RequestError, match="between -1"):
            parse(**{name: -2})


def test_thinking_of_other_servers() -> None:
    on, off = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
    for parse in (chat, answer):
        assert parse(thinking={"type": "enabled"}).template_kwargs == parse(enable_thinking=True).template_kwargs == on
        assert parse(thinking={"type": "disabled"}).template_kwargs == parse(thinking=False).template_kwargs == off
        assert parse(enable_thinking=True, chat_template_kwargs={"thinking": 1}).template_kwargs == {
            **on,
            "thinking": 1,
        }
        body = parse(thinking={"type": "enabled", "budget_tokens": 7, "keep": "all"})
        assert (body.max_reasoning_tokens, body.max_reasoning_param) == (7, "thinking.budget_tokens")
        assert body.options.ignored == ("thinking.keep",)
        assert parse().template_kwargs == {}


def test_the_length_of_an_answer_has_three_names() -> None:
    for name in ("max_output_tokens", "max_completion_tokens", "max_tokens"):
        assert answer(**{name: 9}).options.sampling.max_tokens == 9
    assert answer(max_output_tokens=9, max_tokens=9).options.sampling.max_tokens == 9
    assert parse_completion({"prompt": "a", "max_completion_tokens": 9}).options.sampling.max_tokens == 9
    unlimited = parse_completion({"prompt": "a", "max_completion_tokens": -1}).options.sampling
    assert (unlimited.max_tokens, unlimited.default_tokens) == (None, None)


def test_other_names_in_the_messages_api() -> None:
    assert message(stop="a").options.stop == message(stop=["a"], stop_sequences=["a"]).options.stop == ("a",)
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    use = message(tools=tools, parallel_tool_calls=False).tool_use
    assert use is not None and not use.parallel
    constraint = message(output_format=SCHEMA).options.constraint
    assert constraint is not None and constraint.param == "output_format.schema"
    assert message(output_config={"format": SCHEMA}).options.constraint == replace(
        constraint, param="output_config.format.schema"
    )
    thinks = {"thinking": {"type": "adaptive"}}
    assert message(**thinks).include_reasoning and not message(**thinks, include_reasoning=False).include_reasoning


# -- ignored fields ----------------------------------------------------------------------------------------------------


def test_a_field_that_is_read_after_the_ignored_ones_were_named_is_a_fault() -> None:
    """It would be obeyed, and named as ignored."""
    fields = Fields({"a": 1, "b": 2, "c": None})
    fields.integer("a", 0, 1)
    body = naming_ignored(chat(), fields, "d.e")
    assert body.options.ignored == ("b", "d.e")
    with pytest.raises(AssertionError, match="b is read after"):
        fields.integer("b", 0, 2)


def test_an_ignored_field_is_refused_where_parameters_are_strict() -> None:
    refuse_ignored(chat(user="a").options)
    with pytest.raises(RequestError) as caught:
        refuse_ignored(chat(user="a", store=True, foo=1).options)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported", "store")
