"""The table of all flags in the README, generated from the options themselves.

python -m deploy.cli.flag_table README.md        rewrites the part between the two markers
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.config.options import GROUPS, Option, options
from deploy.cli.commands import COMMANDS, CONFIGS

BEGIN, END = "<!-- flags: written by `python -m deploy.cli.flag_table README.md` -->", "<!-- /flags -->"


def flag_table() -> str:
    """A Markdown table: one row per flag and meaning, by group."""
    rows: dict[tuple[str, str], tuple[Option, list[str]]] = {}
    for config in CONFIGS:
        names = ", ".join(command.name for command in COMMANDS.values() if command.config is config)
        for item in options(config):
            rows.setdefault((item.name, item.help), (item, []))[1].append(names)
    lines = ["| flag | default | commands | what it does |", "|---|---|---|---|"]
    for group in GROUPS:
        members = [row for row in rows.values() if row[0].group == group]
        if members:
            lines.append(f"| **{group}** | | | |")
        lines += [_row(item, commands) for item, commands in members]
    return "\n".join(lines)


def _row(item: Option, commands: list[str]) -> str:
    names = ", ".join(f"`{flag}`" for flag in (item.flag, *item.aliases))
    return f"| {names} | {item.default_text} | {', '.join(commands)} | {item.help.replace('|', chr(92) + '|')} |"


def with_table(text: str) -> str:
    """``text`` with the table of today between the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the markers {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{flag_table()}\n\n{END}{after}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_table(document.read_text(encoding="utf-8")), encoding="utf-8")
