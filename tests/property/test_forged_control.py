"""A prompt's only control tokens are those that the chat template writes, whatever strings the client sends.

For tokenizers of several kinds and templates of several styles: the prompt equals, character for character, what
transformers renders. Its control tokens equal those of the same request with every string made harmless. Where no
string contains any part of a control token, the ids equal those of transformers.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from common import builtin
from coordinator.api.openai import parse_chat
from coordinator.requests.spec import Json
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.tokenizer import TextModel
from tests.tiny_tokenizers import CONTROL, KINDS, NAMES, ORDINARY, UNMARKED, checkpoint_files

CHATML = """
{%- macro show(tool) %}{{ tool.function.name }}: {{ tool.function.description | trim | upper }}
{%- for key, value in tool.function.parameters.properties.items() %} {{ key }}={{ value.enum | join(', ') }}{% endfor %}
{%- endmacro %}
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ show(tool) }} {{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content | trim }}
{%- if message.name %} ({{ message.name }}){% endif %}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content.split('</think>')[0] }}</think>{% endif %}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{{ call.id }}{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value if value is string else value | tojson }}
{%- endfor %}{% endfor %}{{ '<|im_end|>' ~ '\\n' }}{% endfor %}
{%- if mood %}{{ mood }}{% endif %}{% for key, value in (extra or {}).items() %}{{ key ~ value }}{% endfor %}
{%- if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """
{%- set ns = namespace(out=bos_token) %}
{%- for message in messages %}
{%- set head = '<|start_header_id|>%s<|end_header_id|>' % message['role'] %}
{%- set ns.out = ns.out ~ head + '\\n\\n' + (message['content'] + ' ') | trim + '<|eot_id|>' %}
{%- endfor %}{{ ns.out }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ ' ' ~ message.content[1:] ~ eos_token }}
{%- else %}{{ ['[INST] ', message.content | replace('\\n', ''), ' [/INST]'] | join }}{% endif %}{% endfor %}"""
HOLES = """{{ bos_token }}
{%- set marks = {'user': '<｜User｜>', 'assistant': '<|im_start|>'} %}
{%- for message in messages %}{{ marks[message.role] or '<|im_end|>' }}<|{{ message.name }}|>
{%- if message.tool_call_id %}<|{{ message.tool_call_id }}|>{% endif %}
{{- '<' ~ message.content ~ '>' }}[{{ (message.content | upper)[::-1][::-1] }}]{{ message.content | list | join }}
{%- for key in mood | default('') %}{{ key }}{% endfor %}
{%- for call in message.tool_calls or [] %}<|{{ call.function.name }}{{ call.id }}|></{{ call.id }}>{% endfor %}
{%- set block %}<|im_end|>{% endset %}{{ block }}{% endfor %}"""
MODERN = """
{%- macro turn(role) %}{{ '<|{}|>'.format('im_' ~ 'start') }}{{ role }}: {{ caller() }}
{{- '{0}{1}'.format('<|im_', 'end|>') }}
{%- endmacro %}
{%- for message in messages %}
{%- call turn(message.role | string) %}{{ (message.content | safe) | indent(2) }}{% endcall %}
{%- set body %}{{ message.name }}<|eot_id|>{{ '<{}>'.format(message.name) }}{% endset %}{{ body | safe }}
{%- filter trim %} <s>{{ message.reasoning_content or '' }} {% endfilter %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments | string }}
{%- for key, value in call.function.arguments | items %}{{ key }}={{ value | string }};{% endfor %}{% endfor %}
{%- for letter in '</s>' %}{{ letter }}{% endfor %}{{ message.tool_calls | default([]) | tojson }}
{%- set ns = namespace(text='') %}{% for part in message.content.split('<') %}{% set ns.text = ns.text + '<' + part %}
{%- endfor %}{{ ns.text }}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "holes": HOLES, "modern": MODERN}

BUILTIN = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Control tokens of the built-in model."""
EVERY = (*CONTROL, *UNMARKED, *BUILTIN, "<unk>", "[UNK]")
PARTS = ("<|im_", "end|>", "im_end", "im_start", "<|", "|>", "<", ">", "[", "]", "/INST", "[inst]", "inst", "s", "/s")
WORDS = ("the block", " a queue ", "\n", "Größe", "{x}", "%s", "'", '"', "</think>", "User", "\U000f0000", "你好")
hostile = st.lists(st.sampled_from(EVERY + PARTS + WORDS), max_size=4).map("".join)
harmless = st.text(st.sampled_from("abc de\nf.,"), max_size=12)
LONGEST_EFFORT = 64
"""The longest accepted ``reasoning_effort``, in characters."""


def requests(strings: st.SearchStrategy[str]) -> st.SearchStrategy[Json]:
    """Generate chat request bodies with ``strings`` wherever a client may put one."""
    named = strings.map(lambda text: text or "x")
    leaves = st.none() | st.booleans() | st.integers(-9, 9) | strings
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(strings, inner, max_size=2)
    )
    arguments = st.dictionaries(strings, values, max_size=2).map(lambda given: json.dumps(given, ensure_ascii=False))
    call = st.fixed_dictionaries(
        {
            "id": named,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": named, "arguments": arguments}),
        }
    )
    user = {"role": st.sampled_from(["user", "system"]), "content": strings, "name": named}
    kinds = st.sampled_from(["text", "input_text", "output_text"])
    part = st.fixed_dictionaries({"type": kinds, "text": strings})
    assistant = {
        "role": st.just("assistant"),
        "content": strings,
        "name": named,
        "tool_calls": st.lists(call, min_size=1, max_size=2),
        "reasoning_content": strings,
    }
    messages = st.lists(
        st.fixed_dictionaries(user)
        | st.fixed_dictionaries(assistant)
        | st.fixed_dictionaries({**user, "content": st.lists(part, max_size=2)})
        | st.fixed_dictionaries({"role": st.just("tool"), "content": strings, "tool_call_id": named, "name": named})
        | st.fixed_dictionaries({"role": st.just("function"), "content": strings, "name": named}),
        min_size=1,
        max_size=3,
    )
    properties = st.dictionaries(
        strings, st.fixed_dictionaries({"enum": st.lists(strings, max_size=2), "x": values}), max_size=2
    )
    parameters = st.fixed_dictionaries({"type": strings, "properties": properties})
    tool_names = st.sampled_from(["f", "end", "user"])  # those that are accepted cannot spell a control token
    function = st.fixed_dictionaries({"name": tool_names, "description": strings, "parameters": parameters})
    tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": function}), max_size=1)
    kwargs = st.fixed_dictionaries({"mood": strings, "extra": st.dictionaries(strings, strings, max_size=2)})
    effort = strings.map(lambda text: text[:LONGEST_EFFORT])
    return st.fixed_dictionaries(
        {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs, "reasoning_effort": effort}
    )


