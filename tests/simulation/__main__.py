"""``python -m tests.simulation``: plays many histories and prints the seeds that fail.

--seeds 0:2000           a range of seeds, or one seed, whose full traceback is shown
--jobs N                 number of processes
--keep FILE              store the progress; the same command continues from there if the code
                             is the same
--report FILE            write a summary
--mutation NAME          inject a known bug; succeeds if a seed fails with one of its symptoms
--golden                 also fail a history that differs from the frozen one (tests/golden)
--trace                  print every message that arrives; --log prints the parts' log messages
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

from common.net.wire import DIGEST_BYTES
from tests.golden import histories
from tests.golden.store import Digest
from tests.simulation.mutations import MUTATIONS, brought_back
from tests.simulation.network import SimulatedConnection
from tests.simulation.play import HistoryOutcome, run

ROOT = Path(__file__).parents[2]
CHUNK = 20
LITTER = 5
"""Number of histories between garbage collections."""
Failure = tuple[int, str]


def main() -> int:
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the iteration order of sets is part of a history
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    logging.basicConfig(level=logging.DEBUG if options.log else logging.WARNING, format="%(name)s: %(message)s")
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.trace:
        _trace()
    gc.freeze()  # permanent objects need not be scanned in every history
    gc.disable()  # collected only between histories, every LITTER of them
    if options.mutation:
        return _mutated(options.mutation, seeds, options.jobs)
    frozen = histories.kept() if options.golden else {}
    return _histories(seeds, 1 if len(seeds) == 1 else options.jobs, options.keep, options.report, frozen)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--mutation", choices=MUTATIONS)
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--log", action="store_true")
    return parser.parse_args()


def _histories(seeds: range, jobs: int, keep: Path | None, report: Path | None, frozen: dict[str, Digest]) -> int:
    total, failures, began = HistoryOutcome(), list[Failure](), time.monotonic()
    start, sources = seeds.start, _sources()
    if keep is not None and keep.exists():
        kept = json.loads(keep.read_text())
        if kept["first"] == seeds.start and kept["sources"] == sources:  # other code gives other histories
            total, failures, start = HistoryOutcome.of(kept["outcome"]), kept["failures"], kept["next"]
            print(f"seeds {seeds.start} to {start - 1} were played before, by the same code (delete {keep} to restart)")
    chunks = [range(at, min(at + CHUNK, seeds.stop)) for at in range(start, seeds.stop, CHUNK)]
    play = functools.partial(_chunk, frozen)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(jobs)) if jobs > 1 else None
        results: Iterable[tuple[HistoryOutcome, list[Failure]]] = pool.map(play, chunks) if pool else map(play, chunks)
        for chunk, (outcome, failed) in zip(chunks, results, strict=True):
            total.add(outcome)
            failures += failed
            if keep is not None:
                kept = {
                    "sources": sources,
                    "first": seeds.start,
                    "next": chunk.stop,
                    "outcome": vars(total),
                    "failures": failures,
                }
                keep.with_suffix(".part").write_text(json.dumps(kept))
                keep.with_suffix(".part").replace(keep)
    for seed, text in failures[:20]:
        print(f"seed {seed}: {text}")
    reported = [f"{len(seeds):,} histories; failed: {[seed for seed, _ in failures] or 'none'}", *_summary(total)]
    print(*reported, f"{seeds.stop - start:,} of them now, in {time.monotonic() - began:.1f} s", sep="\n")
    if report is not None:
        words = f"`python -m tests.simulation --seeds {seeds.start}:{seeds.stop}`, {date.today()}, sources {sources}"
        report.write_text("\n".join(["# Simulation", "", words, "", *(f"- {line}" for line in reported)]) + "\n")
    return 1 if failures else 0


def _summary(total: HistoryOutcome) -> list[str]:
    ends = ", ".join(f"{count:,} {how}" for how, count in total.ends.most_common())
    faults = ", ".join(f"{count:,} {fault}" for fault, count in total.faults.most_common())
    return [
        f"{total.ends.total():,} requests, {total.tokens:,} tokens: {ends}",
        f"{total.faults.total():,} faults: {faults}",
        f"longest pause of a stream {total.longest_gap:.2f} s (seed {total.widest}), {total.seconds:,.0f} s simulated",
    ]


def _sources() -> str:
    """Return a digest of all our source files that are imported, and so may affect a history."""
    found = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(file) for file in found if file}
    ours = sorted(file for file in files if file.is_relative_to(ROOT) and sys.prefix not in map(str, file.parents))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in ours), digest_size=8).hexdigest()


def _chunk(frozen: dict[str, Digest], seeds: range) -> tuple[HistoryOutcome, list[Failure]]:
    total, failures = HistoryOutcome(), list[Failure]()
    for seed in seeds:
        if seed % LITTER == 0:
            gc.collect()
        try:
            with histories.recorded() if frozen else contextlib.nullcontext([]) as lines:
                total.add(run(seed))
            if words := histories.changed(frozen, seed, lines):
                failures.append((seed, words))
        except Exception as error:
            lines = traceback.format_exception(error)
            failures.append((seed, "".join(lines[-4:]) if len(seeds) > 1 else "".join(lines)))
    return total, failures


def _mutated(name: str, seeds: range, jobs: int) -> int:
    """Play histories with the bug ``name`` until one fails with one of its symptoms; return the exit code."""
    symptoms = [symptom for mutation in MUTATIONS[name] for symptom in mutation.symptoms]
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for seed, error in zip(seeds, pool.map(functools.partial(_noticed, name), seeds), strict=True):
                if any(symptom in error for symptom in symptoms):
                    print(f"{name}: caught by seed {seed}: {error[:300]}")
                    return 0
                if error:
                    print(f"seed {seed} fails for another reason: {error[:300]}")
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"{name}: not caught by {len(seeds)} seeds; expected {' or '.join(map(repr, symptoms))}")
    return 1


def _noticed(name: str, seed: int) -> str:
    """Play one history with the bug; return the error, or "" if it passes."""
    with brought_back(name):
        try:
            run(seed)
        except Exception as error:
            return str(error) or repr(error)
    return ""


def _trace() -> None:
    arrive = SimulatedConnection._arrive

    def traced(self: SimulatedConnection, receiver: object, parts: list[bytes]) -> None:
        ends = f"{self.dealer.process.name} and {self.router.process.name}"
        print(f"{self.network.clock.now:.6f} {ends}: {parts[-1][DIGEST_BYTES:][:80].hex()}")
        arrive(self, receiver, parts)

    SimulatedConnection._arrive = traced  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    sys.exit(main())
