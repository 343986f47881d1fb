"""A second, slow way to find the calls in a whole output: regular expressions, json and ast."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

Call = tuple[str, dict[str, Any]]

_NOT_STRINGS = {"days", "exact", "where", "tags"}


def calls_in(tools: str, text: str) -> list[Call]:
    """Return name and arguments of the calls in ``text``, an output of the format named ``tools`` that is well formed
    and uses the tools of the tests."""
    return _ORACLES[tools](text)


def _objects(text: str) -> list[Call]:
    """Calls that are JSON objects, somewhere in the text."""
    found = list[Call]()
    at = text.find("{")
    while at >= 0:
        call, end = json.JSONDecoder().raw_decode(text, at)
        name = call.get("name", call.get("tool_name"))
        if name in ("get_weather", "now") and len(call) > 1:
            found.append((name, call.get("arguments", call.get("parameters"))))
        at = text.find("{", end)
    return found


def _from_start(text: str) -> list[Call]:
    text = text.removeprefix("<|python_tag|>")
    if ".call(" in text:
        return _python(text.replace(".call(", "("))
    return _objects(text) if text.startswith("{") else []


def _named(pattern: str) -> Any:
    def find(text: str) -> list[Call]:
        found = list[Call]()
        for match in re.finditer(pattern, text):
            body = text[match.end() :].lstrip()
            found.append((match[1], json.JSONDecoder().raw_decode(body)[0] if body.startswith("{") else {}))
        return found

    return find


def _tagged(call: str, argument: str) -> Any:
    def find(text: str) -> list[Call]:
        return [
            (
                name,
                {
                    key: json.loads(value) if key in _NOT_STRINGS else value
                    for key, value in re.findall(argument, body, re.S)
                },
            )
            for name, body in re.findall(call, text, re.S)
        ]

    return find


def _python(text: str) -> list[Call]:
    text = re.sub(r"<think>.*</think>|<\W?\w+>|<\|\w+\|>\w*\.?", "", text).strip()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    found = list[Call]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            arguments |= dict(zip(("city", "days"), map(ast.literal_eval, node.args), strict=False))
            found.append((node.func.id, arguments))
    return found


def _gemma(text: str) -> list[Call]:
    found = list[Call]()
    for name, body in re.findall(r"call:(\w+)(\{.*?\})<", re.sub(r'<escape>|<\|"\|>', "\0", text), re.S):
        parts = re.split("\0", body)
        parts[::2] = [re.sub(r"(\w+):", r'"\1":', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        found.append((name, json.loads("".join(parts))))
    return found


def _by_name(text: str) -> list[Call]:
    begin = text.find("[{")
    objects = json.JSONDecoder().raw_decode(text, begin)[0] if begin >= 0 else []
    return [(name, arguments) for each in objects for name, arguments in each.items()]


_JSON = ("hermes", "granite4", "mistral_list", "cohere_command3", "command_r", "phi4_mini_json", "phi4_mini")
_QWEN = _tagged(r"<function=(\w+)>(.*?)</function>", r"<parameter=(\w+)>\n?(.*?)\n?</parameter>")
_ORACLES: dict[str, Any] = {
    **dict.fromkeys(
        (*_JSON, "granite", "granite-20b-fc", "gigachat3", "nemotron_json", "minimax", "hunyuan_a13b"), _objects
    ),
    **dict.fromkeys(("llama3_json", "llama4_json"), _from_start),
    **dict.fromkeys(("pythonic", "llama4_pythonic", "lfm2", "olmo3"), _python),
    **dict.fromkeys(("qwen3_coder", "seed_oss"), _QWEN),
    **dict.fromkeys(("functiongemma", "gemma4"), _gemma),
    "apertus": _by_name,
    "hy_v3": _tagged(
        r"<tool_call:opensource>(\w+)<(.*?)</tool_call:opensource>",
        r"<arg_key:opensource>(\w+)</arg_key:opensource>\s*<arg_value:opensource>(.*?)</arg_value:opensource>",
    ),
    "functionary_v31": _named(r"<function=(\w+)>"),
    "mistral": _named(r"\[TOOL_CALLS\](\w+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?"),
    "deepseek_v3": _named(r"function<｜tool▁sep｜>(\w+)\n```json\n"),
    "deepseek_v31": _named(r"<｜tool▁call▁begin｜>(\w+)<｜tool▁sep｜>"),
    "kimi_k2": _named(r"functions\.(\w+):\d+<\|tool_call_argument_begin\|>"),
    "openai": _named(r"to=functions\.(\w+)[^{]*?<\|message\|>"),
    "deepseek_v32": _tagged(
        r'<｜DSML｜invoke name="(\w+)">(.*?)</｜DSML｜invoke>',
        r'<｜DSML｜parameter name="(\w+)" string="\w+">(.*?)</｜DSML｜parameter>',
    ),
    "minimax_m2": _tagged(r'<invoke name="(\w+)">(.*?)</invoke>', r'<parameter name="(\w+)">(.*?)</parameter>'),
    **dict.fromkeys(
        ("glm45", "glm47"),
        _tagged(r"<tool_call>(\w+)(.*?)</tool_call>", r"<arg_key>(\w+)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
    ),
}
