"""``tandem status``: shows the workers of a running server, their GPUs and links, and the workers that are absent and
why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.config.status import StatusConfig
from common.core.printable import printable
from common.kv.budget import human_bytes
from common.net.http_client import shown
from deploy.running_system import Answers, ask, link_text, pairs

HEADS = ("role", "state", "device", "KV in use", "running", "waiting")
MOST_LINKS = 8
SILENT_MS = 1000
"""A time without a heartbeat, or of one step, that is worth a line."""


def run(config: StatusConfig) -> int:
    """Print the status; exit code 1 if a worker is absent, or if the server is not ready. Raises StartError if it
    cannot be asked."""
    answers = ask(config.url, config.api_key)
    if config.json:
        print(json.dumps({"ready": not answers.not_ready, **answers._asdict()}))
    else:
        for line in lines(config.url, answers):
            print(printable(line))
    return 1 if answers.absent or answers.not_ready else 0


def lines(url: str, answers: Answers) -> Iterator[str]:
    """Yield the lines of the status."""
    state = f"not ready: {answers.not_ready}" if answers.not_ready else "ready"
    serves = f" serves {answers.model}" if answers.model else ""
    yield f"tandem {answers.version} at {shown(url)}{serves}: {state}"
    yield ""
    if answers.workers:
        yield from table(answers.workers)
    for role in answers.empty_pools:
        yield f"the {role} pool has no worker"
    yield from gpu_lines(answers.workers)
    yield from link_lines(answers.workers)
    yield from remarks(answers.workers)
    yield from absences(answers.absent)


def table(workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line of column heads and a line for each worker of /admin/workers; with hosts if there are several."""
    several = len({worker["host"] for worker in workers}) > 1
    rows = [("worker", *(("host",) if several else ()), *HEADS)]
    for worker in workers:
        blocks = worker["kv_blocks"]
        held, cached = (blocks[name] / blocks["total"] for name in ("held", "cached"))
        used = f"{held:.0%} of {blocks['total'] * worker['block_size']:,} tokens"
        used += f", {cached:.0%} cached" if cached >= 0.005 else ""
        states = worker["role"], worker["state"], worker["device"]
        place = (worker["host"],) if several else ()
        counts = str(worker["running"]), str(worker["waiting"])
        rows.append((worker["id"], *place, *states, used, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def link_lines(workers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each measured link, at most MOST_LINKS."""
    measured = [each for each in pairs(workers) if each.gb_per_s is not None]
    for pair in measured[:MOST_LINKS]:
        yield f"{pair.name}: {link_text(pair)}"
    if len(measured) > MOST_LINKS:
        yield f"and {len(measured) - MOST_LINKS} more links: see tandem doctor"


def remarks(workers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each worker that is silent, whose loop takes long, or that does not hand over to another."""
    for worker in workers:
        if worker["heard_ms"] > SILENT_MS:
            yield f"{worker['id']} is silent for {worker['heard_ms'] / 1000:.1f} s"
        if (worker["turn_ms"] or 0) > SILENT_MS:
            yield f"{worker['id']}: its present step takes {worker['turn_ms'] / 1000:.1f} s so far"
        if worker["avoids"]:
            yield f"{worker['id']} hands over to {', '.join(worker['avoids'])} only to try: hand-offs failed lately"


def gpu_lines(workers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each GPU that a worker of /admin/workers computes on."""
    for worker in workers:
        for gpu in worker.get("gpus", ()):
            yield f"{worker['id']}: {gpu_line(gpu)}"


def gpu_line(gpu: Mapping[str, Any]) -> str:
    """Return one GPU of /admin/workers as a line of text. What its card does not report is left out."""
    readings = list(_readings(gpu))
    return f"GPU {gpu['index']} {gpu['name']}: " + (", ".join(readings) if readings else "no readings, NVML is silent")


def _readings(gpu: Mapping[str, Any]) -> Iterator[str]:
    if gpu["utilization"] is not None:
        yield f"{gpu['utilization']} % busy"
    if gpu["memory_used"] is not None:
        yield f"{human_bytes(gpu['memory_used'])} of {human_bytes(gpu['memory_total'])}"
    if gpu["power_mw"] is not None:
        limit = "" if gpu["power_limit_mw"] is None else f" of {gpu['power_limit_mw'] / 1000:.0f}"
        yield f"{gpu['power_mw'] / 1000:.0f}{limit} W"
    if gpu["temperature"] is not None:
        yield f"{gpu['temperature']} °C"
    clocks = [
        f"{name} {gpu[key]}" for name, key in (("sm", "sm_mhz"), ("memory", "memory_mhz")) if gpu[key] is not None
    ]
    if clocks:
        yield f"clocks {', '.join(clocks)} MHz"
    if gpu["throttled_by"]:
        yield f"throttled by {' and '.join(gpu['throttled_by'])}"
    if gpu["nvlinks_active"] is not None:
        yield f"{gpu['nvlinks_active']} NVLinks"
    ecc = [f"{gpu[f'ecc_{kind}']} {kind}" for kind in ("corrected", "uncorrected") if gpu[f"ecc_{kind}"] is not None]
    if ecc:
        yield f"ECC errors {', '.join(ecc)}"
    if gpu["remap_pending"]:
        yield "a memory row is replaced at the next reset"
    if gpu["xids"]:
        yield "Xid errors " + ", ".join(f"{xid} ({count} x)" for xid, count in gpu["xids"].items())


def absences(absent: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each absent worker of /admin/workers."""
    for each in absent:
        again = each["restart_in_s"]
        later = "" if again is None else ", being restarted" if again == 0 else f", restarted in {again:.0f} s"
        yield f"{each['id']} is absent for {each['for_s']:.0f} s: {each['why']}{later}"
