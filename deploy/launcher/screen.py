"""The output of ``tandem up``: live progress and a summary on a terminal, log lines otherwise.

Owns the presentation only. :mod:`deploy.launcher.supervisor` provides the facts.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.kv.budget import human_bytes
from deploy.launcher.status import Fact, Report

log = logging.getLogger("tandem.up")
_LINK_NAMES = {"shm": "shared memory", "zmq": "ZeroMQ over TCP"}
_REPEATED, _DETAILS = "KV pool ", re.compile(r"attention (?:native\b|cpu: as requested)|\d+ linear layers packed")
"""Notes of a worker that are not shown because they repeat its KV budget, and those that are shown at log level debug
only."""


CHAT_KEYS = "Ctrl-C stops an answer, Ctrl-D ends the chat and stops the server"


def chat_ended(on_terminal: bool) -> str:
    """Return why ``tandem up --chat`` stops. ``on_terminal``: whether standard input is a terminal."""
    why = "" if on_terminal else ": standard input is not a terminal, so it was read as one prompt"
    return f"the chat has ended{why}; stopping the server"


def command() -> str:
    """Return how to call ``tandem`` from the current shell: by name if it is on the PATH, else by the path with which
    this process was started."""
    if shutil.which("tandem") is None and Path(sys.argv[0]).name == "tandem":
        return shlex.quote(sys.argv[0])
    return "tandem"


@dataclass(frozen=True)
class WorkerFacts:
    """A ready worker: the facts of its "ready" report and its cores. ``detailed``: show all notes."""

    label: str
    cores: str
    facts: dict[str, Fact]
    detailed: bool = False

    @property
    def compute(self) -> str:
        """Device, dtype and cores as text, as far as known."""
        return ", ".join(str(part) for part in (self.facts.get("device"), self.facts.get("dtype"), self.cores) if part)

    @property
    def budget(self) -> str:
        """The KV budget as text, in tokens, bytes and full-length requests."""
        tokens, longest = self.facts.get("kv_tokens"), self.facts.get("max_model_len")
        if not isinstance(tokens, int):
            return "ready"
        size = self.facts.get("kv_bytes")
        text = f"KV for {tokens:,} tokens" + (f" in {human_bytes(size)}" if isinstance(size, int) else "")
        if isinstance(longest, int) and longest > 0:
            many = tokens / longest
            count = str(int(many)) if many >= 10 else f"{many:.1f}".removesuffix(".0")
            text += f" = {count} {'request' if count == '1' else 'requests'} of {longest:,}"
        return text

    @property
    def notes(self) -> list[str]:
        """The worker's automatic choices with their reasons, filtered for display."""
        notes = self.facts.get("notes")
        shown = [note for note in notes if not note.startswith(_REPEATED)] if isinstance(notes, list) else []
        return shown if self.detailed else [note for note in shown if not _DETAILS.match(note)]


@dataclass(frozen=True)
class Serving:
    """The content of the summary that is shown once the server is ready.

    ``links``: the links of /admin/workers with the sender added as ``from``, or names of transports. ``keyed``: whether
    clients need an API key. ``chat``: whether a chat in this terminal follows. ``chats``: whether the model has a chat
    template.
    """

    model: str
    url: str
    workers: tuple[WorkerFacts, ...]
    links: tuple[object, ...]
    keyed: bool
    chat: bool = False
    chats: bool = True

    def transfers(self) -> list[str]:
        """Return the KV links as text, with the names of the workers if there are several links. Empty without
        links."""
        several = len(self.links) > 1
        return sorted({text for link in self.links if (text := _link_text(link, several))})

    def examples(self) -> list[str]:
        """Return shell commands to try, ready to paste. If clients need a key, the first one sets it."""
        path, prompt = "completions", '"prompt":"Once upon a time"'
        if self.chats:
            path, prompt = "chat/completions", '"messages":[{"role":"user","content":"Hello"}]'
        body = f'{{"model":"{self.model}",{prompt},"stream":true,"max_tokens":32}}'
        key = ' -H "authorization: Bearer $TANDEM_API_KEY"' if self.keyed else ""
        curl = f"curl -N {self.url}/v1/{path} -H 'content-type: application/json'{key} -d {shlex.quote(body)}"
        chat = f"{command()} chat" + ("" if self.url.endswith("127.0.0.1:8000") else f" --url {self.url}")
        return [
            *(["export TANDEM_API_KEY=...  # your key"] if self.keyed else []),
            curl,
            *([chat] if self.chats else []),
        ]


