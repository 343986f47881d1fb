"""Configuration of ``tandem chat``."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.options import (
    TEXT,
    count,
    decimal,
    option,
)
from common.config.shared import ClientOptions


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ClientOptions):
    """``tandem chat``: a chat in the terminal, a client of a running server on any machine."""

    system_prompt: str | None = option(None, "system message of the chat", TEXT, "chat")
    max_tokens: int | None = option(
        None, "maximum length of an answer, in tokens", count(1), "chat", shown_default="what fits the context"
    )
    temperature: float | None = option(
        None, "sampling temperature; 0 is greedy", decimal(0, 2), "chat", shown_default="the server's"
    )
