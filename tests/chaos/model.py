"""The same with a model: real ``tandem`` processes, torch, float32, and a worker killed under load.

Outputs are judged teacher-forced (:mod:`tests.reference`), since float32 differs in its last bits between the shapes in
which prefill and decode compute. What a gap may last is measured: noticing a death, and computing again the prompts of
all streams that a worker had. For that, one client asks for a single token after prompts as long as the longest of
those, one at a time, in the middle of the undisturbed load.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.request import SamplingParams
from tests.chaos.house import FREE_WITHIN_S, ROOT, Ask, House, Worker, clock
from tests.chaos.load import Break, Figures, scenario, signalled
from tests.reference import Reference

BUILTIN = ROOT / "common" / "builtin" / "model"
LOAD_S = 180.0
NOTICED_S = 0.2
PROMPTS, OUTPUTS = range(80, 120), range(32, 48)
FLAGS = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "600", "--max-model-len", "1024")


@dataclass
class ModelAsk(Ask):
    """Greedy, judged by ``reference``."""

    reference: Reference | None = None

    def verdict(self) -> str:
        if self.error or not self.done:
            return f"error {self.error}" if self.error else "cut"
        assert self.reference is not None
        try:
            assert len(self.ids) == self.max_tokens
            self.reference.check(self.prompt, self.ids, SamplingParams(temperature=0.0, max_tokens=self.max_tokens))
        except AssertionError:
            return "wrong"
        return "right"


class ModelHouse(House):
    """Workers as operators start them; they tell nothing beside what the coordinator shows of them."""

    def __init__(self, directory: Path, *, model: Path, **options: Any) -> None:
        super().__init__(directory, flags=FLAGS, **options)
        self.model, self.reference = model, Reference(model)

    def find_model(self) -> None:
        """It was given."""

    async def start_worker(self, worker: Worker, *flags: str) -> None:
        worker.control.aim(self.control)
        with (self.directory / f"{worker.name}.log").open("ab") as log:
            worker.process = await self._spawn(
                "-m", "deploy.cli", worker.role, str(self.model), "--name", worker.name,
                "--coordinator", worker.control.address, *worker.flags, *flags,
                stdin=DEVNULL, stdout=log, stderr=STDOUT,
            )  # fmt: skip
        worker.reading = asyncio.ensure_future(_gone(worker.process))

    async def until_ready(self, within_s: float = LOAD_S) -> None:
        async def ready() -> bool:
            shown = await self.admin()
            return all(name in shown and shown[name]["state"] == "ready" for name in self.workers)

        await self.poll(ready, within_s, f"every worker is ready (logs in {self.directory})")

    async def until_free(self, within_s: float = FREE_WITHIN_S) -> float:
        async def idle() -> bool:
            shown = (await self.admin()).values()
            return not any(each["kv_blocks"]["held"] or each["running"] for each in shown)

        await self.poll(idle, within_s, "nothing is held")
        return clock()

    def ask(self, tokens: int, max_tokens: int, **options: Any) -> Ask:
        prompt = [self.rng.randrange(self.reference.vocab_size) for _ in range(tokens)]
        return ModelAsk(prompt, max_tokens, 0, extra={"temperature": 0.0}, reference=self.reference, **options)


async def _gone(process: Process) -> None:
    await process.wait()


async def _prompts_alone(house: ModelHouse, load: asyncio.Future[Figures]) -> float:
    """Median seconds to the first token of a prompt as long as any that is computed again, while ``load`` runs."""
    times = []
    async with house.session() as session:
        while not load.done():
            ask = await house.ask(PROMPTS[-1] + OUTPUTS[-1], 1).send(session)
            times += [at - ask.started_at for at in ask.arrivals[:1]]
    return median(times)


async def load(directory: Path, model: Path, *, requests: int, at_once: int) -> list[Figures]:
    """No fault, a decode and a prefill worker killed."""
    figures: list[Figures] = []
    faults: dict[str, Break | None] = {
        "no fault": None,
        "SIGKILL of one decode worker": signalled("decode-0", signal.SIGKILL),
        "SIGKILL of one prefill worker": signalled("prefill-0", signal.SIGKILL),
    }
    async with ModelHouse.running(directory / "model", model=model) as house:
        allowed = alone = 0.0
        for name, breaking in faults.items():
            run = asyncio.ensure_future(
                scenario(
                    house,
                    name,
                    breaking,
                    requests=requests,
                    at_once=at_once,
                    allowed_gap_s=allowed,
                    sizes=(PROMPTS, OUTPUTS),
                )
            )
            if breaking is None:
                alone = await _prompts_alone(house, run)
            done = await run
            turns = -(-at_once // (len(house.by_role("decode")) * len(house.by_role("prefill"))))
            allowed = NOTICED_S + alone * turns  # half of the streams move, and each prefill worker takes half of those
            print(done.row(), flush=True)
            figures.append(done)
            await house.restore()
            await house.until_ready()
    return figures
