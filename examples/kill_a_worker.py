"""Kill the decode worker in the middle of a stream, and count the tokens that arrive: none is lost.

    make up ARGS="--decode 2"
    python examples/kill_a_worker.py [URL]          # default: http://127.0.0.1:8000

It needs no package, and runs on the machine of the workers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse

TOKENS = 600
KILL_AFTER = 50


def main(url: str) -> None:
    """Stream a completion from ``url``, kill its decode worker, and print what arrived. Exits with 1 if tokens are
    missing."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    received, longest_pause_s, last = 0, 0.0, None
    with urllib.request.urlopen(request) as response:
        worker = response.headers["x-tandem-decode"]
        for event in events(response):
            now = time.monotonic()
            for choice in event["choices"]:
                received += len(choice.get("token_ids") or ())
            if last is not None:
                longest_pause_s = max(longest_pause_s, now - last)
            last = now
            if worker and received >= KILL_AFTER:
                os.kill(process_id(url, worker), signal.SIGKILL)
                print(f"{worker} was killed after {received} tokens")
                worker = None
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
    print(f"{received} of {TOKENS} tokens arrived ({counted} by the server's count)")
    print(f"the longest pause was {longest_pause_s:.2f} s")
    if received != TOKENS:
        sys.exit(1)


def events(response: HTTPResponse) -> Iterator[dict]:
    """Yield the JSON objects of a stream of server-sent events. Exits with a message if one is an error."""
    for line in response:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            event = json.loads(line[6:])
            if "error" in event:
                sys.exit(f"the stream failed: {event['error']['message']}")
            yield event


def process_id(url: str, worker: str) -> int:
    """Return the process id of the worker named ``worker``."""
    with urllib.request.urlopen(f"{url}/admin/workers") as response:
        workers = json.load(response)["workers"]
    return next(each["pid"] for each in workers if each["id"] == worker)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
    except urllib.error.URLError as error:
        sys.exit(f"{error.reason}: is a server running? Start one with: make up ARGS='--decode 2'")
