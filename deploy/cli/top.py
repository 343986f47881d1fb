"""``tandem top``: the live view of a running system in a terminal, or one snapshot as text."""

from __future__ import annotations

import shutil
import sys

from common.config.top import TopConfig
from common.net.http_client import HttpClient
from deploy.top.feed import Feed, snapshot
from deploy.top.lines import Size, plain_text, view
from deploy.top.screen import Screen, can_draw
from deploy.top.state import State

LEAST_WIDTH = 140
"""Characters in a line of a snapshot, at least: it is for programs and files as well."""


def run(config: TopConfig) -> int:
    """Show the system until q, or print one snapshot. Raises StartError if the server does not show its events."""
    client = HttpClient(config.url, config.api_key)
    state = State(client.url)
    snapshot(client, state)
    if config.once or not can_draw(sys.stdin, sys.stdout):
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
        encodable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        print(plain_text(view(state, Size(width), plain=not encodable)))
        return 0
    feed = Feed(client, state)
    feed.start()
    try:
        Screen(state, feed).run()
    finally:
        feed.stop()
    return 0
