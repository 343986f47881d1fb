"""Skip conditions for tests that need certain features of the operating system."""

from __future__ import annotations

import platform

import pytest

_LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
needs_populate = pytest.mark.skipif(_LINUX < (5, 14), reason="MADV_POPULATE_WRITE came with Linux 5.14")
