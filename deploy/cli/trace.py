"""``tandem trace``: shows where the time of one request went, as a waterfall in text."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from common.config.trace import TraceConfig
from common.core.errors import StartError, reason
from common.core.printable import printable
from common.net.http_client import HttpClient, HttpError, shown

MIN_BAR, MAX_BAR = 16, 60
"""Columns of the bars."""
LISTED = 20
"""Requests that are listed if none is named."""

Json = Mapping[str, Any]


class Signs(NamedTuple):
    """The characters of a bar: a span, the hidden part of a transfer, a moment, and the arrow from worker to worker."""

    full: str
    hidden: str
    moment: str
    arrow: str


UNICODE, ASCII = Signs("█", "░", "▏", "→"), Signs("#", "-", "|", ">")


def run(config: TraceConfig, request_id: str | None = None) -> int:
    """Print the waterfall of a request, or the last requests if none is named. Raises StartError if the server cannot
    be asked, or does not know the request."""
    path = f"/admin/requests?limit={LISTED}" if request_id is None else f"/admin/requests/{quote(request_id, safe='')}"
    body = _asked(config, path, request_id)
    encodes = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    signs = UNICODE if encodes else ASCII
    width = shutil.get_terminal_size((100, 24)).columns
    for line in table(body["requests"]) if request_id is None else waterfall(body, width, signs):
        print(printable(line))
    return 0


def _asked(config: TraceConfig, path: str, request_id: str | None) -> Any:
    try:
        code, body = HttpClient(config.url, config.api_key).get(path)
    except OSError as error:
        todo = "start it with `tandem up`, or give --url"
        raise StartError(f"cannot reach {shown(config.url)}", reason(error), todo) from error
    if code == 200 and isinstance(body, dict):
        return body
    if code == 404 and request_id is not None:
        why = "only the last 512 that have ended are remembered"
        raise StartError(
            f"{shown(config.url)} knows no request {request_id}", why, "see `tandem trace` for the ids of the last ones"
        )
    refused = HttpError(f"HTTP status {code}", code)
    raise StartError(f"{shown(config.url)} shows no requests", str(refused), refused.todo("check --url", admin=True))


# -- the list ---------------------------------------------------------------------------------------------------------


def table(requests: Iterable[Json]) -> Iterator[str]:
    """Yield a line of column heads and a line for each request of GET /admin/requests."""
    rows = [("id", "state", "path", "prompt", "output", "first token", "total", "")]
    rows += [
        (
            each["id"], each["state"], each["path"] or "-", str(each["prompt_tokens"]), str(each["output_tokens"]),
            _ms(each["ttft_ms"]), _ms(each["total_ms"]), ", ".join(_again(each)),
        )
        for each in requests
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


# -- the waterfall ----------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A line of the waterfall: the spans that share it, and what is said of them."""

    label: str
    spans: Sequence[Json]
    detail: str


def waterfall(request: Json, width: int, signs: Signs = UNICODE) -> Iterator[str]:
    """Yield the lines for a request of GET /admin/requests/{id}, about ``width`` columns wide."""
    yield from _head(request)
    rows = list(_rows(request["spans"], signs))
    most_ms = request["total_ms"]
    if most_ms is None:  # it runs: until now
        times = (span[key] for span in request["spans"] for key in ("start_ms", "end_ms") if span[key] is not None)
        most_ms = max([request.get("now_ms") or 0.0, *times])
    most_ms = max(most_ms, 0.001)
    label_width = max((len(row.label) for row in rows), default=0)
    bar_width = max(MIN_BAR, min(MAX_BAR, width - label_width - 26))
    ends = _ms(most_ms)
    yield f"{'':{label_width}} 0{ends:>{bar_width}}"
    for row in rows:
        bar = _bar(row.spans, most_ms, bar_width, signs)
        line = f"{row.label:{label_width}} |{bar}| {_times(row.spans)}".rstrip()
        if row.detail and len(line) + 2 + len(row.detail) <= width:
            line, rest = f"{line}  {row.detail}", ""
        else:
            rest = row.detail
        yield line
        if rest:
            yield f"{'':{label_width}}   {rest}"


def _head(request: Json) -> Iterator[str]:
    finish = ", ".join(each or "running" for each in request["finish"])
    outcome = request["state"] + (f" ({finish})" if request["state"] == "done" else "")
    path = f", path {request['path']}" if request["path"] else ""
    yield f"{request['id']}  {request['endpoint']}  {outcome}{path}"
    choices = f" in {request['choices']} choices" if request["choices"] > 1 else ""
    cached = f" ({request['cached_tokens']} cached)" if request["cached_tokens"] else ""
    parts = [f"{request['prompt_tokens']} prompt tokens{cached}, {request['output_tokens']} output tokens{choices}"]
    if request["ttft_ms"] is not None:
        parts.append(f"first token after {_ms(request['ttft_ms'])}")
    if request["total_ms"] is not None:
        parts.append(f"total {_ms(request['total_ms'])}")
    elif request.get("now_ms") is not None:
        parts.append(f"running for {_ms(request['now_ms'])}")
    if (between := request["itl_ms"]) is not None:
        parts.append(
            f"between tokens mean {_ms(between['mean'])}, p99 {_ms(between['p99'])}, longest {_ms(between['max'])}"
        )
    yield "; ".join(parts)
    yield from _again(request)
    if request["error"]:
        yield f"error: {request['error']}"