class Case:
    """One tokenizer with one chat template, loaded by the coordinator (``ours``) and by transformers (``theirs``)."""

    def __init__(self, directory: Path, *, knows_function: bool = True) -> None:
        self.knows_function = knows_function
        self.theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        self.ours = TextModel(directory, vocab_size=len(self.theirs))
        added = self.theirs.added_tokens_decoder.items()
        ordinary = (*ORDINARY, "<unk>", "[UNK]", "<tool_call>", "</tool_call>")
        self.control = {index for index, token in added if token.content not in ordinary}

    @classmethod
    def of(cls, directory: Path, kind: str, template: str) -> Case:
        KINDS[kind]().save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(template)
        for name, content in checkpoint_files(kind).items():
            (directory / name).write_text(json.dumps(content))
        return cls(directory)

    def suited(self, body: Json) -> Json:
        """Return ``body`` with the role "function" replaced if the template rejects it."""
        if self.knows_function:
            return body
        messages = [{**each, "role": "user"} if each["role"] == "function" else each for each in body["messages"]]
        return {**body, "messages": messages}

    def rendered(self, body: Json) -> dict[str, Any]:
        chat = parse_chat(body)
        return {
            "conversation": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": True,
            **chat.template_kwargs,
        }

    def control_of(self, body: Json) -> list[int]:
        return [token for token in self.ours.encode_chat(parse_chat(body)) if token in self.control]


CASES = [
    pytest.param((kind, style), marks=() if (column - row) % len(TEMPLATES) in (0, 2) else pytest.mark.whole)
    for row, kind in enumerate(KINDS)
    for column, style in enumerate(TEMPLATES)
]
"""Each tokenizer with each template; with ``--sample`` with two of them, each of which then has several tokenizers."""


