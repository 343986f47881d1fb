"""How model families write tool calls and reasoning: the notation of each as data.

A tool call is written in one of five styles (:attr:`ToolFormat.style`). The calls of a turn are ``section[0]``, calls
joined by ``between``, ``section[1]``. One call is

- ``json``: ``begin`` ``{"name": NAME, "arguments": OBJECT}`` ``end``, where the keys are ``name_key`` and
  ``arguments_key`` (or ``{NAME: OBJECT}`` if they are empty); with ``listed`` the objects of all calls are one JSON
  array;
- ``named``: ``begin`` NAME ``after_name`` OBJECT ``end``;
- ``parameters``: ``begin`` NAME ``after_name``, for each argument ``key`` KEY ``after_key`` VALUE ``after_value``, then
  ``end``; a string is written as it is, every other value as JSON;
- ``pythonic``: ``NAME(KEY=LITERAL, ...)``; the calls of a turn are one list between ``begin`` and ``end``;
- ``channels``: a message of the harmony format, ``begin`` NAME ``after_name`` OBJECT ``end``.

Line breaks in these texts are those of the family's own chat template; readers accept any whitespace at their place.
The tables are by the names that vLLM gives its parsers where it has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from coordinator.output.regions import RegionFormat

ToolStyle = Literal["json", "named", "parameters", "pythonic", "channels"]
ReasoningStyle = Literal["tags", "channels"]


def pieces(text: str) -> tuple[str, ...]:
    """Split a text of a format into markers, between which whitespace may stand."""
    return tuple(piece for piece in re.split(r"\n| (?=```)|(?<=```)(?=<)", text) if piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family writes tool calls. ``name``: what ``--tool-call-parser`` accepts."""

    name: str
    style: ToolStyle
    begin: str = ""
    """Text before a call. If it is empty and there is no section, calls have no marker: an output, or text behind
    another call, is read as a call if it begins like a call of a known tool."""
    end: str = ""
    also: tuple[str, ...] = ()
    """Other markers that may introduce a call instead of ``section[0]`` and ``begin``."""
    section: tuple[str, str] = ("", "")
    """Texts around all calls of a turn."""
    leaves_out: bool = False
    """Whether models are known to leave the first marker out at times. A later one then begins a call even if it is
    text and the first is a token."""
    between: str = ""
    no_tool: tuple[str, ...] = ()
    """Names that a model writes instead of a tool's name to say that it calls none."""
    name_key: str = "name"
    """Key of the name in a call's object; "" if the object is ``{NAME: OBJECT}``."""
    arguments_key: str = "arguments"
    listed: bool = False
    name_prefix: str = ""
    """Text before each tool's name that does not belong to it."""
    method: str = ""
    """Text behind the name of a tool in calls that a ``json`` family may also write as ``NAME.call(KEY=LITERAL)``."""
    numbered: bool = False
    """Whether the model writes ``:`` and the number of the call behind the name, and prefix, name and number are the
    call's identifier."""
    id_marker: str = ""
    """Marker behind the name that may introduce an identifier, which is read and dropped."""
    after_name: str = ""
    key: str = ""
    after_key: str = ""
    after_value: str = ""
    typed: bool = False
    """Whether ``after_key`` states the type of the value: ``string="true"`` or ``string="false"``."""
    tight: bool = False
    """Whether no white space may stand between ``begin`` and the name."""
    quote: str = ""
    """Marker on both sides of a string, within which nothing is escaped; keys are then unquoted."""

    @property
    def opening(self) -> tuple[str, ...]:
        """Markers before the name or object of a call, in their order; all but the last may be missing. The fence of a
        code block is none, because other text has fences too."""
        return tuple(piece for piece in pieces(f"{self.section[0]}\n{self.begin}") if not piece.startswith("```"))

    @property
    def closing(self) -> tuple[str, ...]:
        """Markers behind a call, in their order; each may be missing."""
        return pieces(f"{self.end}\n{self.section[1]}")

    @property
    def brackets(self) -> bool:
        """Whether the calls of a turn always stand in brackets. Between markers, Python's calls may also do without."""
        return self.listed or (self.style == "pythonic" and not self.opening)

    @property
    def trigger(self) -> str:
        """Marker that only tool calls begin with; "" if the family has none."""
        return next(iter(self.opening), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How one family writes its reasoning. ``name``: what ``--reasoning-parser`` accepts."""

    name: str
    style: ReasoningStyle = "tags"
    begin: str = "<think>"
    end: str = "</think>"
    anywhere: bool = False
    """Whether reasoning may begin in the middle of content; otherwise only before any content and behind a call."""
    ended_by_call: bool = False
    """Whether the marker of a tool call also ends reasoning."""
    around_content: tuple[str, ...] = ()
    """Markers around the content, which are dropped."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one model writes. None: it has no such thing, or its notation is not known.

    ``regions``: what the tokenizer says itself. Outputs are then read by it, and both others serve for grammars."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    regions: RegionFormat | None = None

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are separated from content."""
        return self.tools is not None or (self.regions is not None and self.regions.reads_calls)

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is separated from content."""
        return self.reasoning is not None or (self.regions is not None and self.regions.reasoning is not None)


HERMES = ToolFormat(name="hermes", style="json", begin="<tool_call>\n", end="\n</tool_call>", between="\n")
_LLAMA = ToolFormat(
    name="llama3_json", style="json", also=("<|python_tag|>",), method=".call", between="; ", arguments_key="parameters"
)
_MISTRAL = ToolFormat(
    name="mistral",
    style="named",
    begin="[TOOL_CALLS]",
    id_marker="[CALL_ID]",
    after_name="[ARGS]",
)
_QWEN_CODER = ToolFormat(
    name="qwen3_coder",
    style="parameters",
    begin="<tool_call>\n<function=",
    after_name=">\n",
    key="<parameter=",
    after_key=">\n",
    after_value="\n</parameter>\n",
    end="</function>\n</tool_call>",
    leaves_out=True,
    between="\n",
)
_DEEPSEEK = ToolFormat(
    name="deepseek_v31",
    style="named",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
_MINIMAX = ToolFormat(
    name="minimax_m2",
    style="parameters",
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    begin='<invoke name="',
    after_name='">\n',
    key='<parameter name="',
    after_key='">',
    after_value="</parameter>\n",
    end="</invoke>\n",
)
_DSML = replace(
    _MINIMAX,
    name="deepseek_v32",
    section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    begin='<｜DSML｜invoke name="',
    key='<｜DSML｜parameter name="',
    after_key='" string="true">',
    after_value="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>\n",
    typed=True,
)
_GLM = ToolFormat(
    name="glm45",
    style="parameters",
    begin="<tool_call>",
    after_name="\n",
    key="<arg_key>",
    after_key="</arg_key>\n<arg_value>",
    after_value="</arg_value>\n",
    end="</tool_call>",
    between="\n",
)
_HY = replace(
    _GLM,
    name="hy_v3",
    section=("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
    begin="<tool_call:opensource>",
    after_name="<tool_sep:opensource>\n",
    key="<arg_key:opensource>",
    after_key="</arg_key:opensource>\n<arg_value:opensource>",
    after_value="</arg_value:opensource>\n",
    end="</tool_call:opensource>\n",
    between="",
)
_GEMMA = ToolFormat(
    name="functiongemma",
    style="named",
    begin="<start_function_call>call:",
    quote="<escape>",
    end="<end_function_call>",
)
_PHI = ToolFormat(name="phi4_mini_json", style="json", section=("functools", ""), listed=True, also=("<|tool_call|>",))

_TOOLS = (
    HERMES,
    replace(HERMES, name="granite4"),
    _LLAMA,
    replace(_LLAMA, name="llama4_json", also=("<|python_start|>",)),
    ToolFormat(name="pythonic", style="pythonic"),
    ToolFormat(name="llama4_pythonic", style="pythonic", also=("<|python_start|>",), end="<|python_end|>"),
    ToolFormat(name="lfm2", style="pythonic", begin="<|tool_call_start|>", end="<|tool_call_end|>"),
    ToolFormat(name="olmo3", style="pythonic", begin="<function_calls>", end="</function_calls>"),
    _MISTRAL,
    ToolFormat(name="mistral_list", style="json", section=("[TOOL_CALLS]", ""), listed=True, between=", "),
    _QWEN_CODER,
    replace(_QWEN_CODER, name="qwen3_xml"),
    replace(
        _QWEN_CODER,
        name="seed_oss",
        begin="<seed:tool_call>\n<function=",
        end="</function>\n</seed:tool_call>",
        leaves_out=False,
        after_key=">",
        after_value="</parameter>\n",
    ),
    _DEEPSEEK,
    replace(
        _DEEPSEEK,
        name="deepseek_v3",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        after_name="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
    _DSML,
    replace(
        _DSML,
        name="deepseek_v4",
        section=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
    ),
    _MINIMAX,
    ToolFormat(name="minimax", style="json", section=("<tool_calls>\n", "\n</tool_calls>"), between="\n"),
    ToolFormat(name="hunyuan_a13b", style="json", section=("<tool_calls>", "</tool_calls>"), listed=True, between=", "),
    ToolFormat(name="functionary_v31", style="named", begin="<function=", after_name=">", end="</function>"),
    _GLM,
    replace(_GLM, name="glm47", after_name="", after_key="</arg_key><arg_value>", after_value="</arg_value>"),
    _HY,
    ToolFormat(
        name="kimi_k2",
        style="named",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>",
        name_prefix="functions.",
        numbered=True,
        after_name="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    ToolFormat(
        name="cohere_command3",
        style="json",
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        listed=True,
        between=",\n",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    ToolFormat(
        name="command_r",
        style="json",
        section=("Action: ```json\n", "\n```"),
        listed=True,
        no_tool=("directly-answer", "directly_answer"),
        between=",\n",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    _PHI,
    replace(_PHI, name="phi4_mini", section=("<|tool_call|>", "<|/tool_call|>"), also=("functools",)),
    ToolFormat(
        name="granite",
        style="json",
        section=("<|tool_call|>", ""),
        listed=True,
        between=", ",
        also=("<tool_call>",),
    ),
    ToolFormat(name="granite-20b-fc", style="json", begin="<function_call>", between="\n"),
    ToolFormat(name="gigachat3", style="json", begin="<|function_call|>", also=("function call<|role_sep|>",)),
    ToolFormat(
        name="apertus",
        style="json",
        section=("<|tools_prefix|>", "<|tools_suffix|>"),
        listed=True,
        between=", ",
        name_key="",
        arguments_key="",
    ),
    ToolFormat(name="nemotron_json", style="json", section=("<TOOLCALL>", "</TOOLCALL>"), listed=True, between=", "),
    _GEMMA,
    replace(_GEMMA, name="gemma4", begin="<|tool_call>call:", quote='<|"|>', end="<tool_call|>"),
    ToolFormat(
        name="openai",
        style="channels",
        begin="<|channel|>commentary to=functions.",
        name_prefix="functions.",
        after_name=" <|constrain|>json<|message|>",
        end="<|call|>",
        between="<|start|>assistant",
    ),
)

_REASONING = (
    ReasoningFormat(name="qwen3"),
    ReasoningFormat(name="deepseek_r1"),
    ReasoningFormat(name="glm45"),
    ReasoningFormat(name="minimax_m2"),
    ReasoningFormat(name="kimi_k2", ended_by_call=True),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", anywhere=True, ended_by_call=True),
    ReasoningFormat(name="granite", begin="Here is my thought process:", end="Here is my response:"),
    ReasoningFormat(name="granite_tags", around_content=("<response>", "</response>")),
    ReasoningFormat(
        name="cohere_command3",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        anywhere=True,
        ended_by_call=True,
        around_content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(name="gemma4", begin="<|channel>thought", end="<channel|>", anywhere=True, ended_by_call=True),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(name="hy_v3", begin="<think:opensource>", end="</think:opensource>"),
    ReasoningFormat(
        name="apertus", begin="<|inner_prefix|>", end="<|inner_suffix|>", anywhere=True, ended_by_call=True
    ),
    ReasoningFormat(
        name="openai_gptoss", style="channels", begin="<|channel|>analysis<|message|>", end="<|end|>", anywhere=True
    ),
)

TOOL_FORMATS = {each.name: each for each in _TOOLS}
REASONING_FORMATS = {each.name: each for each in _REASONING} | {"harmony": _REASONING[-1]}


def tool_parser_names() -> list[str]:
    """Return the values of ``--tool-call-parser`` that name a format."""
    return sorted(TOOL_FORMATS)


def reasoning_parser_names() -> list[str]:
    """Return the values of ``--reasoning-parser`` that name a format."""
    return sorted(REASONING_FORMATS)
