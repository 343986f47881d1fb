"""The ways that a request can take through the pools."""

from __future__ import annotations

from typing import Literal

Path = Literal["disagg", "local", "colocated", "prefill"]
"""From prefill to decode; decode alone; a colocated worker; prefill alone, whose token is the last."""