def _again(request: Json) -> Iterator[str]:
    """Yield how often a request was retried, and how often it moved to another worker, if it was."""
    for name, one, many in (("retries", "retry", "retries"), ("migrations", "migration", "migrations")):
        if request[name]:
            yield f"{request[name]} {one if request[name] == 1 else many}"


def _rows(spans: Sequence[Json], signs: Signs) -> Iterator[_Row]:
    """Yield one row per span, and one for all chunks of a prompt and for all stalls of a decode span."""
    for index, span in enumerate(spans):
        if span["name"] in ("prefill_chunk", "stall"):
            continue
        depth = _depth(spans, span)
        worker = span["worker"] or ""
        yield _Row(f"{'  ' * depth}{span['name']:<9} {worker}".rstrip(), [span], _detail(span, signs))
        children = [each for each in spans if each["parent"] == index]
        for name, words in (("prefill_chunk", _chunks), ("stall", _stalls)):
            group = [each for each in children if each["name"] == name]
            if group:
                label = "chunks" if name == "prefill_chunk" else "stalls"
                yield _Row(f"{'  ' * (depth + 1)}{label}", group, words(group))


def _depth(spans: Sequence[Json], span: Json) -> int:
    depth = 0
    while span["parent"] is not None and depth < len(spans):
        span, depth = spans[span["parent"]], depth + 1
    return depth


def _detail(span: Json, signs: Signs) -> str:
    detail = span["detail"]
    match span["name"]:
        case "tokenize":
            return (
                f"of which {_ms(detail['grammar_ms'])} for the grammar of the output" if "grammar_ms" in detail else ""
            )
        case "queue":
            return str(detail.get("why", ""))
        case "place":
            where = [each for each in dict.fromkeys((detail["prefill"], detail["decode"])) if each]
            return f"{f' {signs.arrow} '.join(where)} ({detail['path']}): {detail['why']}"
        case "prefill":
            parts = [f"{detail['cached_tokens']} cached"] if detail["cached_tokens"] else []
            parts += [f"waited {_ms(detail['queue_ms'])} there"] if detail["queue_ms"] is not None else []
            parts += [f"computed {_ms(detail['compute_ms'])}"] if detail["compute_ms"] is not None else []
            return ", ".join(parts)
        case "transfer":
            parts = [f"to {detail['to']}"]
            parts += [f"by {detail['link']}"] if detail["link"] else []
            parts += [f"{detail['bytes'] / 1e6:,.3g} MB"] if detail["bytes"] is not None else []
            parts += [f"hidden {_ms(detail['hidden_ms'])}"] if detail["hidden_ms"] is not None else []
            parts += [f"exposed {_ms(detail['exposed_ms'])}"] if detail["exposed_ms"] is not None else []
            parts += [f"of which {_ms(detail['wait_ms'])} until decode granted blocks"] if detail["wait_ms"] else []
            return ", ".join(parts)
        case "decode":
            waited = f", waited {_ms(detail['wait_ms'])}" if detail["wait_ms"] else ""
            return f"{detail['tokens']} tokens{waited}"
        case "retry" | "migration":
            noticed = f", noticed after {_ms(detail['silent_ms'])}" if detail["silent_ms"] else ""
            return f"lost {detail['from']}: {detail['why']}{noticed}"
        case _:
            return ""


def _chunks(chunks: Sequence[Json]) -> str:
    steps = sum(each["detail"].get("steps", 1) for each in chunks)
    tokens = sum(each["detail"]["tokens"] for each in chunks)
    return f"{tokens} tokens in {steps} step{'s' if steps > 1 else ''}"


def _stalls(stalls: Sequence[Json]) -> str:
    longest = max(each["detail"]["gap_ms"] for each in stalls)
    return f"{len(stalls)} gap{'s' if len(stalls) > 1 else ''} between tokens, the longest {_ms(longest)}"


def _bar(spans: Sequence[Json], most_ms: float, width: int, signs: Signs) -> str:
    """Return a bar of ``width`` columns that stands for ``most_ms``. Of a transfer, the part that computation hides is
    lighter."""
    cells = [" "] * width
    for span in spans:
        start_ms = span["start_ms"]
        end_ms = most_ms if span["end_ms"] is None else span["end_ms"]
        first = min(width - 1, max(0, int(start_ms / most_ms * width)))
        last = min(width, max(first, int(end_ms / most_ms * width)))
        if last == first:
            if cells[first] == " ":
                cells[first] = signs.moment
            continue
        hidden_ms = span["detail"].get("hidden_ms") or 0.0
        turns = int((start_ms + hidden_ms) / most_ms * width)
        for place in range(first, last):
            cells[place] = signs.hidden if hidden_ms and place < turns else signs.full
    return "".join(cells)


def _times(spans: Sequence[Json]) -> str:
    """Return the start and the duration of a span, or of a group of spans from the first to the last."""
    start_ms, end_ms = spans[0]["start_ms"], spans[-1]["end_ms"]
    if end_ms is None:
        return f"{start_ms:9.1f} + running"
    return f"{start_ms:9.1f} + {end_ms - start_ms:.1f} ms"


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:,.1f} ms"
