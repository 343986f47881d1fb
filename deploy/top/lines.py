"""The lines of the view, from its state and the size of the terminal. Pure.

Sections that are always there: the system, its rates and latencies, the workers. Links, changes of workers and requests
share the rest of the height. What comes from the server is shown without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from common.core.printable import printable
from deploy.top.state import Json, State, objects

LEVELS = "▁▂▃▄▅▆▇█"
BAR = 20
WIDE, SHORT_ID = 140, 12
"""Characters of a line in which whole ids of requests have room, and of an id on a smaller terminal."""
MOST_LINKS, MOST_CHANGES = 6, 4
"""Most lines of these sections on a terminal; a snapshot shows all."""
WORKERS_SHARE = 0.5
"""Share of the height that workers leave to other sections, if those have as much to show."""
KEYS = "q quit   space pause   1 requests   2 links   3 workers' changes   4 workers   0 all"
_DIM, _HEAD, _GOOD, _WARN, _BAD = "dim", "bold", "green", "yellow", "red"
_STATES = {
    "ready": _GOOD, "draining": _WARN, "joining": _WARN, "absent": _BAD,
    "done": _GOOD, "failed": _BAD, "aborted": _WARN,
    "joined": _GOOD, "back": _GOOD, "left": _WARN, "lost": _BAD, "dead": _BAD,
}  # fmt: skip

Row = tuple[Sequence[str], str]
"""The cells of a line, and its style."""


@dataclass(frozen=True)
class Size:
    """The size of the terminal in characters; ``height`` is None for a snapshot, which is as long as it must be."""

    width: int
    height: int | None = None


def view(state: State, size: Size, focus: str = "0", plain: bool = False) -> list[Text]:
    """Return the lines of the view, at most as many as fit. ``focus``: the key of the section that gets the height that
    is left, or all of it (workers). ``plain``: only ASCII characters."""
    head = [*_head(state, size), *_figures(state), *_charts(state, size, plain), Text()]
    workers = list(_workers(state, plain))
    links, changes, requests = list(_links(state)), list(_changes(state)), list(_requests(state, size))
    if size.height is None:
        sections = [head, [*workers, Text()], links, changes, requests]
        lines = [line for section in sections for line in section]
    else:
        foot = [Text(KEYS, _DIM)]
        room = max(0, size.height - len(head) - len(foot))
        others = {"1": [requests], "2": [links], "3": [changes], "4": []}.get(focus, [links, changes, requests])
        kept = min(sum(map(len, others)), int(room * WORKERS_SHARE))
        most = max(0, room - kept - 1)
        if len(workers) > most:
            workers = list(_workers(state, plain, trouble_first=True))
        shown = [[*_cut(workers, most, "workers"), Text()]]
        room = max(0, room - len(shown[0]))
        limits = [(section, room) for section in others]
        if len(others) > 1:
            limits = [(links, MOST_LINKS + 2), (changes, MOST_CHANGES + 2), (requests, room)]
        for section, most in limits:
            shown.append(_cut(section, min(room, most), "more"))
            room -= len(shown[-1])
        lines = [*head, *(line for section in shown for line in section)]
        lines = lines[: max(0, size.height - len(foot))]
        lines += [Text()] * (size.height - len(foot) - len(lines))
        lines += foot[: size.height]
        for line in lines:
            line.truncate(size.width)
    return [_ascii(line) for line in lines] if plain else lines


def _ascii(line: Text) -> Text:
    """Return a line with a question mark in place of each character that is not ASCII."""
    return Text(line.plain.encode("ascii", "replace").decode(), line.style, spans=line.spans)


def _cut(lines: Sequence[Text], most: int, what: str) -> list[Text]:
    """Return at most ``most`` lines; the last one says how many are left out."""
    if len(lines) <= most:
        return list(lines)
    if most < 2:
        return []
    return [*lines[: most - 1], Text(f"… {len(lines) - most + 1} {what}", _DIM)]


# -- the system -------------------------------------------------------------------------------------------------------


def _head(state: State, size: Size) -> Iterator[Text]:
    system = state.system
    line = Text("tandem", _HEAD)
    line.append(f" {_word(system.get('version'))}  {_word(system.get('model'))}  ")
    line.append(_word(state.url), _DIM)
    when = system.get("t")
    right = Text(time.strftime("%H:%M:%S", time.localtime(when)) if isinstance(when, int | float) else "")
    for words, style in (
        ("paused  " if state.is_paused else "", _WARN),
        ("draining  " if system.get("draining") else "", _WARN),
        (f"no connection: {_word(state.trouble)}  " if state.trouble else "", _BAD),
    ):
        right = Text.assemble((words, style), right)
    gap = max(2, size.width - line.cell_len - right.cell_len)
    yield Text.assemble(line, " " * gap, right)


def _figures(state: State) -> Iterator[Text]:
    system = state.system
    rates, queue = _object(system.get("rates")), _object(system.get("queue"))
    line = Text()
    for name, value, unit in (
        ("requests", rates.get("requests_s"), "/s"),
        ("prompt", rates.get("prompt_tokens_s"), " tok/s"),
        ("output", rates.get("output_tokens_s"), " tok/s"),
        ("running", system.get("running"), ""),
        ("queued", queue.get("requests"), f" ({_figure(queue.get('tokens'))} tokens)"),
    ):
        line.append(f"{name} ", _DIM).append(f"{_figure(value)}{unit}   ")
    if _number(rates.get("refused_s")) > 0:
        line.append(f"refused {_figure(rates['refused_s'])}/s", _BAD)
    yield line
    line = Text()
    for name, key in (("TTFT", "ttft_ms"), ("between tokens", "itl_ms")):
        found = _object(system.get(key))
        shown = "  ".join(f"p{part[1:]} {_figure(found.get(part))}" for part in ("p50", "p90", "p99"))
        line.append(f"{name} ", _DIM).append(f"{shown} ms   " if found else "none yet   ")
    yield line.append("(last minute)", _DIM)


def _charts(state: State, size: Size, plain: bool) -> Iterator[Text]:
    """Yield charts of the last minutes, the output rate and the TTFT side by side."""
    if len(state.rows) < 2:
        return
    width = max(8, min(len(state.rows), (size.width - 60) // 2 if size.width > 100 else size.width // 2 - 22))
    output = [_number(_object(row.get("rates") or row).get("output_tokens_s")) for row in state.rows]
    first = [_number(_object(row.get("ttft_ms")).get("p99")) for row in state.rows]
    line = Text("output tok/s ", _DIM)
    line.append(chart(output[-width:], plain)).append(f" max {_figure(max(output))}   ")
    line.append("TTFT p99 ms ", _DIM).append(chart(first[-width:], plain)).append(f" max {_figure(max(first))}")
    yield line


def chart(values: Sequence[float], plain: bool) -> str:
    """Return values as a row of bars, the largest one the highest."""
    top = max(values, default=0.0)
    levels = " .:-=+*#" if plain else LEVELS
    return "".join(levels[min(len(levels) - 1, int(each / top * len(levels)))] if top else levels[0] for each in values)


# -- sections ---------------------------------------------------------------------------------------------------------


def _workers(state: State, plain: bool, trouble_first: bool = False) -> Iterator[Text]:
    """Yield a line for each worker. ``trouble_first``: absent ones and those that are not ready come first, so that
    they are seen even if not all lines are."""
    rows: list[Row] = []
    for each in sorted(state.workers, key=lambda each: trouble_first and each.get("state") == "ready"):
        blocks = _object(each.get("kv_blocks"))
        bar, share = block_bar(blocks, plain), _share(blocks)
        late = _number(each.get("heard_ms"))
        note = share + (f"  silent {late / 1000:.1f} s" if late > 1000 else "") + _gpu_note(each)
        batch = _figure(each.get("batch", each.get("running")))
        cells = [_word(each.get(key)) for key in ("id", "role", "state", "device")]
        rows.append(((*cells, batch, _figure(each.get("waiting")), bar, note), ""))
    for each in state.absent:
        again = each.get("restart_in_s")
        later = f", again in {_number(again):.0f} s" if again is not None else ""
        why = f"{_word(each.get('why'))}{later}"
        absent = (_word(each.get("id")), "", "absent", "", "", "", why, ""), _BAD
        rows.insert(0 if trouble_first else len(rows), absent)
    head = ("worker", "role", "state", "device", "batch", "waiting", "KV blocks", ""), _HEAD
    yield from _table([head, *rows], state_column=2)


def block_bar(blocks: Json, plain: bool) -> str:
    """Return the KV blocks of a worker as a bar: held, cached, free."""
    total = _number(blocks.get("total"))
    if total <= 0:
        return ""
    held = round(BAR * min(1.0, _number(blocks.get("held")) / total))
    cached = round(BAR * min(1.0, (_number(blocks.get("held")) + _number(blocks.get("cached"))) / total)) - held
    signs = "#=." if plain else "█▒·"
    return signs[0] * held + signs[1] * cached + signs[2] * (BAR - held - cached)


def _share(blocks: Json) -> str:
    total = _number(blocks.get("total"))
    return f"{_number(blocks.get('held')) / total:4.0%} held" if total > 0 else ""


def _gpu_note(worker: Json) -> str:
    gpus = objects(worker.get("gpus"))
    busy = [f"{each['utilization']}%" for each in gpus if each.get("utilization") is not None]
    hot = any(each.get("throttled_by") for each in gpus)
    return (f"  GPU {'+'.join(busy)}" if busy else "") + ("  throttled" if hot else "")


def _links(state: State) -> Iterator[Text]:
    if not state.links:
        return
    rows: list[Row] = [(("link", "", "transport", "rate", "latency"), _HEAD)]
    for each in state.links:
        rate, ms = each.get("mb_s"), each.get("ms")
        shown = "" if rate is None else f"{_number(rate) / 1000:.2f} GB/s" if _number(rate) >= 100 else f"{rate} MB/s"
        cells = _word(each.get("from")), _word(each.get("to")), _word(each.get("transport")), shown
        rows.append(((*cells, "" if ms is None else f"{_number(ms):.2f} ms"), ""))
    yield from _table(rows)
    yield Text()


def _changes(state: State) -> Iterator[Text]:
    if not state.changes:
        return
    rows: list[Row] = [(("changes", "worker", "state", "why"), _HEAD)]
    for each in reversed(state.changes):
        when = each.get("t")
        clock = time.strftime("%H:%M:%S", time.localtime(when)) if isinstance(when, int | float) else ""
        rows.append(((clock, _word(each.get("name")), _word(each.get("state")), _word(each.get("why") or "")), ""))
    yield from _table(rows, state_column=2)
    yield Text()


def _requests(state: State, size: Size) -> Iterator[Text]:
    if not state.requests:
        return
    heads = ("request", "state", "path", "prompt", "cached", "output", "TTFT ms", "total ms")
    served = [_served_by(each) for each in state.requests.values()]
    rows: list[Row] = [((*heads, "workers" if any(served) else "", ""), _HEAD)]
    for each, workers in zip(reversed(state.requests.values()), reversed(served), strict=True):
        numbers = [_figure(each.get(key)) for key in ("prompt_tokens", "cached_tokens", "output_tokens")]
        times = [_figure(each.get(key)) for key in ("ttft_ms", "total_ms")]
        name = _word(each.get("id"))
        if size.width < WIDE and len(name) > SHORT_ID:
            name = f"…{name[1 - SHORT_ID :]}"
        cells = name, _word(each.get("state")), _word(each.get("path"))
        rows.append(((*cells, *numbers, *times, workers, _notes(each)), ""))
    yield from _table(rows, state_column=1)


def _served_by(request: Json) -> str:
    """Return the workers that have worked on a request, in order; "" if its spans were not sent."""
    spans = objects(request.get("spans"))
    names = [
        _word(each["worker"]) for each in spans if each.get("worker") and each.get("name") in ("prefill", "decode")
    ]
    return " > ".join(dict.fromkeys(names))


def _notes(request: Json) -> str:
    found = [
        f"{_figure(request.get(key))} {name}" for key, name in (("retries", "retried"), ("migrations", "migrated"))
        if _number(request.get(key))
    ]  # fmt: skip
    if request.get("error"):
        found.append(_word(request["error"]))
    return ", ".join(found)


def _table(rows: Sequence[Row], state_column: int | None = None) -> Iterator[Text]:
    """Yield rows of cells as lines with equal columns; the cell of ``state_column`` has the colour of its state."""
    widths = [max(Text(cell).cell_len for cell in column) for column in zip(*(cells for cells, _ in rows), strict=True)]
    last = len(widths) - 1
    for cells, style in rows:
        line = Text(style=style)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            own = _STATES.get(cell, "") if column == state_column and not style else ""
            padding = "" if column == last else " " * (width - Text(cell).cell_len + 2)
            line.append(cell, own).append(padding)
        yield line


# -- values of the server ---------------------------------------------------------------------------------------------


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _figure(value: object) -> str:
    """Return a number with at most three digits after its first ones, "-" if there is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100 or value == int(value)
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2g}"
    )


def _word(value: object) -> str:
    """Return a text of the server as it may be shown: without control characters, which could drive the terminal."""
    return "" if value is None else printable(str(value)[:300])


def plain_text(lines: Iterable[Text]) -> str:
    """Return lines without styles."""
    return "\n".join(line.plain.rstrip() for line in lines)
