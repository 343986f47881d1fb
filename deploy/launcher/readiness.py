"""Asks the coordinator over HTTP whether the system is ready, and for the measurements of its KV links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from common.core.errors import StartError
from common.net.http_client import HttpClient

POLL_S = 0.1
JOIN_TIMEOUT_S = 30.0
"""Maximum time from the last worker's "ready" report until the coordinator answers /ready with 200."""
LINKS_TIMEOUT_S = 2.0
_ANSWER_S = 2.0
"""Timeout of one request."""


class CoordinatorProbe:
    """Questions to the coordinator at ``url``; ``admin_key`` is a key that may read /admin, None without keys."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self._url, self._admin_key = url, admin_key

    async def until_ready(self) -> None:
        """Wait until the coordinator is ready. Raises StartError if it is not within JOIN_TIMEOUT_S."""
        server, reason = HttpClient(self._url, timeout_s=_ANSWER_S), ""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                code, body = await asyncio.to_thread(server.get, "/ready")
                if code == 200:
                    return
                reason = str(body)
            except OSError as error:
                reason = str(error)
            await asyncio.sleep(POLL_S)
        raise StartError(
            "the workers did not join the coordinator", reason[:300], "look at the log with --log-level debug"
        )

    async def measured_links(self, pairs: int) -> tuple[object, ...]:
        """Return the KV links between ``pairs`` pairs of workers with their measurements, or only the transports' names
        if measuring takes longer than LINKS_TIMEOUT_S."""
        deadline = time.monotonic() + LINKS_TIMEOUT_S
        while True:
            links = tuple(await asyncio.to_thread(self._links))
            if sum(isinstance(link, dict) for link in links) >= pairs or time.monotonic() > deadline:
                return links
            await asyncio.sleep(POLL_S)

    def _links(self) -> Iterable[object]:
        """Return the KV links that the coordinator has measured, else the preferred transport of each prefill
        worker."""
        try:
            code, body = HttpClient(self._url, self._admin_key, timeout_s=_ANSWER_S).get("/admin/workers")
        except OSError:
            return ()
        workers: list[dict[str, Any]] = body["workers"] if code == 200 else []
        sends = [worker for worker in workers if worker.get("role") == "prefill"]
        measured = [{**link, "from": worker["id"]} for worker in sends for link in worker["links"]]
        return measured or [best for worker in sends for best in worker["transports"][:1]]
