"""``tandem config --check FILE [COMMAND]``: prints what is wrong with a YAML file of options, without starting
anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.config.check import Problem, check_file
from common.core.errors import StartError
from common.core.printable import printable
from deploy.cli.commands import COMMANDS, load_config


def run(path: Path, command: str) -> int:
    """Print the problems of the file as lines ``FILE:LINE: text``; exit code 1 if one is an error. With ``command`` the
    options are also loaded together, as that command would. Raises StartError if the file is not YAML."""
    found = check_file(path, {name: each.config for name, each in COMMANDS.items()}, command)
    if command and not any(each.is_error for each in found):
        found += _together(path, command)
    for each in found:
        place = f"{path}:{each.line}" if each.line else f"{path}"
        print(f"{place}: {'' if each.is_error else 'note: '}{printable(each.text)}")
    wrong = sum(each.is_error for each in found)
    if not wrong:
        print(f"{path}: no errors" + (f"; tandem {command} accepts it" if command else ""))
    return 1 if wrong else 0


def _together(path: Path, command: str) -> list[Problem]:
    """Return a problem if ``command`` refuses the options of the file, which it takes one by one, together."""
    known = COMMANDS[command]
    try:
        config: Any = load_config(known.config, {"config": str(path)}, {}, **known.fixed).config
        if hasattr(config, "check_binds"):
            config.check_binds()
    except StartError as error:
        return [Problem(0, f"{error.what}: {error.why}; {error.todo}")]
    return []
