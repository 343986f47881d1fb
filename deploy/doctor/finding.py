"""The result of a check, and how results are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from common.core.errors import StartError, TandemError, reason

Level = Literal["good", "warning", "bad"]
_SIGNS: dict[Level, str] = {"good": "ok", "warning": "warn", "bad": "BAD"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found about ``subject``, and what to do about it ("" for what is good)."""

    subject: str
    level: Level
    text: str
    do: str = ""


Check = Callable[[], Iterable[Finding]]


def good(subject: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, "good", text)


def warning(subject: str, text: str, do: str) -> Finding:
    """Return a finding about something that works, but slowly or not for long."""
    return Finding(subject, "warning", text, do)


def bad(subject: str, text: str, do: str) -> Finding:
    """Return a finding about something that does not work, or that is not safe."""
    return Finding(subject, "bad", text, do)


def refused(subject: str, error: StartError) -> Finding:
    """Return the finding for a start that would be refused."""
    return bad(subject, f"{error.what}: {error.why}", error.todo)


def run(subject: str, check: Check) -> Iterator[Finding]:
    """Yield the findings of ``check``. One that fails itself is a warning about ``subject``, so that the others run."""
    try:
        yield from check()
    except StartError as error:
        yield refused(subject, error)
    except (OSError, TandemError, ValueError, LookupError) as error:
        yield warning(subject, f"could not be checked: {reason(error)}", "report this if the file or device is there")


def lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield each finding as a line of text, followed by one with what to do. The subject is written once."""
    before = ""
    for each in findings:
        subject = "" if each.subject == before else each.subject
        before = each.subject
        yield f"{_SIGNS[each.level]:<4}  {subject:<13}  {each.text}"
        if each.do:
            yield f"{'':<4}  {'':<13}  -> {each.do}"


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the findings as JSON."""
    return [asdict(each) for each in findings]
