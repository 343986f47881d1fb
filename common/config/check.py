"""Checks a YAML file of options without starting anything: reports every unknown or ill-typed option, not only the
first, each with its line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config.options import Option, YamlOptions, file_text, is_flat, nearest, options, read_document
from common.core.errors import StartError
from common.platform import secret_files

_SERVING = frozenset({"up", "coordinator", "prefill", "decode"})


@dataclass(frozen=True)
class Problem:
    """A problem of a file at a line, 0 for the whole file. ``is_error`` is false for what a command only ignores."""

    line: int
    text: str
    is_error: bool = True


def check_file(path: Path, commands: Mapping[str, type[Any]], command: str = "") -> list[Problem]:
    """Return the problems of a file, by line. ``commands`` are the configurations of all commands by name. A file may
    be shared among commands, so a value is wrong if any command that has the option refuses it; with ``command``, if
    that one does, and options that it does not have are reported, too. Raises StartError if the file is not YAML."""
    document = read_document(path, "--check")
    known = _known(commands)
    found = [*_twice(document, known), *_open_to_others(document, known)]
    for name, line, node in document.items():
        if name not in known:
            found.append(Problem(line, _unknown(name, known)))
        elif command and command not in known[name]:
            why = f"{_spelled(name)} has no effect on tandem {command}; it is an option of {_shown(known[name])}"
            found.append(Problem(line, why, False))
        else:
            takers = {command: known[name][command]} if command else known[name]
            found += (Problem(line, text) for text in _wrong(takers, document.value(node)))
    return sorted(found, key=lambda each: each.line)


def _known(commands: Mapping[str, type[Any]]) -> dict[str, dict[str, Option]]:
    """Return, by name of an option, the commands that have it."""
    found = dict[str, dict[str, Option]]()
    for command, config in commands.items():
        for item in options(config):
            found.setdefault(item.name, {})[command] = item
    return found


def _spelled(name: str) -> str:
    """Return the name of an option as its flag spells it."""
    return name.replace("_", "-")


def _shown(commands: Collection[str]) -> str:
    """Return at most three commands as a text, those that serve first."""
    ordered = sorted(commands, key=lambda each: (each not in _SERVING, each))
    return ", ".join(f"tandem {each}" for each in ordered[:3]) + (" and others" if len(ordered) > 3 else "")


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return the text for an unknown key. One that resembles no option is not shown: it may be a secret."""
    guess = nearest(name, known)
    return (
        f"unknown option {_spelled(name)}: did you mean {_spelled(guess)}?"
        if guess
        else "unknown option: tandem config lists them all"
    )


def _wrong(takers: Mapping[str, Option], value: object) -> Iterator[str]:
    """Yield why commands refuse a value, once for all of them where all refuse it for the same reason."""
    if value is None:  # as if the key were not there
        return
    refused = dict[str, list[str]]()
    for command, item in takers.items():
        if (why := _refusal(item, value)) is not None:
            refused.setdefault(why, []).append(command)
    for why, commands in refused.items():
        of = "" if len(commands) == len(takers) else " (" + ", ".join(f"tandem {each}" for each in commands) + ")"
        yield why + of


def _refusal(item: Option, value: object) -> str | None:
    """Return why an option refuses a value, None if it takes it. A secret value is not shown."""
    text = file_text(item, value) if is_flat(value) else None
    if text is None:
        return f"{_spelled(item.name)} is not a single value: it takes {item.kind.expects}"
    try:
        item.parse(text, _spelled(item.name))
    except StartError as error:
        return f"{error.what}: {error.why}{_meant(item, text)}"
    return None


def _meant(item: Option, text: str) -> str:
    """Return a suggestion for a mistyped choice."""
    choices: Sequence[str] = item.kind.metavar.strip("{}").split(",") if item.kind.metavar.startswith("{") else ()
    guess = None if item.secret else nearest(text.lower(), choices)
    return f"; did you mean {guess}?" if guess else ""


def _twice(document: YamlOptions, known: Collection[str]) -> Iterator[Problem]:
    """Yield the keys that are set before in the same file, whose earlier value would silently have no effect."""
    first = dict[str, int]()
    for name, line in document.own:
        if name in first:
            shown = _spelled(name) if name in known else "a key"  # an unknown one may be a secret
            yield Problem(line, f"{shown} is set again, first in line {first[name]}")
        first.setdefault(name, line)


def _open_to_others(document: YamlOptions, known: Mapping[str, Mapping[str, Option]]) -> Iterator[Problem]:
    """Yield a problem if the file sets a secret and other users can read or write it."""
    for name, line, node in document.items():
        if any(item.secret for item in known.get(name, {}).values()) and document.value(node) is not None:
            try:
                secret_files.check(document.status, document.path, name)
            except StartError as error:
                yield Problem(line, f"{error.why}: {error.todo}")
                return