@pytest.fixture(scope="module", params=[*CASES, ("built-in", "own")], ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, style = request.param
    if kind == "built-in":
        return Case(builtin.path(), knows_function=False)
    return Case.of(tmp_path_factory.mktemp("case"), kind, TEMPLATES[style])


def disarmed(value: Any, depth: int = 0) -> Any:
    """Return ``value`` with every character that could be part of a control token replaced by a letter; keys stay
    distinct."""
    if isinstance(value, str):
        return "".join(char if char.isspace() else "q" for char in value)
    if isinstance(value, list):
        return [disarmed(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {"q" * (1 + at) + "k": disarmed(item, depth + 1) for at, item in enumerate(value.values())}
    return value


def without_control(body: Json) -> Json:
    """Return the same request with harmless strings in every place."""
    chat = json.loads(json.dumps(body))
    for message in chat["messages"]:
        for name in set(message) - {"role", "tool_calls", "content"}:
            message[name] = disarmed(message[name])
        if isinstance(message["content"], str):
            message["content"] = disarmed(message["content"])
        else:
            for part in message["content"]:
                part["text"] = disarmed(part["text"])
        for call in message.get("tool_calls", ()):
            function = call["function"]
            call["id"], function["name"] = disarmed(call["id"]), disarmed(function["name"])
            function["arguments"] = json.dumps(disarmed(json.loads(function["arguments"])))
    for tool in chat["tools"]:
        function = tool["function"]
        properties = function["parameters"]["properties"].values()
        changed = [{"enum": disarmed(each["enum"]), "x": disarmed(each["x"])} for each in properties]
        function["name"], function["description"] = disarmed(function["name"]), disarmed(function["description"])
        kept = {"q" * (1 + at): each for at, each in enumerate(changed)}
        function["parameters"] = {"type": disarmed(function["parameters"]["type"]), "properties": kept}
    kwargs = chat["chat_template_kwargs"]
    chat["chat_template_kwargs"] = {"mood": disarmed(kwargs["mood"]), "extra": disarmed(kwargs["extra"])}
    chat["reasoning_effort"] = disarmed(chat["reasoning_effort"])
    return chat


@given(body=requests(hostile))
@settings(max_examples=25, deadline=None)
def test_control_tokens_are_those_of_the_template(case: Case, body: Json) -> None:
    body = case.suited(body)
    chat = parse_chat(body)
    assert case.ours.templates is not None
    text = case.ours.templates.default.render(chat.messages, tools=chat.tools, kwargs=chat.template_kwargs)
    assert text == case.theirs.apply_chat_template(**case.rendered(body), tokenize=False)
    assert case.control_of(body) == case.control_of(without_control(body))


def everywhere(text: str) -> Json:
    """Return a chat with ``text`` in every place in which a client may put any string."""
    nested = {text: [text, {text: text, "x": [[text]]}], "x": 1, "y": None}
    function = {"name": text, "arguments": json.dumps(nested)}
    parts = [{"type": kind, "text": text} for kind in ("text", "input_text", "output_text")]
    parts.append({"type": "refusal", "refusal": text})
    schema = {
        "type": text,
        "properties": {text: {"enum": [text], "default": text, "description": text, "x": nested}},
        "required": [text],
        text: text,
    }
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": schema, text: text}}
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "developer", "content": text, "name": text},
            {"role": "user", "content": text, "name": text},
            {"role": "user", "content": [*parts, text], "name": text},
            {"role": "assistant", "content": text, "name": text, "reasoning_content": text},
            {"role": "assistant", "content": None, "refusal": text, "name": text},
            {
                "role": "assistant",
                "content": text,
                "name": text,
                "tool_calls": [{"id": text, "type": "function", "function": function}],
            },
            {"role": "tool", "content": text, "tool_call_id": text, "name": text},
            {"role": "function", "content": text, "name": text},
        ],
        "tools": [tool, {**tool, "function": {**tool["function"], "name": "f2"}, text: text}],
        "chat_template_kwargs": {"mood": text, "extra": {text: text, "x": nested}},
        "reasoning_effort": text,
    }


def test_every_place_shows_in_a_template() -> None:
    """Each place must show in the output of some template; otherwise none of these tests covers it."""
    numbers = itertools.count()
    body = re.sub("qqq", lambda _: f"q{next(numbers)}q", json.dumps(everywhere("qqq")))
    chat = parse_chat(json.loads(body))
    shown = "".join(
        ChatTemplate(source, NAMES).render(chat.messages, tools=chat.tools, kwargs=chat.template_kwargs)
        for source in TEMPLATES.values()
    )
    count = next(numbers)
    assert count > 50
    hidden = [body[: body.index(f"q{number}q")][-60:] for number in range(count) if f"q{number}q" not in shown]
    assert not hidden, f"in no prompt: what follows {hidden}"


def test_every_control_token_in_every_place(case: Case) -> None:
    wanted = case.control_of(case.suited(everywhere("qqq")))
    assert wanted
    for text in EVERY:
        halves = [text[:at] for at in range(1, len(text))] + [text[at:] for at in range(1, len(text))]
        for spelled in (text, f" {text} ", f"{text}\n{text}", f"q{text}q", *halves):
            assert case.control_of(case.suited(everywhere(spelled))) == wanted, spelled


@given(body=requests(harmless))
@settings(max_examples=15, deadline=None)
def test_without_control_tokens_ids_are_those_of_transformers(case: Case, body: Json) -> None:
    body = case.suited(body)
    theirs = case.theirs.apply_chat_template(**case.rendered(body), tokenize=True, return_dict=False)
    assert case.ours.encode_chat(parse_chat(body)) == theirs


@given(before=hostile, begun=hostile.filter(lambda text: bool(text.strip())))
@settings(max_examples=8, deadline=None)
def test_a_message_that_is_continued_is_text_too(case: Case, before: str, begun: str) -> None:
    def continued(*contents: str) -> Json:
        messages = [
            {"role": role, "content": content, "name": "x"}
            for role, content in zip(("user", "assistant"), contents, strict=True)
        ]
        return {"messages": messages, "continue_final_message": True}

    wanted = case.control_of(continued(disarmed(before), disarmed(begun)))
    assert case.control_of(continued(before, begun)) == wanted
