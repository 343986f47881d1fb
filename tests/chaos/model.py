"""Faults under load with a real model: ``tandem`` processes with torch, and a worker or a link that breaks.

Outputs are judged teacher-forced (:mod:`tests.reference`): prefill and decode compute in different shapes, which
changes the last bits in float32, and more of them in bfloat16. The allowed gap is the time to detect the fault plus the
time to compute again the prompts of all streams of a worker. The latter is measured: during a load without faults, one
client requests a single token after prompts as long as the longest of those, one at a time. A first token may take
longer by the longest wait for one in that load.
"""

from __future__ import annotations

import asyncio
import re
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common.core.request import SamplingParams
from tests.chaos.cluster import FREE_WITHIN_S, ROOT, ChaosCluster, ChaosWorker
from tests.chaos.host import undisturbed
from tests.chaos.load import Break, LoadFigures, answered, only_late, reset_links, signalled, swallow_link
from tests.chaos.request import ChaosRequest, clock
from tests.reference import BFLOAT16, FLOAT32, Reference, Tolerance

BUILTIN = ROOT / "common" / "builtin" / "model"
LOAD_S = 180.0
NOTICED_S, SILENT_S = 0.2, 2.25
"""Time to detect a death or a reset; time to detect silence of a process or a link: 2 s, checked every 0.25 s."""
IN_A_STEP_S = 0.005
"""A step computes for longer without a pause; an idle worker computes for less at a time."""
PROMPTS, OUTPUTS = range(80, 120), range(32, 48)
FLAGS = ("--threads", "1", "--num-kv-blocks", "600", "--max-model-len", "1024", "--no-enable-prefix-caching")
_LISTENS = re.compile(r"^listens at (\S+) as (\S+)$", re.M)
TOLERANCE = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass
class ModelAsk(ChaosRequest):
    """A greedy request whose output is judged by ``reference``."""

    reference: Reference | None = None
    tolerance: Tolerance = FLOAT32

    def verdict(self) -> str:
        if self.error or not self.done:
            return f"error {self.error}" if self.error else "cut"
        assert self.reference is not None
        try:
            assert len(self.ids) == self.max_tokens
            sampling = SamplingParams(seed=self.seed, temperature=0.0, max_tokens=self.max_tokens)
            self.reference.check(self.prompt, self.ids, sampling, tolerance=self.tolerance)
        except AssertionError:
            return "wrong"
        return "right"


class ModelCluster(ChaosCluster):
    """Real workers, as operators start them. They emit no events, so their state comes from the coordinator."""

    def __init__(self, directory: Path, *, model: Path, dtype: str, **options: Any) -> None:
        super().__init__(directory, flags=(*FLAGS, "--dtype", dtype), **options)
        self.model, self.reference, self.tolerance = model, Reference(model), TOLERANCE[dtype]

    def find_model(self) -> None:
        """Do nothing: the model was given."""

    async def start_worker(self, worker: ChaosWorker, *flags: str) -> None:
        worker.control.aim(self.control)
        worker.incarnation, worker.stopped = "", False
        path = self.watched(worker.name)
        path.touch()
        known = len(path.read_text())
        with path.open("ab") as log:
            worker.process = await self._spawn(
                "-m", "tests.chaos.behind", worker.data.address, worker.role, str(self.model), "--name", worker.name,
                "--coordinator", worker.control.address, *worker.flags, *flags,
                stdin=DEVNULL, stdout=log, stderr=STDOUT,
            )  # fmt: skip
        worker.reading = asyncio.ensure_future(self._listen(worker, worker.process, path, known))

    async def _listen(self, worker: ChaosWorker, process: Process, log: Path, known: int) -> None:
        """Read the worker's data address and incarnation from its log, of which ``known`` characters are old, and aim
        its proxy."""

        async def listens() -> Any:
            return _LISTENS.search(log.read_text(), known) or process.returncode is not None

        found = await self.poll(listens, LOAD_S, f"{worker.name} listens")
        if found is not True:
            address, worker.incarnation = found.groups()
            if address != "nothing":
                worker.data.aim(address)
        await process.wait()

    async def until_ready(self, within_s: float = LOAD_S) -> None:
        await super().until_ready(within_s)

    async def until_free(self, within_s: float = FREE_WITHIN_S) -> float:
        async def idle() -> bool:
            shown = (await self.admin()).values()
            return not any(each["kv_blocks"]["held"] or each["running"] for each in shown)

        await self.poll(idle, within_s, "nothing is held")
        return clock()

    async def until_busy(self, worker: ChaosWorker, within_s: float = LOAD_S) -> None:
        """Wait until ``worker`` is in a step: its only thread has computed for ``IN_A_STEP_S`` without waiting, which
        an idle worker never does."""
        deadline, waits, since_s = clock() + within_s, -1, 0.0
        while True:
            computed_s, now_waits = _computed(worker.process.pid)  # type: ignore[union-attr]
            if now_waits != waits:
                waits, since_s = now_waits, computed_s
            elif computed_s - since_s >= IN_A_STEP_S:
                return
            assert clock() < deadline, f"{worker.name} has nothing to do"
            await asyncio.sleep(0.001)

    def ask(self, tokens: int, max_tokens: int, **options: Any) -> ChaosRequest:
        prompt = [self.rng.randrange(self.reference.vocab_size) for _ in range(tokens)]
        judged = {"reference": self.reference, "tolerance": self.tolerance}
        return ModelAsk(prompt, max_tokens, 0, extra={"temperature": 0.0}, **judged, **options)


