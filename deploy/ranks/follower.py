"""The process of rank 1 or higher of a tensor-parallel worker. It loads its share and computes what rank 0 sends.

It lives as long as rank 0. It ignores SIGINT and SIGTERM, because rank 0 handles them for the whole worker.

    python -m deploy.ranks.follower LABEL PARENT_PID  < {"config": {...}, "rank": 1, ...}
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import msgspec

from common.config.worker import WorkerConfig
from common.core.errors import DeviceLost, StartError
from common.engine.rank_messages import Slab
from common.platform import device, gpu, malloc, threads
from common.platform.log import setup_logging
from common.platform.parent import die_with
from common.platform.wiring import Wiring
from deploy.launcher.status import Reason
from deploy.ranks.channel import FollowerChannel
from deploy.ranks.group import LOADED, PONG, RankLaunch

log = logging.getLogger("tandem.ranks")
_LOOK = "see nvidia-smi and the kernel's log if it happens again"


class Watched:
    """This rank's end of the watch socket: a thread answers rank 0's pings, and methods send reports. The process exits
    when rank 0 closes the socket. ``check`` is called before each answer; DeviceLost ends this rank."""

    def __init__(self, own: socket.socket, rank: str) -> None:
        self._socket, self._rank = own, rank
        self.check: Callable[[], None] = lambda: None
        threading.Thread(target=self._answer, name="rank-watch", daemon=True).start()

    def _answer(self) -> NoReturn:
        threads.answer()
        try:
            while self._socket.recv(1):
                self.check()
                self._socket.send(PONG)
        except OSError:
            pass
        except DeviceLost as lost:
            log.critical("the GPU has failed: %s; this rank ends, and with it the worker", lost)
            self.fail(StartError(f"the GPU of {self._rank} has failed", str(lost), _LOOK))
        os._exit(0)  # rank 0 has ended, and the main thread may wait for it in the middle of a step

    def loaded(self) -> None:
        """Report that this rank computes steps from now on."""
        self._socket.send(LOADED)

    def fail(self, error: StartError) -> NoReturn:
        """Report why this rank cannot go on, and wait until rank 0 kills this process."""
        self._socket.send(msgspec.json.encode(Reason.of(error)))
        while True:
            signal.pause()


class Channel(FollowerChannel):
    """Reports to the watch once the rank can compute, and lets it check the GPU."""

    def __init__(self, own: socket.socket, watched: Watched) -> None:
        super().__init__(own)
        self._watched = watched

    def watch(self, check: Callable[[], None]) -> None:
        self._watched.check = check

    def ready(self, slab: Slab | None) -> None:
        self._watched.loaded()
        super().ready(slab)


def run(launch: RankLaunch, watched: Watched) -> None:
    """Load the share of ``launch`` and compute until rank 0 leaves."""
    config = WorkerConfig(**launch.config)
    malloc.keep_freed()
    machine, _ = device.choose(launch.device)
    if machine.gpu is None:
        device.hide_triton()
    else:
        gpu.number_by_bus()
    device.pin(launch.cores, launch.threads)
    threads.compute()
    from common.attention.registry import Wanted
    from common.checkpoint.files import open_checkpoint
    from common.engine.rank_follower import follow
    from common.model.process_group import connect

    wiring = Wiring(launch.memory, {(one, other): number for one, other, number in launch.signals})
    follow(
        open_checkpoint(config.model, config.revision, config.trust_remote_code),
        connect(launch.rank, launch.size, wiring, machine),
        Channel(socket.socket(fileno=launch.steps), watched),
        machine=machine,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        batch_hint=launch.batch_hint,
        trust_remote_code=config.trust_remote_code,
        attention=Wanted(config.attention, config.prefill_attention, config.decode_attention, config.decode_splits),
        quantization=config.quantization,
        products=config.products,
        kv_cache_dtype=config.kv_cache_dtype,
        gpu_fusion=config.fused_parts,
    )


def main() -> None:
    """Run the process: read the RankLaunch from standard input, compute until rank 0 leaves, and report errors to
    it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    label, parent = sys.argv[1], int(sys.argv[2])
    die_with(parent)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=RankLaunch)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    setup_logging(launch.config["log_level"], launch.config["log_format"], label)
    watched = Watched(socket.socket(fileno=launch.watch), f"rank {launch.rank} of {launch.size}")
    try:
        run(launch, watched)
    except StartError as error:
        watched.fail(error)
    except Exception as error:
        log.exception("%s crashed", label)
        why = f"{type(error).__name__}: {error}"
        todo = "the worker ends with all its ranks; see the log lines above"
        watched.fail(StartError(f"rank {launch.rank} of {launch.size} failed", why, todo))
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
