"""The systems that the goals compare, and the loads they get.

A system is started when a goal first needs it and keeps running for the next goals that need it too, because the peer
takes minutes to start. While another system is measured, Tandem's servers are idle. vLLM's are stopped, because they
use CPU time when idle; in 1P1D, whose workers poll, they use all of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.commands.serve import show_remarks
from bench.load.client import Record, Target
from bench.load.run import Run, run_now
from bench.load.systems import counts, running
from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import PlannedRequest, random_asks
from bench.peers import vllm
from common.core.errors import StartError
from common.net.http_client import HttpClient

MAX_MODEL_LEN = 8192
PLACES, KV_GIB = 128, 2
"""Streams at a time and KV memory of a system; each of two colocated workers has half. A pair's prefill worker has as
much again for prompts that are not handed off yet. The memory holds that many sequences of more than 1,300 tokens of an
82 M-parameter model."""
INPUT, OUTPUT = 1024, 32
"""Prompt and output tokens of a request unless a goal says otherwise."""
_IDS_SEED = 1 << 16
T = TypeVar("T")


@dataclass(frozen=True)
class System:
    """A kind of server: pools of ``tandem up`` (``1p1d``, ``2c``), or ``vllm`` and ``vllm-1p1d``. ``cores`` is the
    number of cores it computes on (0: all), ``budget`` its tokens per step if not the default."""

    kind: str
    cores: int = 0
    budget: int | None = None
    flags: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        """Whether this is vLLM, which runs in the environment ``Field.peers``."""
        return self.kind.startswith("vllm")

    def __str__(self) -> str:
        name = {"vllm": "vLLM colocated", "vllm-1p1d": "vLLM 1P1D"}.get(self.kind, self.kind)
        cores = f" on {self.cores} core{'s' if self.cores > 1 else ''}" if self.cores else ""
        budget = f" with {self.budget} tokens a step" if self.budget else ""
        return " ".join([name + cores + budget, *self.flags])


OURS, OURS_ONE_CORE = System("1p1d"), System("1c", cores=1)
COLOCATED = (System("1c"), System("2c"))
VLLM, VLLM_ONE_CORE, VLLM_1P1D = System("vllm"), System("vllm", cores=1), System("vllm-1p1d")


Rates = dict[System, list[float]]
"""Requests per second of each system, by round."""


def best(found: Mapping[System, Sequence[float]], among: Sequence[System]) -> System:
    """Return the system with the highest median."""
    return max(among, key=lambda system: statistics.median(found[system]))


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    rounds           rounds, each with every system in turn
    hand_offs        requests of each of two systems in turn, for differences smaller than those between rounds
    singles          requests one after another
    requests         requests that are sent all at once
    balanced         the same for a load with equal work for both pools: at least so many, and as many as would take
                     ``balanced_s`` if nothing were ever idle
    paced            requests at each rate of a search: fewer at low rates, those of ``paced_s`` at high ones
    seconds          duration of streams at the pace with which they begin
    streamed_tokens  tokens of a stream
    """

    rounds: int = 3
    hand_offs: int = 90
    singles: int = 10
    requests: int = 96
    balanced: int = 384
    balanced_s: float = 45.0
    paced: int = 40
    paced_s: float = 20.0
    seconds: float = 8.0
    streamed_tokens: int = 128


FULL = Effort()
QUICK = Effort(
    rounds=1, hand_offs=2, singles=2, requests=6, balanced=8, balanced_s=0.0, paced=4, paced_s=0.0, seconds=3.0,
    streamed_tokens=32,
)  # fmt: skip
"""To check that everything runs; its figures mean nothing."""


