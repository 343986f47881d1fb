"""Outputs as models of each family write them, with what they mean."""

from __future__ import annotations

from tests.unit.coordinator.output.later_transcripts import LATER
from tests.unit.coordinator.output.transcript import NOW, PARIS, TYPED, Transcript

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
    Transcript(
        "llama3_json", "", '<|python_tag|>get_weather.call(city="Paris")', calls=[PARIS], control=("<|python_tag|>",)
    ),
    Transcript("llama3_json", "", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
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
TRANSCRIPTS = [*_HERMES, *_QWEN_CODER, *_LLAMA, *_MISTRAL, *_DEEPSEEK, *LATER]
