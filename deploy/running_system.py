"""What a running system says about itself over HTTP, for the commands that show or check it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from common.core.errors import StartError, reason
from common.net.http_client import ADMIN_KEY, HttpClient, HttpError, shown

Worker = Mapping[str, Any]


class Answers(NamedTuple):
    """What a running system says about itself: its version, why it is not ready ("" if it is), /admin/workers.
    ``expected``: the configured size of each pool by role, 0 or absent where it is not known."""

    version: str
    not_ready: str
    workers: Sequence[Worker]
    absent: Sequence[Mapping[str, Any]]
    model: str = ""
    expected: Mapping[str, int] = {}

    @property
    def empty_pools(self) -> list[str]:
        """The roles whose configured pools have no worker. Where no pool is configured and requests are not served,
        the roles of prefill and decode count as configured."""
        present = {worker["role"] for worker in self.workers}
        wanted = [role for role, size in self.expected.items() if size]
        if not wanted and self.not_ready and "colocated" not in present:
            wanted = ["prefill", "decode"]
        return [role for role in wanted if role not in present]


class Pair(NamedTuple):
    """The link from a prefill to a decode worker; the rate and the latency are None where it was not measured."""

    source: Worker
    target: Worker
    transport: str
    gb_per_s: float | None
    latency_us: float | None

    @property
    def name(self) -> str:
        """Both workers."""
        return f"{self.source['id']} to {self.target['id']}"

    @property
    def on_one_host(self) -> bool:
        """Whether both workers are on the same host."""
        return bool(self.source["host"] == self.target["host"])


class KeyRefused(StartError):
    """The server runs, but does not accept the key."""


def ask(url: str, key: str | None, key_flag: str = "--api-key") -> Answers:
    """Ask the server at ``url``. Raises StartError if it cannot be reached, or does not list its workers (KeyRefused
    for lack of the right key); ``key_flag`` is the flag with which a user gives the key."""
    client = HttpClient(url, key, timeout_s=10.0)
    try:
        code, listed = client.get("/admin/workers")
        ready_code, ready = client.get("/ready")
        _, version = client.get("/version")
    except OSError as error:
        todo = "start it with `tandem up`, or give --url"
        raise StartError(f"cannot reach {shown(url)}", reason(error), todo) from error
    if code != 200 or not isinstance(listed, dict):
        closed = code in (401, 403)
        why = f"it wants {'another' if key else 'a'} key" if closed else f"HTTP status {code}"
        variable = f"TANDEM_{key_flag.strip('-').replace('-', '_').upper()}"
        todo = f"give {ADMIN_KEY} with {key_flag} or {variable}" if closed else "check --url"
        raise (KeyRefused if closed else StartError)(f"{shown(url)} does not list its workers", why, todo)
    said = ready.get("error", {}) if isinstance(ready, dict) else {}
    not_ready = "" if ready_code == 200 else str(said.get("message", f"HTTP status {ready_code}"))
    known = str(version.get("version", "unknown")) if isinstance(version, dict) else "unknown"
    workers = listed["workers"]
    model = str(listed.get("model") or (workers[0].get("model", "") if workers else ""))
    return Answers(known, not_ready, workers, listed.get("absent", ()), model, listed.get("expected", {}))


def measure_links(url: str, key: str | None) -> None:
    """Have the server at ``url`` measure the links of all pairs of workers anew. Raises StartError if it does not."""
    try:
        HttpClient(url, key).post("/admin/links", {})
    except (OSError, HttpError) as error:
        why = str(error) if isinstance(error, HttpError) else reason(error)
        raise StartError(f"{shown(url)} did not measure its links", why, "see its log") from error


def pairs(workers: Sequence[Worker]) -> list[Pair]:
    """Return every pair of a prefill and a decode worker, with the coordinator's measurement if there is one."""
    found = list[Pair]()
    sends = [each for each in workers if each["role"] == "prefill"]
    for source, target in product(sends, (each for each in workers if each["role"] == "decode")):
        none: Mapping[str, Any] = {}
        link = next((link for link in source["links"] if link.get("to") == target["id"]), none)
        best = next(iter(source.get("transports", ())), "")
        found.append(
            Pair(source, target, str(link.get("transport", best)), link.get("gb_per_s"), link.get("latency_us"))
        )
    return found


def link_text(pair: Pair) -> str:
    """Return the transport, rate and latency of a pair's link as text."""
    if pair.gb_per_s is None:
        return f"{pair.transport or 'no transport'}, not measured"
    rate = f"{pair.gb_per_s:.1f} GB/s" if pair.gb_per_s >= 0.1 else f"{1000 * pair.gb_per_s:.1f} MB/s"
    return f"{pair.transport}, {rate}" + ("" if pair.latency_us is None else f", {pair.latency_us:.0f} µs")
