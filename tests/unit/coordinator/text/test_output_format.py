"""The output format of a model, from its templates, its tokens and the operator's options."""

from __future__ import annotations

from typing import Any
from unittest.mock import sentinel

import pytest

from common.core.errors import StartError
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.requests.spec import ChatBody
from coordinator.text.output_format import AUTO, NONE, choose_format, ends_in_reasoning, marker_tokens
from coordinator.text.traced import Traced, join, written

TEMPLATE: dict[str, Any] = {
    "start_anchor": "<bot>",
    "fields": {
        "thinking": {"open": "<why>", "close": "</why>"},
        "tool_calls": {"open_pattern": r"<do> (?P<name>\w+)", "close": "</do>", "content": "json"},
    },
}
SOURCE = {"default": "<tool_call>\n{'name': <think></think>"}


def body(*messages: dict[str, object], continued: bool = False) -> ChatBody:
    return ChatBody(
        messages=list(messages),
        tools=None,
        template_kwargs=None,
        add_generation_prompt=not continued,
        options=sentinel.options,
        continue_final_message=continued,
    )


def test_what_the_operator_names_counts_before_what_is_found() -> None:
    found = choose_format(SOURCE, (), None, AUTO, AUTO)
    assert found == OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    assert choose_format(SOURCE, (), None, "mistral", NONE) == OutputFormat(TOOL_FORMATS["mistral"])
    with pytest.raises(StartError, match="nobody"):
        choose_format(SOURCE, (), None, "nobody", AUTO)


def test_a_response_template_serves_where_nothing_is_found_or_named() -> None:
    found = choose_format({"default": "{{ messages }}"}, (), TEMPLATE, AUTO, AUTO)
    assert found.regions is not None
    named = choose_format({"default": "x"}, (), TEMPLATE, "hermes", AUTO)
    assert named == OutputFormat(TOOL_FORMATS["hermes"], found.reasoning) and found.reasoning is not None
    assert choose_format(SOURCE, (), TEMPLATE, AUTO, AUTO).regions is None


def test_tokens_that_are_markers_of_calls() -> None:
    tokens = {"<tool_call>", "</tool_call>", "<do>", "</do>", "<why>", "<end>", "do"}
    regions = choose_format({"default": "{{ messages }}"}, (), TEMPLATE, AUTO, AUTO)
    assert marker_tokens(OutputFormat(TOOL_FORMATS["hermes"]), tokens) == {"<tool_call>", "</tool_call>"}
    assert marker_tokens(regions, tokens) == {"<do>", "</do>"}
    assert marker_tokens(OutputFormat(), tokens) == set()


@pytest.mark.parametrize("form", [OutputFormat(reasoning=REASONING_FORMATS["qwen3"]), None])
def test_only_the_template_opens_reasoning(form: OutputFormat | None) -> None:
    marker = "<think>" if form else "<why>"
    form = form or choose_format({"default": "{{ messages }}"}, (), TEMPLATE, AUTO, AUTO)
    user = body({"role": "user", "content": "Hi"})
    assert ends_in_reasoning(join([written(f"<bot>{marker}\n")]), user, form)
    assert not ends_in_reasoning(join([written("<bot>")]), user, form)
    assert not ends_in_reasoning(join([written("<bot>"), f"{marker}\n"]), user, form)
    continued = body({"role": "assistant", "content": f"{marker} so"}, continued=True)
    assert ends_in_reasoning(Traced("any"), body({"role": "assistant", "content": marker}, continued=True), form)
    assert ends_in_reasoning(Traced("any"), continued, form) == (form.regions is None)
