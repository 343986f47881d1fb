"""``python -m tests.chaos.behind HOST:PORT ...``: the ``tandem`` command with its worker behind a proxy.

The worker logs its listening address and incarnation, and advertises HOST:PORT to the coordinator as its data address.
"""

from __future__ import annotations

import sys

import msgspec

from common.net.messages import Hello
from common.worker.loop import Worker
from decode.role import DecodeWorker
from deploy.cli.main import main
from prefill.role import PrefillWorker


def _stand_behind(role: type[Worker], proxy: str) -> None:
    introduce = role.introduce

    def introduce_the_proxy(self: Worker, hello: Hello) -> Hello:
        hello = introduce(self, hello)
        print(f"listens at {hello.data_address or 'nothing'} as {hello.incarnation}", flush=True)
        return msgspec.structs.replace(hello, data_address=hello.data_address and f"tcp://{proxy}")

    role.introduce = introduce_the_proxy  # type: ignore[method-assign]


if __name__ == "__main__":
    for each in (DecodeWorker, PrefillWorker):
        _stand_behind(each, sys.argv[1])
    sys.exit(main(sys.argv[2:]))
