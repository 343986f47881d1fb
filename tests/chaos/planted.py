"""``python -m tests.chaos.planted BUG ...``: the ``tandem`` command with a bug that the harness must detect."""

from __future__ import annotations

import sys
from collections.abc import Callable

from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.record import RequestRecord
from deploy.cli.main import main

QUEUED = "queued requests are kept"


def _keep_queued() -> None:
    abort = Dispatcher.abort

    def abort_if_placed(self: Dispatcher, record: RequestRecord) -> None:
        if not record.queued:
            abort(self, record)

    Dispatcher.abort = abort_if_placed  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {QUEUED: _keep_queued}

if __name__ == "__main__":
    BUGS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
