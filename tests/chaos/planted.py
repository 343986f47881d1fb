"""``python -m tests.chaos.planted BUG ...``: the ``tandem`` command with a bug, which the harness must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable

from coordinator import registry
from deploy.cli import main

SILENCE = "silence is noticed late"
SILENCE_S = 6.0


def _notice_silence_late() -> None:
    registry.SILENCE_S = SILENCE_S


BUGS: dict[str, Callable[[], None]] = {SILENCE: _notice_silence_late}

if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
