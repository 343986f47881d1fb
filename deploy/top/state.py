"""What the view knows: the last snapshot of the system, the last minutes, the last requests and changes of workers.

Pure. Each of them is bounded, whatever the server sends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_ROWS, MAX_REQUESTS, MAX_CHANGES = 60, 200, 50
Json = Mapping[str, Any]


@dataclass
class State:
    """The state of the view. ``trouble``: why there is no connection now, "" while there is one."""

    url: str
    system: Json = field(default_factory=dict)
    rows: deque[Json] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    requests: OrderedDict[str, Json] = field(default_factory=OrderedDict)
    """By id, the latest arrival last."""
    changes: deque[Json] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    trouble: str = ""
    is_paused: bool = False

    def take(self, event: str, data: Json) -> None:
        """Take one event of /admin/events. Unknown events, and fields of other types, are ignored."""
        if event == "system":
            self.system, self.trouble = data, ""
            if "history" in data:
                self.rows.clear()
                self.rows.extend(objects(data["history"]))
            if isinstance(row := data.get("row"), dict):
                self.rows.append(row)
            if "worker_events" in data:
                self.changes.clear()
                self.changes.extend(objects(data["worker_events"]))
        elif event == "request":
            self.take_requests([data])
        elif event == "worker":
            self.changes.append(data)

    def paused(self) -> State:
        """Return a copy that later events do not change."""
        copies = deque(self.rows, MAX_ROWS), OrderedDict(self.requests), deque(self.changes, MAX_CHANGES)
        return State(self.url, self.system, *copies, self.trouble, is_paused=True)

    def take_requests(self, requests: list[Any]) -> None:
        """Take requests, the latest arrival last."""
        for each in objects(requests):
            self.requests[str(each.get("id", ""))] = each
            if len(self.requests) > MAX_REQUESTS:
                self.requests.popitem(last=False)

    @property
    def workers(self) -> list[Json]:
        """The workers of the last snapshot."""
        return objects(self.system.get("workers"))

    @property
    def absent(self) -> list[Json]:
        """The workers that should be there and are not."""
        return objects(self.system.get("absent"))

    @property
    def links(self) -> list[Json]:
        """The measured links."""
        return objects(self.system.get("links"))


def objects(found: object) -> list[Json]:
    """Return the objects in a list of the server's JSON, none if it is no list."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
