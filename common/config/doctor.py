"""Configuration of ``tandem doctor``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from common.config.bench.shared import DEFAULT_OBJECTIVES, LONGEST_TOKENS
from common.config.options import SWITCH, TEXT, OptionKind, option, parse_number
from common.config.up import UpConfig
from common.net.hosts import bracketed, is_unspecified

_WORKLOAD = re.compile(r"([\w.]+):([\w.]+)@(\d+(?:\.\d+)?)")


class WorkloadShape(NamedTuple):
    """A workload: tokens of each prompt and of each answer, and requests per second."""

    prompt_tokens: int
    output_tokens: int
    rate: float


def parse_workload(text: str) -> WorkloadShape:
    """Parse ``IN:OUT@RATE``, such as 1024:128@2 or 4k:256@0.5. Raises ValueError."""
    match = _WORKLOAD.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    shape = WorkloadShape(parse_number(match[1]), parse_number(match[2]), float(match[3]))
    if not (
        1 <= shape.prompt_tokens <= LONGEST_TOKENS and 1 <= shape.output_tokens <= LONGEST_TOKENS and shape.rate > 0
    ):
        raise ValueError(text)
    return shape


def _workload(text: str) -> str:
    parse_workload(text)
    return text


WORKLOAD = OptionKind(
    "IN:OUT@RATE", "tokens of a prompt and of an answer, and requests per second, such as 1024:128@2", _workload
)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(UpConfig):
    """``tandem doctor``: checks what ``tandem up`` with the same options would need, and a running system."""

    url: str | None = option(
        None,
        "URL of a running server to check, too",
        TEXT,
        "client",
        aliases=("--base-url",),
        shown_default="that of --host and --port, if a server runs there",
    )
    links: bool = option(
        False,
        "measure the links between all workers of that server anew, one after another, before they are checked",
        SWITCH,
        "client",
    )
    workload: str | None = option(
        None,
        "also say whether disaggregation pays for this workload on this machine, and with which pools: measures the "
        "model's steps for a minute, and simulates",
        WORKLOAD,
        "workload",
    )
    goodput: str = option(DEFAULT_OBJECTIVES, "latency objectives of --workload, in ms", TEXT, "workload")
    cost: str | None = option(
        None,
        "file of measured step costs for --workload; if it does not exist, they are measured and saved there",
        TEXT,
        "workload",
        shown_default="measured and not saved",
    )
    json: bool = option(False, "print one JSON object instead of text", SWITCH, "results")

    @property
    def server_url(self) -> str:
        """The URL of the server to check."""
        return self.url or f"http://{'127.0.0.1' if is_unspecified(self.host) else bracketed(self.host)}:{self.port}"

    @property
    def shape(self) -> WorkloadShape | None:
        """The workload, None if none is given."""
        return parse_workload(self.workload) if self.workload else None
