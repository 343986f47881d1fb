"""The same with a model: real ``tandem`` processes, torch, and a worker or a link that breaks under load.

Outputs are judged teacher-forced (:mod:`tests.reference`), since float32 differs in its last bits between the shapes in
which prefill and decode compute, and bfloat16 in more. What a gap may last is what noticing takes, and what is
measured: computing again the prompts of all streams that a worker had. For that, one client asks for a single token
after prompts as long as the longest of those, one at a time, in the middle of the undisturbed load. A first token may
take on top what it takes there at most.
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
from tests.chaos.host import undisturbed
from tests.chaos.house import FREE_WITHIN_S, ROOT, Ask, House, Worker, clock
from tests.chaos.load import Break, Figures, answered, only_late, reset_links, signalled, swallow_link
from tests.reference import BFLOAT16, FLOAT32, Reference, Tolerance

BUILTIN = ROOT / "common" / "builtin" / "model"
LOAD_S = 180.0
NOTICED_S, SILENT_S = 0.2, 2.25
"""A death or a reset is noticed so soon; silence, of a process or a link, after 2 s by a look every 0.25 s."""
IN_A_STEP_S = 0.005
"""Steps compute for longer, a worker without work for less at a time."""
PROMPTS, OUTPUTS = range(80, 120), range(32, 48)
FLAGS = ("--threads", "1", "--num-kv-blocks", "600", "--max-model-len", "1024", "--no-enable-prefix-caching")
_LISTENS = re.compile(r"^listens at (\S+) as (\S+)$", re.M)
TOLERANCE = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass
class ModelAsk(Ask):
    """Greedy, judged by ``reference``."""

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


class ModelHouse(House):
    """Workers as operators start them; they tell nothing beside what the coordinator shows of them."""

    def __init__(self, directory: Path, *, model: Path, dtype: str, **options: Any) -> None:
        super().__init__(directory, flags=(*FLAGS, "--dtype", dtype), **options)
        self.model, self.reference, self.tolerance = model, Reference(model), TOLERANCE[dtype]

    def find_model(self) -> None:
        """It was given."""

    async def start_worker(self, worker: Worker, *flags: str) -> None:
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

    async def _listen(self, worker: Worker, process: Process, log: Path, known: int) -> None:
        """Learns from the log, ``known`` characters of which are old, where its proxy leads and who it is."""

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

    async def until_busy(self, worker: Worker, within_s: float = LOAD_S) -> None:
        """It is in a step: its one thread computes without a pause, which it does for a moment only when it looks about
        in vain."""
        deadline, waits, since_s = clock() + within_s, -1, 0.0
        while True:
            computed_s, now_waits = _computed(worker.process.pid)  # type: ignore[union-attr]
            if now_waits != waits:
                waits, since_s = now_waits, computed_s
            elif computed_s - since_s >= IN_A_STEP_S:
                return
            assert clock() < deadline, f"{worker.name} has nothing to do"
            await asyncio.sleep(0.001)

    def ask(self, tokens: int, max_tokens: int, **options: Any) -> Ask:
        prompt = [self.rng.randrange(self.reference.vocab_size) for _ in range(tokens)]
        judged = {"reference": self.reference, "tolerance": self.tolerance}
        return ModelAsk(prompt, max_tokens, 0, extra={"temperature": 0.0}, **judged, **options)


def _computed(pid: int) -> tuple[float, int]:
    """Seconds for which its main thread has had a core, and how often it gave one back to wait for something."""
    task = Path(f"/proc/{pid}/task/{pid}")
    waits = task.joinpath("status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
    return int(task.joinpath("schedstat").read_text().split()[0]) / 1e9, int(waits.split()[0])


async def _prompts_alone(house: ModelHouse, load: Sequence[Ask]) -> float:
    """Median seconds to the first token of a prompt as long as any that is computed again, while ``load`` runs."""
    times = []
    async with house.session() as session:
        while not all(ask.ended_at for ask in load):
            ask = await house.ask(PROMPTS[-1] + OUTPUTS[-1], 1).send(session)
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
"""What breaks, and how soon that is noticed."""


async def load(
    directory: Path, model: Path, *, requests: int, at_once: int, dtype: str, only: str = ""
) -> list[Figures]:
    """The same requests without a fault, twice, and with each fault whose name has ``only`` in it.

    In bfloat16 a stream that moved may go on otherwise than one that stayed, and so may one that was batched with
    others: what is counted is how many answers differ from the first run's (the first-divergence rate), beside the
    second undisturbed run, which shows how many differ without any fault.
    """
    figures: list[Figures] = []
    faults = {name: fault for name, fault in FAULTS.items() if fault[0] is None or only in name}
    async with ModelHouse.running(directory / "model", model=model, dtype=dtype) as house:
        asks = [house.ask(house.rng.choice(PROMPTS), house.rng.choice(OUTPUTS)) for _ in range(requests)]
        first, alone = asks, 0.0
        turns = -(-at_once // (len(house.by_role("decode")) * len(house.by_role("prefill"))))

        async def once(name: str, breaking: Break | None, noticed_s: float) -> Figures:
            nonlocal alone, first
            again = [replace(ask, ids=[], arrivals=[], done=False, ended_at=0.0) for ask in asks]
            queued = figures[0].first_s if figures else 0.0
            # half of the streams move, and each prefill worker takes half of those
            done = Figures(name, allowed_gap_s=noticed_s + alone * turns if breaking else 0.0, queued_s=queued)
            run = asyncio.ensure_future(answered(house, again, done, breaking, at_once))
            if not figures:
                alone, first = await _prompts_alone(house, again), again
            await run
            done.faults["answers unlike the first run's"] = sum(
                ask.ids != before.ids for ask, before in zip(again, first, strict=True)
            )
            await house.restore()
            await house.until_ready()
            return done

        for name, (breaking, noticed_s) in faults.items():
            figures.append(await undisturbed(partial(once, name, breaking, noticed_s), only_late))
            print(figures[-1].row(), flush=True)
    return figures
