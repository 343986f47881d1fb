"""Outputs as models of each family write them, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PARIS = ("get_weather", {"city": "Paris"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
TYPED = ("get_weather", {"city": 'L"A', "days": 3, "exact": True, "where": {"lat": 1.5}, "tags": ["a", "b"]})


@dataclass(frozen=True)
class Transcript:
    """``tools`` and ``reasoning``: names of formats. ``text``: an output, in which the texts of ``control`` are control
    tokens if the tokenizer has them as such. ``calls``: name and arguments of each call."""

    tools: str
    reasoning: str
    text: str
    content: str = ""
    thought: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    control: tuple[str, ...] = ()
    thinking: bool = False


_HERMES = [
    Transcript(
        "hermes",
        "qwen3",
        "<think>\nThe weather.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "I look.",
        "The weather.",
        [PARIS, NOW],
    ),
    Transcript(
        "hermes",
        "qwen3",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "L\\"A", "days": 3, "exact": true, '
        '"where": {"lat": 1.5}, "tags": ["a", "b"]}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        calls=[TYPED, NOW],
        control=("<tool_call>", "</tool_call>"),
    ),
    Transcript(
        "granite4",
        "",
        'One moment.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "One moment.",
        calls=[PARIS],
        control=("<tool_call>", "</tool_call>"),
    ),
]
_QWEN_CODER = [
    Transcript(
        "qwen3_coder",
        "qwen3",
        "I look.\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        calls=[PARIS, NOW],
    ),
    Transcript(
        "qwen3_coder",
        "qwen3",
        'so\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nL"A\n</parameter>\n<parameter=days>\n3\n'
        '</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=where>\n{"lat": 1.5}\n</parameter>\n'
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        thought="so",
        calls=[TYPED],
        thinking=True,
    ),
    Transcript(
        "qwen3_coder",
        "",
        "<function=get_weather>\n<parameter=city>\n\nParis\n\n</parameter>\n</function>",
        calls=[("get_weather", {"city": "\nParis\n"})],
    ),
    Transcript(
        "seed_oss",
        "seed_oss",
        "<seed:think>so</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>",
        thought="so",
        calls=[PARIS],
        control=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
]
_LLAMA = [
    Transcript("llama3_json", "", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=[PARIS]),
    Transcript(
        "llama3_json",
        "",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        calls=[PARIS, NOW],
        control=("<|python_tag|>",),
    ),
    Transcript(
        "llama3_json",
        "",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=[PARIS],
    ),
    Transcript("llama3_json", "", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    Transcript("llama3_json", "", 'A list: {"name": "now"}', 'A list: {"name": "now"}'),
    Transcript(
        "llama4_json", "", '{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', calls=[NOW, NOW]
    ),
    Transcript(
        "llama4_pythonic",
        "",
        "[get_weather(city='L\"A', days=3, exact=True, where={'lat': 1.5}, tags=['a', 'b']), now()]",
        calls=[TYPED, NOW],
    ),
    Transcript(
        "llama4_pythonic",
        "",
        '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        calls=[PARIS],
        control=("<|python_start|>", "<|python_end|>"),
    ),
    Transcript("llama4_pythonic", "", "[1](link) is no call", "[1](link) is no call"),
    Transcript("pythonic", "", "[now(), get_weather('Paris')]", calls=[NOW, PARIS]),
    Transcript(
        "olmo3",
        "qwen3",
        '<think>so</think><function_calls>\nget_weather(city="Paris")\nnow()\n</function_calls>',
        thought="so",
        calls=[PARIS, NOW],
    ),
    Transcript(
        "lfm2",
        "",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Wait.',
        "Wait.",
        calls=[PARIS],
        control=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
]
_MISTRAL = [
    Transcript(
        "mistral_list",
        "",
        'I look.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "I look.",
        calls=[PARIS, NOW],
        control=("[TOOL_CALLS]",),
    ),
    Transcript(
        "mistral",
        "mistral",
        '[THINK]so[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
        "I look.",
        "so",
        [PARIS, NOW],
        ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    Transcript("mistral", "", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls=[PARIS], control=("[TOOL_CALLS]",)),
    Transcript("mistral", "", "[TOOL_CALLS]now[ARGS]", calls=[NOW], control=("[TOOL_CALLS]", "[ARGS]")),
]
_DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_DEEPSEEK = [
    Transcript(
        "deepseek_v3",
        "deepseek_r1",
        "so\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        "so",
        [PARIS, NOW],
        _DEEPSEEK_TOKENS,
        thinking=True,
    ),
    Transcript(
        "deepseek_v31",
        "deepseek_r1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=[PARIS, NOW],
        control=_DEEPSEEK_TOKENS,
    ),
    Transcript(
        "deepseek_v32",
        "deepseek_r1",
        '<think>so</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">L"A</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="where" string="false">{"lat": 1.5}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["a", "b"]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "I look.",
        "so",
        [TYPED, NOW],
        ("<think>", "</think>"),
    ),
]
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
TRANSCRIPTS = [
    *(*_HERMES, *_QWEN_CODER, *_LLAMA, *_MISTRAL, *_DEEPSEEK),
    *(*_HARMONY, *_GLM, *_KIMI, *_COHERE, *_OTHERS),
]
