"""The entry point of the ``tandem`` command.

Owns the parsing of the command line and the format of failures: three lines (what failed, why, what to do) and a
non-zero exit code. The commands are in :mod:`deploy.cli.commands`. Their functions are imported only when they run, so
that ``tandem --help`` is fast and never imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from common.config.options import Loaded, Parser, add_options, known_flags, nearest, options, show, unknown
from common.config.redaction import without_login
from common.core.errors import StartError
from common.core.printable import printable
from deploy.cli.commands import CHECK_HELP, COMMANDS, CONFIG_HELP, FAMILIES, Command, load_config

MAX_LINE = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 1 for a failed start, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's final flush fails too
        return 128 + signal.SIGPIPE
    except StartError as error:
        if "--debug" in words or os.environ.get("TANDEM_DEBUG", "0").lower() in ("1", "true", "yes", "on"):
            traceback.print_exc()
        print_error(error)
        return 1
    except KeyboardInterrupt:
        if words[:1] == ["bench"]:
            print("interrupted before there was a result", file=sys.stderr)
        return 130


def print_error(error: StartError) -> None:
    """Print what failed, why, and what to do, one line each, to standard error."""
    for label, text in (("error", error.what), ("  why", error.why), ("   do", error.todo)):
        line = printable(" ".join(text.split()))  # a server's words may be among them
        print(f"{label}: {line if len(line) <= MAX_LINE else line[:MAX_LINE] + ' ...'}", file=sys.stderr)


# -- arguments --------------------------------------------------------------------------------------------------------


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the main parser, and the parser of each command by name."""
    parser = Parser(
        prog="tandem",
        description="LLM serving with separate prefill and decode worker pools.",
        epilog="Each flag can also be set by an environment variable (--port: TANDEM_PORT) or a key of a YAML file"
        " (--config FILE).",
    )
    parser.add_argument("--version", action="version", version=f"tandem {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    made: dict[str, Parser] = {}
    families: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        family, _, last = name.rpartition(" ")
        if family and family not in families:
            families[family] = _family(commands, family)
        parsers = families.get(family, commands)
        made[name] = parsers.add_parser(last, help=command.help, description=command.help, usage=_usage(command))
        made[name].set_defaults(run=partial(_run, command))
        if command.argument is not None:
            argument, help = command.argument
            made[name].add_argument(argument, nargs="?", metavar=argument.upper(), help=help)
        add_options(made[name], command.config)
    shown = commands.add_parser(  # only for its help: see _dispatch
        "config",
        help=CONFIG_HELP,
        description=f"{CONFIG_HELP[0].upper()}{CONFIG_HELP[1:]}: a flag, an environment variable, the YAML file or the "
        "default. Takes the flags of COMMAND, which is up if none is given.",
        usage="tandem config [COMMAND] [FLAGS]\n       tandem config --check FILE [COMMAND]",
    )
    shown.add_argument("--check", metavar="FILE", help=CHECK_HELP)
    return parser, made


def _family(commands: Any, name: str) -> Any:
    """Add the command group ``tandem NAME`` and return its subparsers. Without a subcommand it prints its help."""
    parser = commands.add_parser(name, help=FAMILIES[name], description=FAMILIES[name])

    def show(_: dict[str, Any]) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show)
    return parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def _usage(command: Command) -> str:
    positional = "".join(f" [{item.flag}]" for item in options(command.config) if item.positional)
    argument = f" [{command.argument[0].upper()}]" if command.argument is not None else ""
    return f"tandem {command.name}{positional}{argument} [FLAGS]"


def _dispatch(words: list[str]) -> int:
    parser, commands = build_parser()
    if not words:
        parser.print_help()
        return 0
    if words[0] == "config" and words[1:2] and words[1].partition("=")[0] == "--check":
        return _check(words[1:], commands)
    explain = words[0] == "config" and words[1:2] not in (["--help"], ["-h"])
    if explain:  # `tandem config COMMAND FLAGS` accepts the flags of COMMAND
        words = _explained(words[1:], commands)
    name = _named(words, commands)
    given, strange = parser.parse_known_args(words)
    if strange:
        raise _strange_word(strange, commands.get(name, parser))
    arguments = vars(given)
    run: Callable[[dict[str, Any]], int] = arguments.pop("run")
    return _config(COMMANDS[name], arguments) if explain else run(arguments)


