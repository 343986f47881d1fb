"""``tandem bench pages``: write the tables of the benchmark pages from the files of bench/results.

A page has a pair of markers for each table, ``<!-- table: NAME MACHINE -->`` and ``<!-- /table -->``. The lines between
them are replaced by that table, made from the files in the folder of that machine. A test compares pages and files.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.goals import figures
from bench.load import results
from common.config.bench.pages import BenchPagesConfig
from common.core.errors import StartError

MARKED = re.compile(r"(<!-- table: ([\w-]+) (\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
Table = Callable[[Path], list[str]]
"""Makes the lines of a table from the folder of a machine."""


def run(config: BenchPagesConfig) -> int:
    """Rewrite the pages and print the names of those that changed. Raise StartError for a table that is unknown, or
    whose file is not there."""
    for page in sorted(Path(config.docs).glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = with_tables(before, Path(config.results))
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page)
    return 0


def with_tables(text: str, folder: Path) -> str:
    """Return the page ``text`` with each table as the files in ``folder`` give it now."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, machine, end = match.groups()
        try:
            lines = TABLES[name](folder / machine)
        except KeyError as error:
            raise StartError(f"no table {name} {machine}", f"{error} is unknown", "correct the marker") from error
        except OSError as error:
            raise StartError(f"no table {name} {machine}", str(error), "correct the marker") from error
        return "\n".join([begin.rstrip("\n"), "", *lines, "", end])

    return MARKED.sub(replaced, text)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(map(str, cells))} |" for cells in lines]


def runs(folder: Path) -> list[str]:
    """Return the date, commit and command of every run in the folder."""
    found = []
    for path in sorted(folder.glob("*.json")):
        kept = results.load(path)
        for name, each in ({"": kept} if "date" in kept else kept).items():
            file = f"{path.name}#{name}" if name else path.name
            date = f"{each['date'][:4]}-{each['date'][4:6]}-{each['date'][6:8]}"
            found.append((f"`{file}`", date, each["commit"], f"`{each['command']}`"))
    return markdown(("run", "date", "commit", "command, as it was then"), found)


# -- goals ------------------------------------------------------------------------------------------------------------


def goals(folder: Path) -> list[str]:
    """Return the table of goals without its notes, which are in the file."""
    rows = [figures.of_json(each) for each in results.load(folder / "goals.json")["rows"]]
    return [line for line in figures.table(rows) if line.startswith("|")]


def pauses(folder: Path) -> list[str]:
    """Return what long prompts do to running streams (C8): medians over the rounds of each system."""
    rows = [row for row in results.load(folder / "goals.json")["rows"] if row["goal"] == "C8"]
    detail = rows[0]["detail"]
    found = []
    for system in detail["longest_s"]:
        usual, disturbed, longest_s, first_s = (
            statistics.median(detail[name][system]) for name in ("undisturbed_p99", "p99", "longest_s", "first_token_s")
        )
        found.append((system, f"{usual:.2f}", f"{disturbed:.2f}", f"{1000 * longest_s:,.0f}", f"{1000 * first_s:,.0f}"))
    titles = ("system", "P99 gap, undisturbed", "P99 gap", "longest gap, ms", "TTFT of the long prompts, ms")
    return markdown(titles, found)


# -- loads ------------------------------------------------------------------------------------------------------------


