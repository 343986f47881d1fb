"""Checks of a running system through its HTTP API: readiness, workers, clocks, and the links of all pairs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from common.core.errors import StartError
from common.kv.budget import human_bytes
from common.net.http_client import shown
from deploy.doctor.finding import Finding, bad, good, refused, warning
from deploy.running_system import Answers, KeyRefused, Worker, link_text, pairs

SILENT_MS = 1000
"""Time since a worker's last heartbeat that is remarkable: it sends several per second."""
CLOCK_MS = 100
"""A difference between clocks that makes lines of two logs hard to order."""
SLOW_SHARE = 0.25
"""A link with less than this share of the median rate of its kind is slow."""
MOST_PAIRS = 16
"""Most links that are listed one by one."""


def system(url: str, answers: Answers, our_version: str) -> Iterator[Finding]:
    """Yield whether the system is ready, and runs the version that is installed here."""
    counts = [(role, sum(each["role"] == role for each in answers.workers)) for role in _roles(answers.workers)]
    pools = ", ".join(f"{count} {role}" for role, count in counts) or "no workers"
    if answers.not_ready:
        yield bad("system", f"{shown(url)} is not ready: {answers.not_ready}", "start the workers that it names")
    else:
        yield good("system", f"{shown(url)} serves with {pools}")
    if answers.version != our_version:
        yield warning(
            "system", f"it runs version {answers.version}, this is {our_version}", "run the same version everywhere"
        )


def _roles(workers: Iterable[Worker]) -> list[str]:
    found = {each["role"] for each in workers}
    return [role for role in ("prefill", "decode", "colocated") if role in found]


def workers(answers: Answers) -> Iterator[Finding]:
    """Yield the state of each worker, and each absent one."""
    for each in answers.workers:
        blocks = each["kv_blocks"]
        used = (
            f"{blocks['held'] / max(1, blocks['total']):.0%} of {blocks['total'] * each['block_size']:,} KV tokens held"
        )
        text = f"{each['id']} on {each['host']}: {each['device']}, {each['dtype']}, {used}"
        if each["state"] != "ready":
            yield warning("workers", f"{each['id']} is {each['state']}", "wait, or see its log")
        elif each["heard_ms"] > SILENT_MS:
            yield warning("workers", f"{text}; silent for {each['heard_ms']} ms", "see its log and its host's load")
        else:
            yield good("workers", text)
        yield from _counted(each)
        for gpu in each.get("gpus", ()):
            if gpu.get("throttled_by"):
                why = " and ".join(gpu["throttled_by"])
                yield warning("workers", f"{each['id']}: GPU {gpu['index']} is slowed down by {why}", "cool it")
    for gone in answers.absent:
        again = gone["restart_in_s"]
        later = "" if again is None else f"; started again in {again:.0f} s"
        yield bad("workers", f"{gone['id']} is absent for {gone['for_s']:.0f} s: {gone['why']}{later}", "see its log")
    dtypes = sorted({each["dtype"] for each in answers.workers})
    if len(dtypes) > 1:
        yield warning(
            "workers",
            f"their KV has different types ({', '.join(dtypes)}): it is converted at every hand-off",
            "give all the same --dtype and --kv-cache-dtype",
        )


def _counted(worker: Worker) -> Iterator[Finding]:
    """Yield warnings about counters that stay 0 in a healthy system."""
    counters, name = worker.get("counters", {}), worker["id"]
    if counters.get("leaked_blocks"):
        yield bad("workers", f"{name} has lost {counters['leaked_blocks']:.0f} KV blocks", "report it: this is a bug")
    if counters.get("bad_messages"):
        yield warning(
            "workers",
            f"{name} has dropped {counters['bad_messages']:.0f} invalid messages",
            "find out who else connects to its ports",
        )
    if counters.get("cut_off_peers"):
        yield warning(
            "workers", f"{name} ignores {counters['cut_off_peers']:.0f} peers that sent invalid messages", "see its log"
        )


def clocks(answers: Answers) -> Iterator[Finding]:
    """Yield how far the clock of each host is from the coordinator's; heartbeats carry it."""
    offsets = dict[str, int]()
    for each in answers.workers:
        if (offset := each.get("clock_ms")) is not None:
            offsets[each["host"]] = min(offset, offsets.get(each["host"], offset), key=abs)
    for host, offset in offsets.items():
        words = f"{host}: {abs(offset)} ms {'ahead of' if offset > 0 else 'behind'} the coordinator"
        if abs(offset) > CLOCK_MS:
            yield warning("clocks", f"{words}: lines of its logs are hard to order", f"run chrony or ntpd on {host}")
        else:
            yield good("clocks", f"{host}: as the coordinator's, within {max(1, abs(offset))} ms")


# -- links ------------------------------------------------------------------------------------------------------------


def links(answers: Answers) -> Iterator[Finding]:
    """Yield the measured link of each pair, those that are slow among their kind, and those that are avoided."""
    found = pairs(answers.workers)
    measured = [each for each in found if each.gb_per_s is not None]
    if not found:
        yield good("links", "no prefill or no decode worker: nothing is handed over")
        return
    medians = {
        kind: statistics.median(each.gb_per_s or 0.0 for each in measured if each.transport == kind)
        for kind in {each.transport for each in measured}
    }
    for each in measured:
        text = f"{each.name}: {link_text(each)}"
        if each.on_one_host and each.transport == "zmq":
            yield warning(
                "links", f"{text}, though both are on {each.source['host']}",
                "run both as the same user in the same container, with --kv-transport auto",
            )  # fmt: skip
        elif (each.gb_per_s or 0.0) < SLOW_SHARE * medians[each.transport]:
            rate = human_bytes(int(medians[each.transport] * 1e9))
            busy = "measure again with --links: their host may have been busy"
            todo = busy if each.on_one_host else "look at the network between the two hosts, or measure again: --links"
            yield warning("links", f"{text}: the median of its kind is {rate}/s", todo)
        elif len(measured) <= MOST_PAIRS:
            yield good("links", text)
    if len(measured) > MOST_PAIRS:
        shown_rates = ", ".join(f"{kind} {human_bytes(int(rate * 1e9))}/s" for kind, rate in medians.items())
        yield good("links", f"{len(measured)} pairs measured, medians: {shown_rates}")
    if missing := len(found) - len(measured):
        pairs_shown = f"{missing} of {len(found)} pairs were not measured"
        yield good("links", f"{pairs_shown}: a worker is, with a few others, when it joins; --links measures all")
    for worker in answers.workers:
        for name in worker.get("avoids", ()):
            yield warning(
                "links", f"{worker['id']} does not hand over to {name}: hand-offs between them failed lately",
                "see the logs of both; the coordinator tries again by itself",
            )  # fmt: skip


def unreachable(url: str, error: StartError, was_named: bool) -> Finding:
    """Return the finding for a server that does not list its workers: bad only if it was named."""
    if was_named:
        return refused("system", error)
    if isinstance(error, KeyRefused):
        return warning("system", f"{error.what}: {error.why}", error.todo)
    return good("system", f"none runs at {shown(url)}; its workers, clocks and links are checked while it does")