def _check(words: list[str], commands: Collection[str]) -> int:
    """Run ``tandem config --check FILE [COMMAND]``; ``words`` begin with the flag."""
    flag, _, file = words[0].partition("=")
    file, rest = (file, words[1:]) if file else (next(iter(words[1:]), ""), words[2:])
    if not file or file.startswith("-"):
        raise StartError(f"{flag} needs a file", "it checks the options in one", "tandem config --check FILE")
    name = _named(rest, commands) if rest else ""
    if name and (name not in COMMANDS or len(name.split()) < len(rest)):
        raise StartError("tandem config --check takes a file and a command", f"not {' '.join(rest)}", "leave it out")
    from deploy.cli.check import run

    return run(Path(file), name)


def _named(words: Sequence[str], commands: Collection[str]) -> str:
    """Return the one- or two-word command with which ``words`` begin. Raises StartError if there is no such command."""
    first, second = words[0], next(iter(words[1:]), "-")
    if first.startswith("-") or first in commands or first == "config":
        return first
    if first == "serve":  # vLLM's
        raise StartError("there is no command tandem serve", "tandem up serves a model", "tandem up MODEL")
    if first not in FAMILIES:
        raise unknown("command", first, [*commands, *FAMILIES, "config"], "tandem", "tandem --help")
    if second.startswith("-") or f"{first} {second}" in commands:
        return f"{first} {second}"
    members = [name.partition(" ")[2] for name in commands if name.startswith(f"{first} ")]
    raise unknown("command", second, members, f"tandem {first}", f"tandem {first} --help")


def _explained(words: list[str], commands: Collection[str]) -> list[str]:
    """Return the command line that ``tandem config WORDS`` explains. Without a command it is that of ``up``.

    A first word that is similar to a command is treated as a typing error, unless a model directory has that name.
    """
    first = next(iter(words), "-")
    if first in commands or " ".join(words[:2]) in commands:
        return words
    if first in FAMILIES:
        _named(words, commands)
        raise StartError(f"tandem {first} has no flags itself", "its commands do", f"tandem {first} --help lists them")
    if not first.startswith("-") and nearest(first, commands) and not Path(first).is_dir():
        raise unknown("command", first, commands, "tandem", f"for a hub model: tandem config up {first}; tandem --help")
    return ["up", *words]


def _strange_word(strange: Sequence[str], parser: Parser) -> StartError:
    """Return the error for unknown arguments. It names the first unknown flag, else the first word."""
    for word in strange:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            return unknown("flag", flag, known_flags(parser), parser.prog, f"{parser.prog} --help")
    return StartError(
        f"{parser.prog}: unexpected argument {strange[0]}", "it takes fewer arguments", f"see {parser.prog} --help"
    )


# -- commands ---------------------------------------------------------------------------------------------------------


def version() -> str:
    """Return the installed version of Tandem, "source" where it runs from a source tree and is not installed."""
    try:
        return metadata.version("tandem")
    except metadata.PackageNotFoundError:
        return "source"


def _run(command: Command, given: dict[str, Any]) -> int:
    """Load the configuration, print its warnings, and run the command."""
    words = [] if command.argument is None else [given.pop(command.argument[0], None)]
    loaded: Loaded[Any] = load_config(command.config, given, os.environ, **command.fixed)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if command.measures:
        from bench.load.results import check_outputs

        check_outputs(*(getattr(loaded.config, name, None) for name in ("save", "plot", "cost")))
    return command.load_function()(loaded.config, *words)


def _config(command: Command, given: dict[str, Any]) -> int:
    """Print each value of a command's configuration and its origin. Secrets are hidden."""
    loaded: Loaded[Any] = load_config(command.config, given, os.environ, **command.fixed)
    rows = []
    for item in options(command.config):
        value, origin = getattr(loaded.config, item.name), loaded.origins[item.name]
        if item.secret and value:
            text = "(hidden)"
        else:
            text = item.default_text if origin == "default" else without_login(show(value))
        rows.append((item.name, text, origin))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for option, text, origin in rows:
        print(f"{option:<{widths[0]}}  {text:<{widths[1]}}  {origin}")
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0
