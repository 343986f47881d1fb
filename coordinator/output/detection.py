"""Choice of a model's output format from its chat template, by the markers that only one family's template writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.output.region_notation import notation
from coordinator.output.regions import load


@dataclass(frozen=True, slots=True)
class _Sign:
    """What shows a format in a template. ``name``: the format. ``texts``: they must all occur."""

    name: str
    texts: tuple[str, ...]


_TOOLS = (
    _Sign("openai", ("<|channel|>", "<|message|>")),
    _Sign("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    _Sign("deepseek_v32", ("｜DSML｜",)),
    _Sign("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    _Sign("kimi_k2", ("<|tool_call_begin|>",)),
    _Sign("minimax_m2", ("<minimax:tool_call>",)),
    _Sign("hy_v3", ("<arg_key{}>", ":opensource")),
    _Sign("hy_v3", ("<arg_key:opensource>",)),
    _Sign("apertus", ("<|tools_prefix|>",)),
    _Sign("gigachat3", ("<|function_call|>", "<|role_sep|>")),
    _Sign("gigachat3", ("function call", "<|role_sep|>")),
    _Sign("glm47", ("<arg_key>", "</arg_key><arg_value>")),
    _Sign("glm45", ("<arg_key>",)),
    _Sign("seed_oss", ("<seed:tool_call>",)),
    _Sign("qwen3_coder", ("<function=", "<parameter=")),
    _Sign("functionary_v31", ("<function=", "</function>")),
    _Sign("gemma4", ("<|tool_call>call:",)),
    _Sign("functiongemma", ("<start_function_call>",)),
    _Sign("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    _Sign("mistral_list", ("[TOOL_CALLS]",)),
    _Sign("cohere_command3", ("<|START_ACTION|>",)),
    _Sign("command_r", ("Action:", "tool_name", "<|START_OF_TURN_TOKEN|>")),
    _Sign("hunyuan_a13b", ("<tool_calls>[",)),
    _Sign("minimax", ("<tool_calls>", '"arguments"')),
    _Sign("unknown", ("<mm:think>",)),
    _Sign("nemotron_json", ("<TOOLCALL>",)),
    _Sign("phi4_mini_json", ("functools[",)),
    _Sign("phi4_mini", ("<|tool_call|>", "<|/tool_call|>")),
    _Sign("granite", ("<|tool_call|>",)),
    _Sign("granite-20b-fc", ("<function_call>",)),
    _Sign("granite4", ("<tool_call>", "<|start_of_role|>")),
    _Sign("lfm2", ("<|tool_call_start|>",)),
    _Sign("olmo3", ("<function_calls>",)),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("llama4_pythonic", ("<|header_start|>", "func_name1(")),
    _Sign("llama4_json", ("<|header_start|>", '"parameters": ')),
    _Sign("pythonic", ("func_name1(",)),
    _Sign("llama3_json", ("<|start_header_id|>", '"parameters": ')),
    _Sign("llama3_json", ("<|python_tag|>",)),
)
"""In the order in which they are tried: a family whose markers are another one's and more comes first. The name
"unknown" is for a notation that looks like another one."""

_REASONING = (
    _Sign("openai_gptoss", ("<|channel|>", "<|message|>")),
    _Sign("mistral", ("[THINK]",)),
    _Sign("cohere_command3", ("<|START_THINKING|>",)),
    _Sign("gemma4", ("<|channel>",)),
    _Sign("seed_oss", ("<seed:think>",)),
    _Sign("hy_v3", ("<think{}>", ":opensource")),
    _Sign("hy_v3", ("<think:opensource>",)),
    _Sign("apertus", ("<|inner_prefix|>",)),
    _Sign("granite", ("Here is my thought process",)),
    _Sign("granite_tags", ("<think>", "<response>", "<|start_of_role|>")),
    _Sign("kimi_k2", ("<think>", "<|tool_call_begin|>")),
    _Sign("minimax_m2", ("</think>", "<minimax:tool_call>")),
    _Sign("glm45", ("</think>", "<arg_key>")),
    _Sign("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    _Sign("qwen3", ("</think>",)),
    _Sign("qwen3", ("<think>",)),
)


def detect(template_source: str, special: Collection[str], response_template: object = None) -> OutputFormat:
    """Return the format that a chat template writes; where it shows none, the one that added tokens show.

    ``special``: texts of the tokenizer's added tokens, control tokens or not. ``response_template``: what
    ``tokenizer_config.json`` has under that name; it counts if the notation of calls is not known otherwise, because
    with a known one arguments are streamed. If nothing shows a notation, the format is one without any."""
    tokens = "\n".join(special)
    tools = _first(_TOOLS, template_source) or _first(_TOOLS, tokens)
    regions = load(response_template) if not tools else None
    if regions is not None and isinstance(response_template, dict):
        return OutputFormat(*notation(response_template), regions)
    reasoning = _first(_REASONING, template_source) or _first(_REASONING, tokens)
    return OutputFormat(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning))


def _first(signs: Collection[_Sign], text: str) -> str:
    return next((sign.name for sign in signs if all(each in text for each in sign.texts)), "")
