"""``tandem status``: shows the workers of a running server, their GPUs, and the workers that are absent and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from common.config.status import StatusConfig
from common.core.errors import StartError, reason
from common.kv.budget import human_bytes
from common.net.http_client import HttpClient, shown


def run(config: StatusConfig) -> int:
    """Print the status; exit code 1 if a worker is absent. Raises StartError if the server cannot be asked."""
    try:
        code, body = HttpClient(config.url, config.api_key).get("/admin/workers")
    except OSError as error:
        todo = "start it with `tandem up`, or give --url"
        raise StartError(f"cannot reach {shown(config.url)}", reason(error), todo) from error
    if code != 200 or not isinstance(body, dict):
        closed = code in (401, 403)
        why = "it wants another API key" if closed else f"HTTP status {code}"
        todo = "give --api-key or set TANDEM_API_KEY" if closed else "check --url"
        raise StartError(f"{shown(config.url)} does not list its workers", why, todo)
    lines = (*table(body["workers"]), *gpu_lines(body["workers"]), *absences(body.get("absent", ())))
    for line in lines:
        print("".join(char if char.isprintable() else "?" for char in line))
    return 1 if body.get("absent") else 0


def table(workers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line of column heads and a line for each worker of /admin/workers."""
    rows = [("worker", "role", "state", "device", "KV in use", "running", "waiting")]
    for worker in workers:
        blocks = worker["kv_blocks"]
        used = f"{blocks['held'] / blocks['total']:.0%} of {blocks['total'] * worker['block_size']:,} tokens"
        states = worker["id"], worker["role"], worker["state"], worker["device"]
        rows.append((*states, used, str(worker["running"]), str(worker["waiting"])))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
