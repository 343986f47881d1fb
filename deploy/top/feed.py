"""Follows /admin/events of a server in a thread, and connects again when the connection breaks.

The thread takes each event as it comes and wakes the view. It holds one connection; nothing waits in a queue here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from common.core.errors import StartError, reason
from common.net.http_client import EventStream, HttpClient, HttpError, shown
from deploy.top.state import State

BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
"""Waits before the first, second ... attempt to connect again; the last one is repeated."""
STOP_S = 1.0
RECENT = 50
"""Requests that are asked for at the start; later ones come as events."""


class Feed:
    """Applies the events of ``client`` to ``state``; ``wakes`` is readable whenever something has changed. ``lock``
    protects ``state``."""

    def __init__(self, client: HttpClient, state: State) -> None:
        self._client, self._state = client, state
        self.lock = threading.Lock()
        self.wakes, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        os.set_blocking(self.wakes, False)
        self._stopped = threading.Event()
        self._stream: EventStream | None = None
        self._thread = threading.Thread(target=self._follow, name="events", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and end the thread."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.interrupt()
        self._thread.join(STOP_S)
        if not self._thread.is_alive():  # else it waits for a server that does not answer, and ends with this process
            os.close(self.wakes)
            os.close(self._waker)

    def settle(self) -> None:
        """Take note of all wake-ups."""
        try:
            while os.read(self.wakes, 4096):
                pass
        except BlockingIOError:
            pass

    def _follow(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._change(lambda: self._state.take_requests(recent(self._client)))
                with open_events(self._client) as stream:
                    self._stream = stream
                    if self._stopped.is_set():
                        return
                    for event, data in stream:
                        failures = 0
                        self._change(lambda event=event, data=data: self._state.take(event, data))  # type: ignore[misc]
                why = "the server has closed the connection"
            except (OSError, HttpError, StartError) as error:
                why = f"{error.what}: {error.why}" if isinstance(error, StartError) else reason(error)
            finally:
                self._stream = None
            wait_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            self._change(lambda why=why: setattr(self._state, "trouble", why))  # type: ignore[misc]
            self._stopped.wait(wait_s)

    def _change(self, change: Callable[[], object]) -> None:
        with self.lock:
            change()
        try:
            os.write(self._waker, b"x")
        except BlockingIOError:  # it is awake
            pass


def recent(client: HttpClient) -> list[Any]:
    """Return the last requests, the latest arrival last; none if the server does not show them."""
    status, body = client.get(f"/admin/requests?limit={RECENT}")
    found = body.get("requests") if status == 200 and isinstance(body, dict) else None
    return found[::-1] if isinstance(found, list) else []


def open_events(client: HttpClient) -> EventStream:
    """Open the event stream. Raises StartError in words if the server refuses it, OSError if none answers."""
    try:
        return client.events("/admin/events")
    except HttpError as error:
        raise refusal(client.url, error) from error


def refusal(url: str, error: HttpError) -> StartError:
    """Return why the server does not show its events, and what to do."""
    if error.status == 404:
        return StartError(f"{shown(url)} has no live view", "it is another server, or an older Tandem", "check --url")
    return StartError(f"{shown(url)} does not show its events", str(error), error.todo("check --url", admin=True))


def snapshot(client: HttpClient, state: State) -> None:
    """Take the recent requests and the first event, which is a snapshot of the system. Raises StartError if there is
    none."""
    try:
        requests = recent(client)
        with open_events(client) as stream:
            event, data = next(iter(stream), ("", _NOTHING))
    except OSError as error:
        todo = "start it with `tandem up`, or give --url"
        raise StartError(f"cannot reach {shown(client.url)}", reason(error), todo) from error
    except HttpError as error:
        raise refusal(client.url, error) from error
    if event != "system":
        raise StartError(f"{shown(client.url)} sent no snapshot", "its first event is another one", "check --url")
    state.take_requests(requests)
    state.take(event, data)


_NOTHING: Mapping[str, Any] = {}