def _computed(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process's main thread, and the number of its voluntary context switches."""
    task = Path(f"/proc/{pid}/task/{pid}")
    waits = task.joinpath("status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
    return int(task.joinpath("schedstat").read_text().split()[0]) / 1e9, int(waits.split()[0])


async def _prompts_alone(cluster: ModelCluster, load: Sequence[ChaosRequest]) -> float:
    """Return the median time to first token, in seconds, of prompts as long as any that is computed again, while
    ``load`` runs."""
    times = []
    async with cluster.session() as session:
        while not all(ask.ended_at for ask in load):
            ask = await cluster.ask(PROMPTS[-1] + OUTPUTS[-1], 1).send(session)
            times += [at - ask.started_at for at in ask.arrivals[:1]]
    return median(times)


FAULTS: dict[str, tuple[Break | None, float]] = {
    "no fault": (None, 0.0),
    "no fault, again": (None, 0.0),
    "SIGKILL of one decode worker": (signalled("decode-0", signal.SIGKILL), NOTICED_S),
    "SIGKILL of one prefill worker": (signalled("prefill-0", signal.SIGKILL), NOTICED_S),
    "SIGSTOP of one decode worker": (signalled("decode-0", signal.SIGSTOP), SILENT_S),
    "SIGSTOP of one prefill worker": (signalled("prefill-0", signal.SIGSTOP), SILENT_S),
    "reset of every P-D link": (reset_links, NOTICED_S),
    "black hole between one pair": (swallow_link, SILENT_S),
}
"""Each fault, and the time to detect it in seconds."""


async def load(
    directory: Path, model: Path, *, requests: int, at_once: int, dtype: str, only: str = ""
) -> list[LoadFigures]:
    """Run the same requests twice without a fault, and once with each fault whose name contains ``only``.

    In bfloat16 the tokens of a stream may depend on its worker's batches, also without a fault. Therefore the number of
    answers that differ from the first run's is counted in each run; the second run without a fault is the baseline.
    """
    figures: list[LoadFigures] = []
    faults = {name: fault for name, fault in FAULTS.items() if fault[0] is None or only in name}
    async with ModelCluster.running(directory / "model", model=model, dtype=dtype) as cluster:
        asks = [cluster.ask(cluster.rng.choice(PROMPTS), cluster.rng.choice(OUTPUTS)) for _ in range(requests)]
        first, alone = asks, 0.0
        turns = -(-at_once // (len(cluster.by_role("decode")) * len(cluster.by_role("prefill"))))

        async def once(name: str, breaking: Break | None, noticed_s: float) -> LoadFigures:
            nonlocal alone, first
            again = [replace(ask, ids=[], arrivals=[], done=False, ended_at=0.0) for ask in asks]
            queued = figures[0].first_s if figures else 0.0
            # half of the streams move, and each prefill worker recomputes half of these
            done = LoadFigures(name, allowed_gap_s=noticed_s + alone * turns if breaking else 0.0, queued_s=queued)
            run = asyncio.ensure_future(answered(cluster, again, done, breaking, at_once))
            if not figures:
                alone, first = await _prompts_alone(cluster, again), again
            await run
            done.faults["answers unlike the first run's"] = sum(
                ask.ids != before.ids for ask, before in zip(again, first, strict=True)
            )
            await cluster.restore()
            await cluster.until_ready()
            return done

        for name, (breaking, noticed_s) in faults.items():
            figures.append(await undisturbed(partial(once, name, breaking, noticed_s), only_late))
            print(figures[-1].row(), flush=True)
    return figures
