"""Outputs of gpt-oss, GLM, Kimi, Cohere and families with few formats."""

from __future__ import annotations

from tests.unit.coordinator.output.transcript import NOW, PARIS, TYPED, Transcript

_HARMONY_TOKENS = tuple(f"<|{name}|>" for name in "start channel message constrain end call return".split())
_HARMONY = [
    Transcript(
        "openai",
        "openai_gptoss",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "I look.",
        "So.",
        [PARIS],
        _HARMONY_TOKENS,
    ),
    Transcript(
        "openai",
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}",
        calls=[PARIS, NOW],
        control=_HARMONY_TOKENS,
    ),
    Transcript(
        "openai",
        "harmony",
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>"
        "print(4)<|call|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        "Four.",
        "2 + 2.\nprint(4)",
        control=_HARMONY_TOKENS,
    ),
    Transcript("openai", "harmony", "A plain answer", "A plain answer", control=_HARMONY_TOKENS),
    Transcript(
        "openai",
        "harmony",
        "So.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "Hi.",
        "So.",
        control=_HARMONY_TOKENS,
        thinking=True,
    ),
]
_GLM = [
    Transcript(
        "glm45",
        "glm45",
        '\n<think>so</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>L"A</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>where</arg_key>\n<arg_value>{"lat": 1.5}</arg_value>\n'
        '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
        "I look.",
        "so",
        [TYPED, NOW],
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    Transcript(
        "glm47",
        "glm45",
        "<think></think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        calls=[PARIS, NOW],
    ),
]
_KIMI_TOKENS = (
    *(f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")),
    "<think>",
    "</think>",
)
_KIMI = [
    Transcript(
        "kimi_k2",
        "kimi_k2",
        "<think>so</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        "so",
        [PARIS, NOW],
        _KIMI_TOKENS,
    ),
    Transcript(
        "kimi_k2",
        "kimi_k2",
        "<think>so <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:2"
        '<|tool_call_argument_begin|> {"city": "Paris"} <|tool_call_end|><|tool_calls_section_end|>',
        thought="so",
        calls=[PARIS],
        control=_KIMI_TOKENS,
    ),
]
_COHERE_TOKENS = tuple(f"<|{at}_{what}|>" for at in ("START", "END") for what in ("THINKING", "ACTION", "RESPONSE"))
_COHERE = [
    Transcript(
        "cohere_command3",
        "cohere_command3",
        '<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Paris"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n'
        "]<|END_ACTION|>",
        thought="so",
        calls=[PARIS, NOW],
        control=_COHERE_TOKENS,
    ),
    Transcript(
        "cohere_command3",
        "cohere_command3",
        "<|START_RESPONSE|>Sunny, 3 < 4.<|END_RESPONSE|>",
        "Sunny, 3 < 4.",
        control=_COHERE_TOKENS,
    ),
    Transcript(
        "command_r",
        "",
        "Action: ```json\n[\n"
        '    {\n        "tool_name": "get_weather",\n        "parameters": {"city": "Paris"}\n    },\n'
        '    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]\n```',
        calls=[PARIS, NOW],
    ),
]
_OTHERS = [
    Transcript(
        "phi4_mini_json",
        "",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=[PARIS, NOW],
    ),
    Transcript(
        "command_r",
        "",
        'Plan: look.\nAction:\n```json\n[{"tool_name": "now", "parameters": {}}]\n```\nA ```json block',
        "Plan: look.\nA ```json block",
        calls=[NOW],
    ),
    Transcript(
        "minimax",
        "qwen3",
        '<think>so</think>\n<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        thought="so",
        calls=[PARIS, NOW],
    ),
    Transcript(
        "hunyuan_a13b",
        "qwen3",
        '<think>so</think><tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>',
        thought="so",
        calls=[PARIS],
    ),
    Transcript(
        "functionary_v31",
        "",
        'I look.\n<function=get_weather>{"city": "Paris"}</function><function=now>{}</function>',
        "I look.",
        calls=[PARIS, NOW],
    ),
    Transcript("phi4_mini_json", "", "Use functools.partial", "Use functools.partial"),
    Transcript(
        "phi4_mini",
        "",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        calls=[PARIS],
        control=("<|tool_call|>", "<|/tool_call|>"),
    ),
    Transcript(
        "granite",
        "granite",
        "Here is my thought process: so\nHere is my response: I look.\n"
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "I look.",
        "so",
        [PARIS, NOW],
        ("<|tool_call|>",),
    ),
    Transcript("granite", "granite_tags", "<think>so</think>\n\n<response>Sunny.</response>", "Sunny.", "so"),
    Transcript(
        "granite-20b-fc",
        "",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '<function_call> {"name": "now", "arguments": {}}',
        calls=[PARIS, NOW],
    ),
    Transcript(
        "gigachat3",
        "",
        'I look.<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "I look.",
        calls=[PARIS],
        control=("<|function_call|>", "<|role_sep|>"),
    ),
    Transcript(
        "gigachat3",
        "",
        'I look.\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        "I look.",
        calls=[PARIS],
    ),
    Transcript(
        "apertus",
        "apertus",
        '<|inner_prefix|>so<|inner_suffix|>I look.<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]'
        "<|tools_suffix|>",
        "I look.",
        "so",
        [PARIS, NOW],
        ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    Transcript(
        "hy_v3",
        "hy_v3",
        "so</think:opensource>I look.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        '<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>L"A</arg_value:opensource>\n'
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "<arg_key:opensource>exact</arg_key:opensource>\n<arg_value:opensource>true</arg_value:opensource>\n"
        '<arg_key:opensource>where</arg_key:opensource>\n<arg_value:opensource>{"lat": 1.5}</arg_value:opensource>\n'
        '<arg_key:opensource>tags</arg_key:opensource>\n<arg_value:opensource>["a", "b"]</arg_value:opensource>\n'
        "</tool_call:opensource>\n<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "I look.",
        "so",
        [TYPED, NOW],
        (
            "<think:opensource>",
            "</think:opensource>",
            "<tool_call:opensource>",
            "</tool_call:opensource>",
            "<arg_value:opensource>",
            "</arg_value:opensource>",
        ),
        thinking=True,
    ),
    Transcript(
        "nemotron_json",
        "qwen3",
        '<think>so</think><TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
        thought="so",
        calls=[PARIS],
    ),
    Transcript(
        "minimax_m2",
        "minimax_m2",
        'so\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">L"A</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="exact">true</parameter>\n'
        '<parameter name="where">{"lat": 1.5}</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "I look.",
        "so",
        [TYPED, NOW],
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        thinking=True,
    ),
    Transcript(
        "functiongemma",
        "",
        '<start_function_call>call:get_weather{city:<escape>L"A<escape>,days:3,exact:true,where:{lat:1.5},'
        "tags:[<escape>a<escape>,<escape>b<escape>]}<end_function_call><start_function_call>call:now{}<end_function_call>",
        calls=[TYPED, NOW],
        control=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Transcript(
        "gemma4",
        "gemma4",
        '<|channel>thought\nso<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "I look.",
        "so",
        [PARIS, NOW],
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
]
LATER = [*_HARMONY, *_GLM, *_KIMI, *_COHERE, *_OTHERS]
