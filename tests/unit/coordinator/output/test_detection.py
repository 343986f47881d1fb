"""The format of a model, from excerpts shaped like the families' chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

import common.builtin
from coordinator.output.detection import detect
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_parser_names, tool_parser_names

TEMPLATES = [
    (
        "hermes",
        "",
        "{{- 'Return a JSON object within <tool_call></tool_call> tags:\\n<tool_call>\\n{\"name\": <function-name>' }}",
    ),
    (
        "hermes",
        "qwen3",
        "{{- '\\n<tool_call>\\n{\"name\": \"' }}{%- if '</think>' in content %}{%- endif %}"
        "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    ),
    (
        "qwen3_coder",
        "",
        "{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}",
    ),
    (
        "llama3_json",
        "",
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- '\"parameters\": ' }}"
        '{{- \'{"name": "\' + tool_call.name }}{{- "<|python_tag|>" + tool_call.name + ".call(" }}',
    ),
    ("", "", "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}"),
    ("llama4_json", "", "{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{{- '\"parameters\": ' }}"),
    ("llama4_pythonic", "", "{{- '<|header_start|>system<|header_end|>Use [func_name1(param1=value1), ...]' }}"),
    ("pythonic", "", "{{- '<start_of_turn>user\\nput it as [func_name1(param_name1=value1...)]' }}"),
    ("mistral_list", "", "{{- '[TOOL_CALLS] [' }}{{- out[:-1] + ', \"id\": \"' + tool_call.id }}"),
    ("mistral", "mistral", "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{{- '[THINK]' + text + '[/THINK]' }}"),
    (
        "deepseek_v3",
        "deepseek_r1",
        "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + "
        "'\\n' + '```json' + '\\n'}}{% if '</think>' in content %}{% endif %}",
    ),
    (
        "deepseek_v31",
        "deepseek_r1",
        "{{'<｜Assistant｜></think>'}}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}",
    ),
    (
        "deepseek_v32",
        "deepseek_r1",
        "{%- set dsml_token = '｜DSML｜' -%}<{{ dsml_token }}invoke name=\"{{ name }}\">{{'<｜Assistant｜></think>'}}",
    ),
    (
        "openai",
        "openai_gptoss",
        "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}",
    ),
    ("glm45", "glm45", "<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>{{ '<think></think>' }}"),
    ("glm47", "glm45", "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>{{ '<think></think>' }}"),
    (
        "kimi_k2",
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|><think>{{ rc }}</think>",
    ),
    (
        "cohere_command3",
        "cohere_command3",
        '<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": ',
    ),
    ("command_r", "", "{{- '<|START_OF_TURN_TOKEN|>Write \\'Action:\\' followed by a json list with a tool_name' }}"),
    ("phi4_mini_json", "", 'formatted as functools[{"name": [function name], "arguments": [arguments]}, ...]'),
    ("granite", "granite", "write <|tool_call|> followed by a list; 'Here is my thought process:' <|start_of_role|>"),
    (
        "granite",
        "granite_tags",
        "write <|tool_call|> and a list; <think></think> <response></response> <|start_of_role|>",
    ),
    ("granite4", "", '<|start_of_role|>assistant<|end_of_role|>{{- \'\\n<tool_call>\\n{"name": "\' }}'),
    (
        "minimax_m2",
        "minimax_m2",
        "{%- set begin = '<minimax:tool_call>' -%}"
        '<invoke name="x"><parameter name="y">{{ \']~b]ai\\n<think>\\n</think>\' }}',
    ),
    (
        "hy_v3",
        "hy_v3",
        "{%- set HYTK = ':opensource' %}{%- set a = '<think{}>' %}{%- set b = '<arg_key{}>'.format(HYTK) %}",
    ),
    (
        "apertus",
        "apertus",
        "{%- set inner_token = '<|inner_prefix|>' -%}{%- set tool_calls_token = '<|tools_prefix|>' -%}",
    ),
    (
        "gigachat3",
        "",
        "namespace(role_sep='<|role_sep|>\n', message_sep='<|message_sep|>', function_call='<|function_call|>')",
    ),
    ("gigachat3", "", "{'role': 'function call', 'content': '{\"name\": \"'}namespace(role_sep='<|role_sep|>\n')"),
    ("seed_oss", "seed_oss", "<seed:think>{{ text }}</seed:think><seed:tool_call>\n<function={{ name }}>\n<parameter="),
    ("functiongemma", "", "{{- '<start_function_call>call:' + name + '{' -}}"),
    ("gemma4", "gemma4", "{{- '<|tool_call>call:' + name + '{' -}}{{- '<|channel>thought\\n<channel|>' -}}"),
    ("lfm2", "", "{{- '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' -}}"),
    ("olmo3", "", "{{- '<function_calls>' + call + '</function_calls>' -}}"),
    ("nemotron_json", "qwen3", "{{- '<TOOLCALL>[' + calls + ']</TOOLCALL>' -}}<think></think>"),
    ("", "", "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' + m.content }}{% endfor %}"),
]


@pytest.mark.parametrize(("tools", "reasoning", "source"), TEMPLATES)
def test_a_template_shows_its_format(tools: str, reasoning: str, source: str) -> None:
    found = detect(source, ())
    assert found.tools is TOOL_FORMATS.get(tools)
    assert found.reasoning is REASONING_FORMATS.get(reasoning)


def test_the_built_in_model() -> None:
    source = (Path(common.builtin.__file__).parent / "model" / "chat_template.jinja").read_text()
    found = detect(source, ["<|begin|>", "<|end|>", "<tool_call>", "</tool_call>"])
    assert found.tools is TOOL_FORMATS["hermes"] and found.reasoning is None


def test_tokens_show_what_a_template_does_not() -> None:
    found = detect("{{ messages }}", ["<|end|>", "<|tool_call|>", "<|/tool_call|>", "<think>", "</think>"])
    assert found.tools is TOOL_FORMATS["phi4_mini"]
    assert found.reasoning is REASONING_FORMATS["qwen3"]


def test_the_template_counts_before_the_tokens() -> None:
    found = detect('<tool_call>\n{"name": ', ["[TOOL_CALLS]", "[THINK]"])
    assert found.tools is TOOL_FORMATS["hermes"] and found.reasoning is REASONING_FORMATS["mistral"]


def test_names_for_flags() -> None:
    assert {"hermes", "mistral", "openai", "qwen3_coder"} <= set(tool_parser_names())
    assert {"deepseek_r1", "qwen3", "harmony", "openai_gptoss"} <= set(reasoning_parser_names())


@pytest.mark.parametrize("name", tool_parser_names())
def test_no_marker_begins_another_one_of_its_format(name: str) -> None:
    format = TOOL_FORMATS[name]
    for reasoning in REASONING_FORMATS.values():
        texts = {*format.opening, *format.closing, *format.also}
        texts |= {reasoning.begin, reasoning.end, *reasoning.around_content}
        for text in texts:
            assert not any(other.startswith(text) for other in texts - {text}), (name, reasoning.name, text)