def compare(folder: Path) -> list[str]:
    """Return medians over the rounds of each system under each load, and the advice."""
    rows: list[tuple[object, ...]] = []
    advice = [""]
    for name, kept in results.load(folder / "compare.json").items():
        first = f"{_load(kept['load'])}; {_objectives(kept)}"
        for system, each in kept["systems"].items():
            inside, *times = (
                statistics.median(found[key] for found in each["rounds"])
                for key in ("slo_attainment", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
            )
            rows.append((name, first, system, f"{inside:.0%}", *(f"{ms:,.0f}" for ms in times)))
            name = first = ""
        advice.append(f"- {_load(kept['load'])}: {kept['advice'][0]}")
    titles = ("run", "load", "system", "inside", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    return [*markdown(titles, rows), *advice]


def _load(load: dict[str, Any]) -> str:
    """Describe a load in a few words."""
    if load["dataset_name"] != "random":
        return f"{load['dataset_name']} trace at 1/{load['time_scale']:g} of its pace"
    return f"{load['random_input_len']:,}/{load['random_output_len']} tokens at {load['request_rate']:g} req/s"


def _objectives(kept: dict[str, Any]) -> str:
    return ", ".join(f"{name.upper()} {ms:,.0f} ms" for name, ms in kept["objectives_ms"].items())


def plan(folder: Path) -> list[str]:
    """Return the planned figures as a share of the measured ones."""
    keys = {"inside": "inside", "ttft_p50": "TTFT p50", "itl_p50": "ITL p50", "itl_p99": "ITL p99", "output": "output"}
    return markdown(
        ("load", "system", *keys.values()),
        [
            (_load(kept["load"]), system, *(f"{ratios[key]:.2f}" for key in keys))
            for kept in results.load(folder / "plan.json").values()
            for system, ratios in kept["planned_over_measured"].items()
        ],
    )


def batching(folder: Path) -> list[str]:
    """Return the rates of continuous and static batching."""
    kept = results.load(folder / "micro.json#batching")
    rates = kept["useful_tokens_per_s"]
    rows = [(way, *(f"{rate:.0f}" for rate in each)) for way, each in rates.items()]
    rows.append(("ratio", *(f"{ratio:.2f}" for ratio in kept["ratios"])))
    return markdown(("useful tokens per second", *(f"round {number}" for number in (1, 2, 3))), rows)


# -- kernels ----------------------------------------------------------------------------------------------------------


def attention(folder: Path) -> list[str]:
    """Return the rate of decode attention by batch and context, its share of what a loop reads, and its gain."""
    found = results.load(folder / "kernels.json#bfloat16")["attention"]
    contexts = sorted({each["context"] for each in found})
    cells = {
        (each["batch"], each["context"]): f"{each['bytes_per_s'] / 1e9:.1f} GB/s, {each['share']:.0%},"
        f" {each['times_torch']:.1f} ×"
        for each in found
    }
    rows = [(batch, *(cells[batch, at] for at in contexts)) for batch in sorted({batch for batch, _ in cells})]
    return markdown(("batch", *(f"context {at:,}" for at in contexts)), rows)


def linear(folder: Path) -> list[str]:
    """Return how many times as fast as torch's the linear layers are, and their share of the limit, for each run."""
    kept = results.load(folder / "kernels.json")
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for name, each in kept.items():
        for layer in each["linear"]:
            weights = "int8" if layer["int8"] else "bfloat16, kept" if "kept" in layer["way"] else layer["dtype"]
            cell = f"{layer['times_torch']:.2f} ×, {layer['share']:.0%}"
            cells.setdefault((weights, layer["rows"]), {})[name] = cell
    rows = [(*key, *(cells[key].get(name, "") for name in kept)) for key in sorted(cells)]
    return markdown(("weights", "rows", *kept), rows)


def roofline(folder: Path) -> list[str]:
    """Return the read, copy and link rates of the machine."""
    kept = results.load(folder / "micro.json#roofline")
    rows = [(f"read {mib} MiB", rate) for mib, rate in kept["read_bytes_per_s"].items() if mib in ("1", "32", "256")]
    rows += [("copy in memory", kept["copy_bytes_per_s"]["memcpy"])]
    rows += [(f"{name}, no protocol", kept["copy_bytes_per_s"][name]) for name in ("shared memory", "loopback socket")]
    rows += [(f"KV hand-off over {name}", each["bytes_per_s"]) for name, each in kept["links"].items()]
    return markdown(("one thread", "GB/s"), [(name, f"{rate / 1e9:.1f}") for name, rate in rows])


# -- experiments ------------------------------------------------------------------------------------------------------


def wire(folder: Path) -> list[str]:
    """Return the rate of a whole KV transfer by link."""
    rows = []
    for name, rates in results.load(folder / "micro.json#wire")["bytes_per_s"].items():
        shown = (statistics.median(rates), min(rates), max(rates))
        rows.append((name, *(f"{rate / 1e9:.1f}" for rate in shown)))
    return markdown(("link", "GB/s, median", "slowest", "fastest"), rows)


def lent_core(folder: Path) -> list[str]:
    """Return the duration of steps with and without a lent core."""
    rows = []
    for name, each in results.load(folder / "micro.json#lent-core")["steps"].items():
        alone, helped = each["alone_s"], each["helped_s"]
        rows.append((name, f"{1000 * alone:.1f} ms", f"{1000 * helped:.1f} ms", f"{alone / helped:.2f}"))
    return markdown(("step", "alone", "with a lent core", "times as fast"), rows)


def control_latency(folder: Path) -> list[str]:
    """Return median and P99 round trips of control messages in each phase."""
    rows = []
    for name in ("control-latency", "control-latency-encrypted"):
        kept = results.load(folder / f"micro.json#{name}")
        for phase, ends in kept["round_trips_ms"].items():
            rate = f" at {kept['bytes_per_s'] / 1e9:.1f} GB/s" if phase == "streaming" else ""
            cells = (f"{ends[end]['p50']:.1f} / {ends[end]['p99']:.1f}" for end in ("coordinator", "prefill", "decode"))
            rows.append(("yes" if kept["encrypted"] else "no", f"{phase}{rate}", *cells))
    return markdown(("encrypted", "phase", "coordinator, ms", "prefill, ms", "decode, ms"), rows)


def handoff_cost(folder: Path) -> list[str]:
    """Return the CPU time of each part of fault detection and verification."""
    kept = results.load(folder / "micro.json#handoff-cost")
    whole = kept["request_us"]["cpu"]
    rows = [(name, f"{us:,.0f}", f"{us / whole:.3%}") for name, us in kept["parts_us"].items()]
    rows.append(("sum", f"{kept['in_all_us']:,.0f}", f"{kept['in_all_us'] / whole:.2%}"))
    return markdown(("part", "CPU µs per request", "share"), rows)


def grammar(folder: Path) -> list[str]:
    """Return the CPU time of token masks by grammar."""
    kept = results.load(folder / "micro.json#grammar")["tokens"]
    rows = [(name, f"{1e6 * each['token_s']:.1f}", f"{1e6 * each['mask_p99_s']:.0f}") for name, each in kept.items()]
    return markdown(("grammar", "CPU µs per token", "P99, µs"), rows)


def hostile(folder: Path) -> list[str]:
    """Return how much longer the steps of plain streams are beside grammars, and the CPU time of their masks as a share
    of one core, by run and grammar."""
    rows = []
    for run in ("grammar", "grammar-86m", "grammar-86m-one"):
        kept = results.load(folder / f"micro.json#{run}")
        for name, each in kept["beside"].items():
            shown = (f"{each[f'beside_{key}_s'] / each[f'plain_{key}_s'] - 1:+.1%}" for key in ("mean", "p50", "p99"))
            shares = (f"{each[f'{key}_share']:.1%}" for key in ("masks", "idle"))
            rows.append((run, str(kept["hostile"]), name, *shown, *shares))
    return markdown(
        ("run", "sequences", "grammar", "mean ITL", "P50", "P99", "CPU of masks", "CPU of masks in idle time"), rows
    )


def llamacpp(folder: Path) -> list[str]:
    """Return the figures of GGUF files served by Tandem and by llama.cpp."""
    from bench.commands.gguf import rows

    kept = results.load(folder / "gguf.json").values()
    return markdown(
        ("file", "what", "Tandem", "llama.cpp", "ratio"),
        [row for run in kept for name, found in run["files"].items() for row in rows(name, found)],
    )


def quantization(folder: Path) -> list[str]:
    """Return the figures of a checkpoint with its weights as they are and quantized."""
    from bench.commands.quantization import rows

    kept = results.load(folder / "quality.json#quantization")
    return markdown(("weights", "what", "value", "ratio"), rows(kept["ways"]))


def quality(folder: Path) -> list[str]:
    """Return perplexity and agreement with float32 of each number format."""
    kept = results.load(folder / "quality.json#quality")
    rows = [
        (name, f"{each['perplexity']:.4f}", f"{each['same_token']:.2%}", f"{each['divergence']:.1e}")
        for name in ("float32", "bfloat16", "int8", "int8, exact", "int4", "int4, exact")
        if (each := kept.get(name))
    ]
    return markdown(("weights", "perplexity", "same most likely token", "divergence, nats"), rows)


def smollm2(folder: Path) -> list[str]:
    """Return what each way of computing costs SmolLM2 on a text, compared with exact products in float32."""
    kept = results.load(folder / "quality.json#smollm2")
    exact = kept["float32"]["perplexity"]
    rows = [
        (
            name, f"{each['perplexity']:.3f}", f"{each['perplexity'] / exact - 1:+.2%} ± {each['uncertainty']:.2%}",
            f"{each['same_token']:.2%}", f"{each['divergence']:.1e}",
        )
        for name in ("float32", "bfloat16", "integer", "integer, bfloat16", "fp8 KV")
        for each in [kept[name]]
    ]  # fmt: skip
    return markdown(("computed in", "perplexity", "change", "same most likely token", "divergence, nats"), rows)


def crosscheck(folder: Path) -> list[str]:
    """Return how far each load generator's report is from what the server wrote."""
    return markdown(
        ("load", "tool", "version", "TTFT", "TPOT", "E2EL"),
        [
            (
                load,
                tool,
                each["version"].split()[-1],
                *(f"{each['difference'][key]:+.2%}" for key in each["difference"]),
            )
            for load, tools in results.load(folder / "micro.json#crosscheck")["loads"].items()
            for tool, each in tools.items()
        ],
    )


TABLES: dict[str, Table] = {
    "runs": runs,
    "goals": goals,
    "pauses": pauses,
    "compare": compare,
    "plan": plan,
    "batching": batching,
    "attention": attention,
    "linear": linear,
    "roofline": roofline,
    "wire": wire,
    "lent-core": lent_core,
    "control-latency": control_latency,
    "handoff-cost": handoff_cost,
    "grammar": grammar,
    "hostile": hostile,
    "llamacpp": llamacpp,
    "smollm2": smollm2,
    "quality": quality,
    "quantization": quantization,
    "crosscheck": crosscheck,
}
