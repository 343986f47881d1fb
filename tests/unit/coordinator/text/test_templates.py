"""Chat templates of a checkpoint: which are found and chosen, and the form in which each gets earlier turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.core.errors import StartError
from coordinator.api.openai import parse_chat
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.history import HistoryForm
from coordinator.text.templates import ChatTemplates, template_sources
from coordinator.text.tokenizer import TextModel
from tests.fakes.checkpoint import VOCAB, fake_checkpoint

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":  "y"}'}}
ROUND_TRIP = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "result", "tool_call_id": "call_1"},
]

LOOP = "{% for message in messages %}{% for call in message.tool_calls or [] %}"
END = "{% endfor %}{{ message.content }}|{% endfor %}"
CONCATENATES = LOOP + "{{ '<c>' + call.function.name + ' ' + call.function.arguments }}" + END
PRINTS = LOOP + "<c>{{ call.function.name }} {{ call.function.arguments }}" + END
DUMPS = LOOP + "<c>{{ call | tojson }}" + END
ITERATES = (
    LOOP
    + "<c>{{ call.function.name }}{% for k, v in call.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
    + END
)
BOTH = LOOP + (
    "{% set a = call.function.arguments %}<c>{{ call.function.name }} {{ a if a is string else a | tojson }}" + END
)
NULL = (
    "{% for message in messages %}{% if message.content is none %}{% for call in message.tool_calls %}"
    "<c>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ message.content }}|{% endif %}{% endfor %}"
)
SHORT = LOOP + (
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "<c>{{ call.id }} {{ call.function | tojson }}" + END
)


def rendered(source: str, messages: list[dict[str, Any]] = ROUND_TRIP) -> str:
    template = ChatTemplate(source, {})
    chat = parse_chat({"messages": messages}, arguments_as_text=template.form.arguments_as_text)
    return str(template.render(chat.messages))


@pytest.mark.parametrize(
    ("source", "form", "prompt"),
    [
        (CONCATENATES, HistoryForm(arguments_as_text=True), 'ask|<c>f {"x":  "y"}|result|'),
        (PRINTS, HistoryForm(arguments_as_text=True), 'ask|<c>f {"x":  "y"}|result|'),
        (DUMPS, HistoryForm(), None),
        (ITERATES, HistoryForm(), "ask|<c>f x=y|result|"),
        (BOTH, HistoryForm(), 'ask|<c>f {"x": "y"}|result|'),
        (NULL, HistoryForm(null_content=True), 'ask|<c>f{"x": "y"}result|'),
        (SHORT, HistoryForm(short_ids=True), None),
        ("{{ messages[0].content }}", HistoryForm(), "ask"),
        ("{{ raise_exception('no') }}", HistoryForm(), None),
    ],
)
def test_a_template_gets_calls_in_the_form_that_it_wants(source: str, form: HistoryForm, prompt: str | None) -> None:
    assert ChatTemplate(source, {}).form == form
    if prompt is not None:
        assert rendered(source) == prompt


def test_short_ids_are_the_same_for_a_call_and_its_result() -> None:
    source = SHORT.replace("{{ message.content }}", "{{ message.content }}{{ message.tool_call_id or '' }}")
    for given, kept in (("call_1", False), ("abc123XYZ", True)):
        call, result = {**CALL, "id": given}, {**ROUND_TRIP[2], "tool_call_id": given}
        prompt = rendered(source, [ROUND_TRIP[0], {**ROUND_TRIP[1], "tool_calls": [call]}, result])
        shown = prompt.split("<c>")[1].split()[0]
        assert len(shown) == 9 and shown.isalnum() and prompt.endswith(f"result{shown}|") and (shown == given) is kept


def test_reasoning_has_the_name_that_the_template_knows() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "hm"}]
    source = "{% for message in messages %}{{ message.NAME or '' }}{{ message['NAME'] or '' }};{% endfor %}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert rendered(source.replace("NAME", name), turns) == ";hmhm;"


# -- which template -----------------------------------------------------------------------------------------------


def settings(directory: Path, template: Any) -> Path:
    checkpoint = fake_checkpoint(directory / "model")
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return checkpoint


NAMED = [
    {"name": "tool_use", "template": "tools"},
    {"name": "default", "template": "plain"},
    {"name": "rag", "template": "rag"},
]


def test_sources_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    checkpoint = settings(tmp_path, "one")
    assert template_sources(checkpoint, None) == {"default": "one"}
    settings(tmp_path, NAMED)
    assert template_sources(checkpoint, None) == {"tool_use": "tools", "default": "plain", "rag": "rag"}
    settings(tmp_path, NAMED[:1])
    assert template_sources(checkpoint, None) == {"tool_use": "tools", "default": "tools"}
    for nothing in (None, [], [{"name": "x"}], 5):
        settings(tmp_path, nothing)
        assert template_sources(checkpoint, None) == {}
    assert template_sources(checkpoint, "{{ x }}") == {"default": "{{ x }}"}


def test_sources_in_files_come_before_the_configuration(tmp_path: Path) -> None:
    checkpoint = settings(tmp_path, NAMED)
    (checkpoint / "chat_template.jinja").write_text("file")
    more = checkpoint / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file with tools")
    assert template_sources(checkpoint, None) == {"default": "file", "tool_use": "file with tools"}
    assert template_sources(checkpoint, str(checkpoint / "chat_template.jinja")) == {"default": "file"}
    (more / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(StartError, match="rag"):
        template_sources(checkpoint, None)


def test_a_request_with_tools_or_documents_has_its_own_template(tmp_path: Path) -> None:
    text = TextModel(settings(tmp_path, NAMED), vocab_size=VOCAB)
    asked = {"messages": ROUND_TRIP[:1]}

    def prompt(**fields: Any) -> str:
        return text.decode(text.encode_chat(parse_chat({**asked, **fields})))

    assert prompt() == "plain"
    assert prompt(tools=TOOLS) == "tools"
    assert prompt(tools=TOOLS, tool_choice="none") == "plain"
    assert prompt(documents=[{"title": "t", "text": "x"}]) == "rag"


def test_arguments_have_the_form_of_the_template_for_tools() -> None:
    assert ChatTemplates({"default": DUMPS, "tool_use": CONCATENATES}, {}).arguments_as_text
    assert not ChatTemplates({"default": CONCATENATES, "tool_use": DUMPS}, {}).arguments_as_text
    assert ChatTemplates({"default": CONCATENATES}, {}).arguments_as_text
