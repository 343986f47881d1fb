"""``tandem bench quantization``: a checkpoint served as it is and with quantized weights, on the same cores in turn.

Each way is one colocated worker behind its coordinator. All run all the time: a worker uses no CPU when idle. The load
is that of :mod:`bench.load.sides`.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.goals import checkpoint
from bench.load import results
from bench.load.sides import FIGURES, measure, ratio, tandem
from bench.load.tokens import FileTokenizer, ordinary_ids
from common import builtin
from common.config.bench.quantization import BenchQuantizationConfig


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table: the way, what was measured, the value, and its ratio to that of the first way.
    Starts are left out: there is one of each, and the first reads the files."""
    first = next(iter(found.values()))
    return [
        (name, what, f"{each[key] * scale:,.1f} {unit}", f"{ratio(each, first, key):.2f}")
        for what, key, unit, scale in FIGURES
        if key != "start_s"
        for name, each in found.items()
    ]


def run(config: BenchQuantizationConfig) -> int:
    """Print a row for each figure of each way."""
    names = config.way_names
    ids = ordinary_ids(FileTokenizer(builtin.path()))
    with ExitStack() as stack:
        model = config.model or str(checkpoint.make(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        sides = [tandem(stack, model, config.threads, name, ["--quantization", name]) for name in names]
        found = measure(sides, ids, config.rounds)
    print(f"| weights | what | value | ratio to {names[0]} |\n|---|---|---|---|")
    for row in rows(found):
        print(f"| {' | '.join(row)} |", flush=True)
    if config.save:
        results.save(Path(config.save), {"threads": config.threads, "ways": found})
    return 0
