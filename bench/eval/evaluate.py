"""``tandem eval``: runs the golden set against any OpenAI-compatible server, to detect a loss of quality.

Sends every item with greedy sampling, judges the answers with their checkers, and shows the fraction of right answers
per skill. The result can be compared with a saved baseline after a change of engine, quantization or version; a drop is
shown, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.eval.checks import Answer, Verdict, check
from bench.load import results
from common.config.eval import EvalConfig
from common.core.errors import StartError, reason
from common.net.http_client import shown

GOLDEN = Path(__file__).resolve().parent / "golden" / "builtin.jsonl"
MAX_TOKENS = 256
Record = dict[str, Any]


@dataclass
class Figures:
    """Counts of one skill: items, right answers, and answers in a valid form."""

    items: int = 0
    right: int = 0
    valid: int = 0

    @property
    def share(self) -> float:
        """Fraction of right answers."""
        return self.right / self.items if self.items else 0.0


@dataclass
class EvaluationReport:
    """The result of an evaluation. ``golden`` is the digest of the golden set: only results of the same set may be
    compared. ``fingerprint`` is the server's ``system_fingerprint``."""

    model: str
    golden: str
    fingerprint: str = ""
    skills: dict[str, Figures] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def total(self) -> Figures:
        """The sums over all skills."""
        skills = self.skills.values()
        return Figures(sum(s.items for s in skills), sum(s.right for s in skills), sum(s.valid for s in skills))

    def add(self, record: Record, said: str, verdict: Verdict) -> None:
        """Count the answer ``said`` to a golden item; a wrong one is listed in ``failures``."""
        figures = self.skills.setdefault(record["skill"], Figures())
        figures.items += 1
        figures.right += verdict.right
        figures.valid += verdict.valid
        if not verdict.right:
            asked = str(record["messages"][-1]["content"])
            self.failures.append({"skill": record["skill"], "asked": asked, "said": said, "why": verdict.why})

    def only(self, skills: Iterable[str]) -> EvaluationReport:
        """Return the report restricted to these skills. Raises StartError if it lacks one of them."""
        if missing := [name for name in skills if name not in self.skills]:
            raise StartError(
                f"the baseline lacks {', '.join(missing)}",
                f"its skills are {', '.join(self.skills)}",
                "correct --skills, or record it again with --save",
            )
        kept = {name: self.skills[name] for name in skills}
        failures = [failure for failure in self.failures if failure["skill"] in kept]
        return replace(self, skills=kept, failures=failures)

    def as_json(self) -> dict[str, Any]:
        """Return the report as :meth:`load` reads it."""
        skills = {name: vars(figures) for name, figures in self.skills.items()}
        return {
            "model": self.model, "fingerprint": self.fingerprint, "golden": self.golden, "skills": skills,
            "failures": self.failures,
        }  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> EvaluationReport:
        """Read a saved report. Raises StartError if there is none."""
        try:
            data = results.load(path)
            skills = {name: Figures(**figures) for name, figures in data["skills"].items()}
            return cls(data["model"], data["golden"], data["fingerprint"], skills, data["failures"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StartError(f"cannot read the baseline {path}", reason(error), "record one with --save") from error


# -- asking -----------------------------------------------------------------------------------------------------------


async def evaluate(
    url: str,
    *,
    model: str = "",
    golden: Path = GOLDEN,
    concurrency: int = 4,
    api_key: str = "",
    skills: Sequence[str] = (),
    timeout_s: float = 120.0,
    console: Console | None = None,
) -> EvaluationReport:
    """Send the golden items of ``skills`` (all if empty) to the server at ``url`` (with or without ``/v1``).

    A request that fails counts as a wrong answer. Raises StartError if all fail: that says nothing about quality."""
    records, digest = read_golden(golden, skills)
    base = shown(url).rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limit = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(force_close=True)  # the server may close a kept-alive one just as it is reused
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        report = EvaluationReport(model or await _first_model(session, base), digest)
        with _progress(console) as progress:
            task = progress.add_task("asking", total=len(records))

            async def one(record: Record) -> tuple[Answer | None, str]:
                async with limit:
                    found = await _ask(session, base, report, record)
                    progress.advance(task)
                    return found

            answers = await asyncio.gather(*(one(record) for record in records))
    if not any(answer for answer, _ in answers):
        raise StartError(f"{base} has answered no request", answers[0][1], "try again when its /ready answers 200")
    for record, (answer, error) in zip(records, answers, strict=True):
        verdict = check(record["check"], answer) if answer else Verdict(False, False, error)
        report.add(record, _shown(answer), verdict)
    return report


def read_golden(path: Path, skills: Sequence[str] = ()) -> tuple[list[Record], str]:
    """Read the records of ``skills`` (all if empty), and the digest of the whole file. Raises StartError."""
    try:
        content = path.read_bytes()
        records: list[Record] = [json.loads(line) for line in content.splitlines()]
        if not records:
            raise ValueError("the file is empty")
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read the golden set {path}", reason(error), "name another with --golden") from error
    known = {record["skill"] for record in records}
    if unknown := sorted(set(skills) - known):
        raise StartError(
            f"the golden set has no items for {', '.join(unknown)}",
            f"the skills of {path.name} are {', '.join(sorted(known))}",
            "correct --skills",
        )
    chosen = [record for record in records if not skills or record["skill"] in skills]
    return chosen, hashlib.blake2b(content, digest_size=8).hexdigest()


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    try:
        async with session.get(f"{base}/models") as response:
            if response.status in (401, 403):
                why = "the server rejects the given key" if "Authorization" in session.headers else "none was given"
                raise StartError(f"{base} requires an API key", why, "give --api-key or set TANDEM_API_KEY")
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise StartError(f"no model answers at {base}", reason(error), "start one: tandem up") from error


async def _ask(
    session: aiohttp.ClientSession, base: str, report: EvaluationReport, record: Record
) -> tuple[Answer | None, str]:
    """Return the answer to one item, or None and the reason."""
    body: Record = {
        "model": report.model, "messages": record["messages"],
        "temperature": 0, "max_tokens": MAX_TOKENS, "stream": False,
    }  # fmt: skip
    if record.get("tools"):
        body["tools"] = record["tools"]
    try:
        async with session.post(f"{base}/chat/completions", json=body) as response:
            data = await response.json(content_type=None)
            if response.status != 200:
                return None, f"HTTP {response.status}: {data['error']['message']}"
        report.fingerprint = data.get("system_fingerprint") or report.fingerprint
        return _answer(data["choices"][0]["message"]), ""
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        return None, reason(error)


def _answer(message: Record) -> Answer:
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = None
        calls.append((call["function"]["name"], arguments))
    return Answer(message.get("content") or "", tuple(calls))


def _shown(answer: Answer | None) -> str:
    if answer is None:
        return ""
    return answer.text + "".join(f"{name}({json.dumps(arguments)})" for name, arguments in answer.calls)


# -- showing ----------------------------------------------------------------------------------------------------------


def _progress(console: Console | None) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=console is None, transient=True)


def table(report: EvaluationReport, baseline: EvaluationReport | None = None) -> Table:
    """Return a table of the results per skill, beside the baseline's if there is one."""
    if baseline:
        baseline = comparable(baseline, report)
    shown = Table(title=f"golden set: {escape(report.model)}", title_justify="left")
    for name in ("skill", "items", "right", "valid", *(("baseline", "change") if baseline else ())):
        shown.add_column(name, justify="left" if name == "skill" else "right")
    for name, figures in [*report.skills.items(), ("all", report.total)]:
        row = [name, str(figures.items), f"{figures.share:.1%}", f"{figures.valid / figures.items:.1%}"]
        if baseline:
            before = baseline.total if name == "all" else baseline.skills[name]
            change = figures.share - before.share
            colour = "red" if change < 0 else "green" if change > 0 else "dim"
            row += [f"{before.share:.1%}", f"[{colour}]{change:+.1%}[/]"]
        shown.add_row(*row, end_section=name == list(report.skills)[-1], style="bold" if name == "all" else "")
    return shown


def comparable(baseline: EvaluationReport, report: EvaluationReport) -> EvaluationReport:
    """Return ``baseline`` restricted to the skills in ``report``. Raises StartError if their golden sets differ."""
    if report.golden != baseline.golden:
        raise StartError(
            "the baseline was recorded with another golden set",
            f"its digest is {baseline.golden}, not {report.golden}",
            "record it again with --save",
        )
    return baseline.only(report.skills)


def drops(report: EvaluationReport, baseline: EvaluationReport, tolerance: float, skill_tolerance: float) -> list[str]:
    """Describe each skill of ``report``, and the total, that fell below ``baseline`` by more than the tolerance.

    Tolerances are fractions: ``skill_tolerance`` for each skill, ``tolerance`` for the total."""
    baseline, found = comparable(baseline, report), []
    for name, before in [*baseline.skills.items(), ("all", baseline.total)]:
        now = report.total if name == "all" else report.skills[name]
        allowed = tolerance if name == "all" else skill_tolerance
        if before.share - now.share > allowed + 1e-9:
            found.append(f"{name} fell from {before.share:.1%} to {now.share:.1%}")
    return found


# -- command line -----------------------------------------------------------------------------------------------------


def run(config: EvalConfig) -> int:
    """Run ``tandem eval``. Returns exit code 1 if something fell below a given baseline. Raises StartError if nothing
    could be measured."""
    baseline = EvaluationReport.load(Path(config.compare)) if config.compare else None
    skills = [name.strip() for name in (config.skills or "").split(",") if name.strip()]
    console = Console()
    report = asyncio.run(
        evaluate(
            config.url, model=config.served_model_name or "", golden=Path(config.golden or GOLDEN),
            concurrency=config.concurrency, api_key=config.api_key or "", skills=skills, console=console,
        )
    )  # fmt: skip
    if config.save:
        results.save(Path(config.save), {"label": config.label} | report.as_json())
    console.print(table(report, baseline))
    for failure in report.failures[: config.failures]:
        text = f"{failure['skill']}: {failure['asked']!r} -> {failure['said']!r}: {failure['why']}"
        console.print(text, markup=False, highlight=False)
    found = drops(report, baseline, config.tolerance, config.skill_tolerance) if baseline else []
    for line in found:
        console.print(f"[red]drop:[/] {line}")
    return 1 if found else 0
