"""The output format of one model: chosen by the operator, or found out from its chat template."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple
from itertools import chain
from typing import TypeVar

from common.core.errors import StartError
from coordinator.output.detection import detect
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.output.regions import RegionFormat
from coordinator.requests.spec import ChatBody
from coordinator.text.templates import DEFAULT, TOOL_USE
from coordinator.text.traced import Traced, origins

Format = TypeVar("Format")
AUTO, NONE = "auto", "none"
_TAIL_CHARS = 256
"""Characters at the end of a prompt among which a marker of reasoning is looked for."""


def choose_format(
    sources: Mapping[str, str],
    tokens: Collection[str],
    response_template: object,
    tool_call_parser: str,
    reasoning_parser: str,
) -> OutputFormat:
    """Return the format of a model with the chat templates ``sources``, the added tokens ``tokens`` and the
    ``response_template`` of its ``tokenizer_config.json``, None if there is none. ``tool_call_parser`` and
    ``reasoning_parser``: the options of these names. Raises StartError for an unknown name."""
    source = sources.get(TOOL_USE) or sources.get(DEFAULT)
    found = OutputFormat() if source is None else detect(source, tokens, response_template)
    if tool_call_parser == reasoning_parser == AUTO:
        return found
    return OutputFormat(
        _chosen("--tool-call-parser", tool_call_parser, TOOL_FORMATS, found.tools),
        _chosen("--reasoning-parser", reasoning_parser, REASONING_FORMATS, found.reasoning),
    )


def _chosen(flag: str, name: str, formats: Mapping[str, Format], found: Format | None) -> Format | None:
    if name == AUTO:
        return found
    if name != NONE and name not in formats:
        known = ", ".join(sorted(formats))
        raise StartError(f"{flag} {name} is unknown", "there is no parser of this name", f"give {known}, none or auto")
    return formats.get(name)


def marker_tokens(format: OutputFormat, tokens: Collection[str]) -> set[str]:
    """Return those of ``tokens`` that are markers of tool calls. A client must not be able to forge them."""
    if format.regions is not None:
        return {token for token in tokens if len(token) > 1 and format.regions.marks(token)}
    if format.tools is None:
        return set()
    values = [value if isinstance(value, tuple) else (value,) for value in astuple(format.tools)]
    texts = [text.strip() for text in chain.from_iterable(values) if isinstance(text, str)]
    return {
        token for token in tokens if len(token) > 1 and not token.isalnum() and any(token in text for text in texts)
    }


def ends_in_reasoning(prompt: Traced, body: ChatBody, format: OutputFormat) -> bool:
    """Return whether the output continues reasoning that ``prompt``, the rendered ``body``, has opened: by a marker
    that the template wrote at its end, or in the final message that the output continues."""
    reasoning = format.reasoning
    if format.regions is not None:
        return _opens_region(prompt, body, format.regions)
    if reasoning is None or not (marker := reasoning.begin.strip()):
        return False
    if body.continue_final_message:
        said = str(body.messages[-1]["content"])
        return said.rfind(marker) > said.rfind(reasoning.end.strip())
    tail = prompt[-_TAIL_CHARS:].rstrip()
    return tail.endswith(marker) and b"\0" not in origins(tail[-len(marker) :])


def _opens_region(prompt: Traced, body: ChatBody, regions: RegionFormat) -> bool:
    if body.continue_final_message:
        return regions.reasoning_opened(str(body.messages[-1]["content"])[-_TAIL_CHARS:]) >= 0
    tail = prompt[-_TAIL_CHARS:]
    at = regions.reasoning_opened(tail)
    return at >= 0 and b"\0" not in origins(tail[at:])
