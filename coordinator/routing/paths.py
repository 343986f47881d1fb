"""The paths of a request through the worker pools."""

from __future__ import annotations

from typing import Literal

Path = Literal["disagg", "local", "colocated", "prefill"]
"""``disagg``: prefill worker, then decode worker. ``local``: a decode worker computes the prompt too. ``colocated``:
one colocated worker. ``prefill``: a prefill worker alone, since its first token ended the request or at most one was
requested."""