@dataclass
class Field:
    """Measures ``model`` on ``cores``; ``peers`` is an environment folder with vLLM, or None."""

    model: Path
    cores: tuple[int, ...]
    peers: Path | None
    effort: Effort
    console: Console
    _running: dict[System, tuple[ExitStack, Target]] = field(default_factory=dict)
    _peers: dict[System, vllm.PeerSystem] = field(default_factory=dict)
    _ids: list[int] = field(default_factory=list)
    _seed: int = _IDS_SEED
    remembered: dict[str, Any] = field(default_factory=dict)
    """Measurements that several goals need, by name."""
    broken: dict[System, str] = field(default_factory=dict)
    """Peers that did not start or ended in the middle, and why. They are not tried again; Tandem is measured without
    them."""
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """What can be drawn of the measurements, by name: functions that draw into a file."""

    # -- systems ------------------------------------------------------------------------------------------------------

    def open(self, *wanted: System) -> list[System]:
        """Stop all other systems, start those of ``wanted`` that do not run (no peers without ``peers``), and return
        the running ones in the order in which they are to be measured. Raises StartError if one of Tandem's does not
        start."""
        able = [system for system in wanted if self.peers or not system.is_peer]
        for system in [each for each in self._running if each not in able]:
            self._running.pop(system)[0].close()
        for system in able:
            if system not in self._running and system not in self.broken:
                self.console.print(f"starting {system}", markup=False)
                self.tried(system, self._start)
        return [system for system in able if system in self._running]

    def tried(self, system: System, once: Callable[[System], T]) -> T | None:
        """Return ``once(system)``. If that raises StartError for a peer, the peer is left out from now on, and the
        result is None."""
        try:
            return once(system)
        except StartError as error:
            if not system.is_peer:
                raise
            self.broken[system] = str(error)
            self.console.print(f"{system} is left out: {error}", markup=False)
            if system in self._running:
                self._running.pop(system)[0].close()
            return None

    def _start(self, system: System) -> None:
        with ExitStack() as stack:
            server = stack.enter_context(self.start(system))
            if isinstance(server, vllm.PeerSystem):
                self._peers[system] = server
                stack.callback(self._peers.pop, system)
            target = self._target(server if isinstance(server, str) else server.url, system)
            self._running[system] = (stack, target)
            try:
                self._warm_up(system)
            except BaseException:
                del self._running[system]
                raise
            self._running[system] = (stack.pop_all(), target)

    def start(self, system: System) -> AbstractContextManager[str | vllm.PeerSystem]:
        """Return a context manager that runs a server of this kind and yields its URL, or the PeerSystem of a peer."""
        cores = self.cores[: system.cores] if system.cores else self.cores
        budget = ["--max-num-batched-tokens", str(system.budget)] if system.budget else []
        sharing = 1 if system.is_peer else max(counts(system.kind)[1:])  # workers, decode or colocated
        places, kv_gib = PLACES // sharing, KV_GIB // sharing
        common = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(places), *budget, *system.flags]
        common.append("--no-enable-prefix-caching")
        if system.is_peer:
            assert self.peers is not None
            mode: vllm.Mode = "1p1d" if system.kind == "vllm-1p1d" else "colocated"
            return vllm.running(self.peers, str(self.model), mode, cores, kv_gib=kv_gib, flags=common)
        bound = ["--cpus", ",".join(map(str, cores)), "--kv-cache-memory", f"{kv_gib}GiB"]
        return running(str(self.model), system.kind, [*common, *bound])

    def close(self) -> None:
        """Stop all systems."""
        for stack, _ in self._running.values():
            stack.close()
        self._running.clear()

    def _target(self, url: str, system: System) -> Target:
        extra: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
        if not system.is_peer:
            extra["return_metrics"] = True
        return Target(url, str(HttpClient(url).served(None)["id"]), extra=extra)

    def _warm_up(self, system: System) -> None:
        for lengths in ((64, 8), (1024, 2)):
            good(self.run(system, self.asks(1, *lengths), what="warming up"))

    # -- loads --------------------------------------------------------------------------------------------------------

    def asks(self, count: int, input_tokens: int, output_tokens: int) -> list[PlannedRequest]:
        """Make prompts that no server has seen before."""
        self._seed += 1
        return random_asks(self.ids(), count, input_tokens, output_tokens, seed=self._seed)

    def ids(self) -> list[int]:
        """Return the token ids from which prompts are drawn; reads the model's tokenizer once."""
        if not self._ids:
            self._ids = ordinary_ids(FileTokenizer(self.model))
        return self._ids

    def run(
        self,
        system: System,
        asks: Sequence[PlannedRequest],
        times: Sequence[float] | None = None,
        *,
        concurrency: int | None = None,
        what: str = "",
    ) -> Run:
        """Send ``asks`` at ``times`` (default: all at once), while the other peers are stopped."""
        for each, peer in self._peers.items():
            if each == system:
                peer.resume()
            else:
                peer.pause()
        target = self._running[system][1]
        title = f"{system}: {what}" if what else str(system)
        run = run_now(
            target, asks, times or [0.0] * len(asks), max_concurrency=concurrency, console=self.console, title=title
        )
        show_remarks(self.console, run.records)
        return run

    def alternate(
        self, systems: Sequence[System], once: Callable[[System], T], rounds: int | None = None
    ) -> dict[System, list[T]]:
        """Return the results of ``once`` by system, one per round. Each round has all systems in turn. Peers that fail
        are left out."""
        found: dict[System, list[T]] = {system: [] for system in systems}
        for _ in range(rounds or self.effort.rounds):
            for system in list(found):
                if (each := self.tried(system, once)) is None:
                    del found[system]
                else:
                    found[system].append(each)
        return found

    def remember(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when it was first called under this name."""
        if name not in self.remembered:
            self.remembered[name] = make()
        return self.remembered[name]


@contextmanager
def opened(field: Field) -> Iterator[Field]:
    """Yield ``field``, and stop its systems at the end."""
    try:
        yield field
    finally:
        field.close()


def whole(run: Run) -> Run:
    """Return ``run`` if all of its requests were answered. Raises StartError if not: requests that failed leave more of
    the machine to the others."""
    failed = [record for record in run.records if not record.ok]
    if failed:
        raise StartError(
            f"{len(failed)} of {len(run.records)} requests failed", failed[0].error, "try the system alone"
        )
    return run


def good(run: Run) -> list[Record]:
    """Return the records of the answered requests. Raises StartError if there are none."""
    found = [record for record in run.records if record.ok]
    if not found:
        raise StartError("no request was answered", run.records[0].error, "try the system alone")
    return found
