"""The memory of frames is reused, so that frames do not fault in new pages each time."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys

import pytest

from tests.pace import scaled

FRAMES, FRAME_BYTES, ROUNDS = 16, 1 << 20, 50
_CHURN = f"""
import resource, sys
from common.platform import malloc
if sys.argv[1] == "kept":
    assert malloc.keep_freed()
def once():
    held = [bytearray(b"x") * {FRAME_BYTES} for _ in range({FRAMES})]
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Return the page faults of a process that repeatedly allocates and frees the memory of a transfer's frames."""
    done = subprocess.run(
        [sys.executable, "-c", _CHURN, way], capture_output=True, text=True, check=True, timeout=scaled(60)
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other habits")
def test_pages_of_frames_are_faulted_in_once() -> None:
    pages = FRAMES * FRAME_BYTES // mmap.PAGESIZE
    assert faults("default") > ROUNDS * pages // 2, "the control: glibc gives them back each time"
    assert faults("kept") < pages
