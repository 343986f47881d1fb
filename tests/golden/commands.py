"""The command line: the flags of each ``tandem`` command, and the output of ``tandem config`` for several settings."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.golden import adapter
from tests.golden.store import HERE, Lines, read_whole, write_whole
from tests.leaked_keys import register

FILE = HERE / "commands.txt"
WIDE = {"COLUMNS": "100000", "NO_COLOR": "1", "PYTHON_COLORS": "0"}
FLAG, VARIABLE = register("key-in-a-flag"), register("key-in-a-variable")
SETTINGS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "alone": ([], {}, ""),
    "flags": (["--log-level", "debug", "--host=0.0.0.0", "--api-key", FLAG], {}, ""),
    "a variable": (
        [],
        {"TANDEM_LOG_LEVEL": "error", "TANDEM_API_KEY": VARIABLE, "TANDEM_PORT": "9000"},
        "",
    ),
    "a file": ([], {}, "log-level: warning\nport: 9001\nlog_format: json\nmax-num-seqs: 8\n"),
    "all three": (
        ["--log-level", "debug"],
        {"TANDEM_LOG_LEVEL": "error", "TANDEM_LOG_FORMAT": "text"},
        "log-level: warning\nlog-format: json\nblock-size: 32\n",
    ),
    "a wrong value": (["--log-level", "loud"], {}, ""),
    "a wrong variable": ([], {"TANDEM_LOG_LEVEL": "loud"}, ""),
    "a wrong file": ([], {}, "log-level: [\n"),
    "a strange flag": (["--log-levle", "debug"], {}, ""),
    "a strange key": ([], {}, "log-levle: debug\n"),
}
"""Flags, environment variables and the text of a configuration file, by name."""
BEYOND = {
    "no command": ["config"],
    "a mistyped command": ["config", "coordinatro"],
    "a family": ["config", "bench"],
    "a mistyped member": ["config", "bench", "serv"],
    "a model": ["config", "some/model", "--prefill", "2"],
    "the version": ["--version"],
}


def kept() -> dict[str, Lines]:
    return read_whole(FILE)


def _run(words: list[str], variables: dict[str, str], folder: str) -> Lines:
    code, out, err = adapter.tandem(words, WIDE | variables)
    lines = [*(f"out: {line}" for line in out.splitlines()), *(f"err: {line}" for line in err.splitlines())]
    return [f"exit code {code}", *(_steady(line, folder) for line in lines)]


def _steady(line: str, folder: str) -> str:
    """Return ``line`` without temporary paths, the version, and spacing that differs between versions of argparse."""
    line = line.replace(folder, "(folder)").replace(adapter.version(), "(version)")
    return re.sub(r"\s+", " ", line).strip()


def _beyond(lines: Lines, alone: Lines) -> Lines:
    """Return the lines that are not in ``alone`` (the output without settings), and their number if that differs."""
    count = [] if len(lines) == len(alone) else [f"{len(lines)} lines"]
    return [*count, *(line for line in lines if line not in alone)]


def record(keys: Iterable[str] | None = None) -> Iterator[tuple[str, Lines]]:
    with tempfile.TemporaryDirectory() as folder:
        for command, flags in adapter.commands().items():
            alone: Lines = []
            for name, (words, variables, text) in SETTINGS.items():
                if keys is None or name == "alone" or f"{command}: {name}" in keys:
                    file = Path(folder) / "config.yaml"
                    file.write_text(text)
                    config = ["--config", str(file)] if text else []
                    lines = _run(["config", *command.split(), *config, *words], variables, folder)
                    alone = alone or lines
                    if keys is None or f"{command}: {name}" in keys:
                        yield f"{command}: {name}", lines if name == "alone" else _beyond(lines, alone)
            if keys is None or f"{command}: flags of --help" in keys:
                yield f"{command}: flags of --help", flags
        for name, words in BEYOND.items():
            if keys is None or name in keys:
                yield name, _run(words, {}, folder)


def freeze() -> str:
    write_whole(FILE, record())
    return f"{len(kept())} command lines"