class Screen(Protocol):
    """The output of the launcher."""

    def begin(self, title: str, notice: str) -> None:
        """Show the title and, if it is not empty, a notice: the start begins."""

    def progress(self, label: str, report: Report) -> None:
        """Show a status report of the child ``label``."""

    def serving(self, facts: Serving) -> None:
        """Show the summary: all children are ready."""

    def fact(self, text: str) -> None:
        """Show one line about what the launcher does."""

    def log(self, line: str) -> None:
        """Show a line of a child's output."""

    def close(self) -> None:
        """End the display of progress. May be called more than once."""


class Lines:
    """The output without a terminal: one log line per fact. Log lines of children are copied to standard error."""

    def __init__(self) -> None:
        self._stages: dict[str, str] = {}

    def begin(self, title: str, notice: str) -> None:
        self.fact(title)
        if notice:
            self.fact(notice)

    def progress(self, label: str, report: Report) -> None:
        if report.stage and self._stages.get(label) != report.stage:
            self._stages[label] = report.stage
            self.fact(f"{label}: {_stage_text(report)}")

    def serving(self, facts: Serving) -> None:
        for worker in facts.workers:
            self.fact(f"{worker.label}: {worker.budget}" + (f" ({worker.compute})" if worker.compute else ""))
            for note in worker.notes:
                self.fact(f"{worker.label}: {note}")
        for text in facts.transfers():
            self.fact(f"transfer: {text}")
        self.fact(f"serving {facts.model} on {facts.url}")
        self.fact(f"page: {facts.url}/ui")
        if facts.chat:
            self.fact(CHAT_KEYS)
            return
        for example in facts.examples():
            self.fact(f"try: {example}")

    def fact(self, text: str) -> None:
        log.info("%s", text)

    def log(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Terminal:
    """The output on a terminal: progress bars during the start, then a table of the workers. Log lines of children are
    printed dim."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("  [bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("[dim]{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def begin(self, title: str, notice: str) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/]")
        if notice:
            self._console.print(f"[yellow]{escape(notice)}[/]")
        self._bars.start()

    def progress(self, label: str, report: Report) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None, text="starting")
        if report.stage:
            total = report.total if report.done < report.total else None
            if total is None:  # a full bar would stop the elapsed time, and update() cannot unset a total
                next(bar for bar in self._bars.tasks if bar.id == self._tasks[label]).total = None
            text = escape(_stage_text(report))
            self._bars.update(self._tasks[label], completed=report.done, total=total, text=text)
        elif report.ready is not None:
            self._bars.update(self._tasks[label], completed=1, total=1, text="ready")

    def serving(self, facts: Serving) -> None:
        self.close()
        table = Table.grid(padding=(0, 3))
        for worker in facts.workers:
            table.add_row(f"  [bold]{worker.label}", worker.budget, f"[dim]{escape(worker.compute)}")
            for note in worker.notes:
                table.add_row("", f"[dim]{escape(note)}", "")
        for text in facts.transfers():
            table.add_row("  [bold]transfer", text, "")
        table.add_row("  [bold]serving", f"[green]{facts.url}[/]", "")
        table.add_row("  [bold]page", f"[green]{facts.url}/ui[/]", "")
        self._console.print(table)
        if facts.chat:
            self._console.print(f"\n  [dim]{CHAT_KEYS}[/]\n")
            return
        self._console.print("\n  try")
        for example in facts.examples():  # not wrapped, so that they can be copied
            self._console.print(f"    [cyan]{escape(example)}[/]", soft_wrap=True)
        self._console.print("\n  [dim]Ctrl-C stops the server[/]\n")

    def fact(self, text: str) -> None:
        clock = f"{datetime.now().astimezone():%H:%M:%S}"
        self._console.print(f"[dim]{clock} up: {escape(text)}[/]")

    def log(self, line: str) -> None:
        self._console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


def _stage_text(report: Report) -> str:
    count = f" {report.done}/{report.total}" if report.done and report.total else ""
    return f"{report.stage}{count}" + (f": {report.text}" if report.text else "")


def _link_text(link: Any, named: bool) -> str:
    """Return a link of /admin/workers as text. It is the name of a transport, or an object with measurements.
    ``named``: whether to add the names of the two workers."""
    if isinstance(link, str):
        return _LINK_NAMES.get(link, link)
    if not isinstance(link, dict):
        return ""
    kind = str(link.get("transport", ""))
    text = _LINK_NAMES.get(kind, kind)
    if named and link.get("from") and link.get("to"):
        text = f"{link['from']} to {link['to']}: {text}"
    if isinstance(rate := link.get("gb_per_s"), (int, float)):
        text += f", {rate:.1f} GB/s" if rate >= 0.1 else f", {1000 * rate:.1f} MB/s"
    if isinstance(latency := link.get("latency_us"), (int, float)):
        text += f", {latency:.0f} µs"
    return text
