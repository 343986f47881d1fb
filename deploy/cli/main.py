"""The ``tandem`` command.

Owns the sub-commands and how a failure looks: at most five lines that say what, why and what to do, and an exit code
that is not 0. Imports of the roles are inside the functions, so that ``tandem --help`` is instant and never sees torch.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

from common.config.commands import (
    BenchBatchingConfig,
    BenchCompareConfig,
    BenchGoodputConfig,
    BenchKernelsConfig,
    BenchPlanConfig,
    BenchRooflineConfig,
    BenchServeConfig,
    C,
    ChatConfig,
    CoordinatorConfig,
    EvalConfig,
    KeygenConfig,
    ScaleConfig,
    UpConfig,
    WorkerConfig,
    load_config,
)
from common.config.options import Loaded, Parser, add_options, known_flags, nearest, options, show, unknown
from common.config.redaction import without_login
from common.core.errors import StartError
from common.platform.log import setup_logging

MAX_LINE = 300
Command = Callable[[dict[str, Any]], int]
R = TypeVar("R", CoordinatorConfig, WorkerConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code. 1 for a failed start, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read it has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does the interpreter write what is left
        return 128 + signal.SIGPIPE
    except StartError as error:
        if "--debug" in words or os.environ.get("TANDEM_DEBUG", "0").lower() in ("1", "true", "yes", "on"):
            traceback.print_exc()
        print_error(error)
        return 1
    except KeyboardInterrupt:
        if words[:1] == ["bench"]:
            print("interrupted, before there was a result", file=sys.stderr)
        return 130


def print_error(error: StartError) -> None:
    """What, why and what to do, one line each."""
    for label, text in (("error", error.what), ("  why", error.why), ("   do", error.todo)):
        line = " ".join(text.split())
        print(f"{label}: {line if len(line) <= MAX_LINE else line[:MAX_LINE] + ' ...'}", file=sys.stderr)


# -- arguments --------------------------------------------------------------------------------------------------------


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and that of each command by name."""
    parser = Parser(
        prog="tandem",
        description="LLM serving with separate prefill and decode worker pools.",
        epilog="Every flag is also a variable (--port: TANDEM_PORT) and a key of the YAML file that --config names.",
    )
    parser.add_argument("--version", action="version", version=f"tandem {version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    made: dict[str, Parser] = {}
    families: dict[str, Any] = {}
    for name, (help, config, command) in COMMANDS.items():
        family, _, last = name.rpartition(" ")
        if family and family not in families:
            families[family] = _family(commands, family)
        parsers = families.get(family, commands)
        made[name] = parsers.add_parser(last, help=help, description=help, usage=_usage(name, config))
        made[name].set_defaults(command=command)
        if name == "chat":
            made[name].add_argument("prompt", nargs="?", metavar="PROMPT", help="ask this, print the answer and leave")
        add_options(made[name], config)
    commands.add_parser("config", help="print each value of a command's flags and where it came from")  # see _dispatch
    return parser, made


def _family(commands: Any, name: str) -> Any:
    """The sub-commands of ``tandem NAME``, which shows them when it is given none."""
    parser = commands.add_parser(name, help=FAMILIES[name], description=FAMILIES[name])

    def show(_: dict[str, Any]) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(command=show)
    return parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def _usage(name: str, config: type[Any]) -> str:
    model = " [MODEL]" if any(item.positional for item in options(config)) else ""
    return f"tandem {name}{model}{' [PROMPT]' if name == 'chat' else ''} [FLAGS]"


def _dispatch(words: list[str]) -> int:
    parser, commands = build_parser()
    if not words:
        parser.print_help()
        return 0
    explain = words[0] == "config"
    if explain:  # `tandem config COMMAND FLAGS` takes what that command takes
        words = _explained(words[1:], commands)
    name = _named(words, commands)
    given, strange = parser.parse_known_args(words)
    if strange:
        raise _strange_word(strange, commands.get(name, parser))
    arguments = vars(given)
    command: Command = arguments.pop("command")
    return _config(name, arguments) if explain else command(arguments)


def _named(words: Sequence[str], commands: Collection[str]) -> str:
    """The command that ``words`` begin with, of one word or two; StartError if there is none of that name."""
    first, second = words[0], next(iter(words[1:]), "-")
    if first.startswith("-") or first in commands:
        return first
    if first not in FAMILIES:
        raise unknown("command", first, [*commands, *FAMILIES, "config"], "tandem", "tandem --help")
    if second.startswith("-") or f"{first} {second}" in commands:
        return f"{first} {second}"
    members = [name.partition(" ")[2] for name in commands if name.startswith(f"{first} ")]
    raise unknown("command", second, members, f"tandem {first}", f"tandem {first} --help")


def _explained(words: list[str], commands: Collection[str]) -> list[str]:
    """The command line that ``tandem config WORDS`` is about: without a command it is that of ``up``.

    A word that is nearly a command is one mistyped, unless there is a model of that name here.
    """
    first = next(iter(words), "-")
    if first in commands or " ".join(words[:2]) in commands:
        return words
    if first in FAMILIES:
        _named(words, commands)
        raise StartError(f"tandem {first} alone takes no flags", "its commands do", f"tandem {first} --help lists them")
    if not first.startswith("-") and nearest(first, commands) and not Path(first).is_dir():
        raise unknown("command", first, commands, "tandem", f"for a hub model: tandem config up {first}; tandem --help")
    return ["up", *words]


def _strange_word(strange: Sequence[str], parser: Parser) -> StartError:
    """The error for words that no option takes: the first flag among them, else the first word."""
    for word in strange:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            return unknown("flag", flag, known_flags(parser), parser.prog, f"{parser.prog} --help")
    return StartError(
        f"{parser.prog} does not know what {strange[0]} is for", "it takes fewer arguments", f"see {parser.prog} --help"
    )


def _load(config: type[C], given: dict[str, Any], **fixed: Any) -> C:
    """The configuration of a command; warnings are printed."""
    loaded: Loaded[C] = load_config(config, given, os.environ, **fixed)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded.config


def _measuring(config: type[C], given: dict[str, Any], **fixed: Any) -> C:
    """The configuration of a command that measures; the files that it is to write can be written."""
    from bench.load.results import check_outputs

    loaded = _load(config, given, **fixed)
    check_outputs(*(getattr(loaded, name, None) for name in ("save", "plot", "cost")))
    return loaded


# -- commands ---------------------------------------------------------------------------------------------------------


def version() -> str:
    """Tandem's version."""
    return metadata.version("tandem")


def _up(given: dict[str, Any]) -> int:
    config = _load(UpConfig, given)
    config.check_binds()
    from deploy.launcher.supervisor import run

    return run(config)


def _coordinator(given: dict[str, Any]) -> int:
    config = _openable(_load(CoordinatorConfig, given))
    setup_logging(config.log_level, config.log_format, "coordinator")
    from coordinator.app import run

    return run(config)


def _prefill(given: dict[str, Any]) -> int:
    return _worker(_load(WorkerConfig, given, role="prefill"))


def _decode(given: dict[str, Any]) -> int:
    return _worker(_load(WorkerConfig, given, role="decode"))


def _worker(config: WorkerConfig) -> int:
    config = _openable(config)
    setup_logging(config.log_level, config.log_format, config.name or config.role)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it: so be it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to clean up before it serves, and torch ends noisily
    from deploy.worker import run

    return run(config)


def _openable(config: R) -> R:
    """The same with the built-in model where none is named; a model that cannot be served is refused here already."""
    from common.checkpoint.files import open_checkpoint
    from deploy.launcher import builtin

    config.check_binds()
    named, notice = builtin.with_model(config, os.environ)
    if notice:
        print(f"no model is named: serving the built-in one; {notice}", file=sys.stderr)
    checkpoint = open_checkpoint(named.model, named.revision, named.trust_remote_code)
    if isinstance(named, WorkerConfig):
        from deploy.launcher.preflight import check_worker

        check_worker(checkpoint, named)
    return named


def _chat(given: dict[str, Any]) -> int:
    prompt = given.pop("prompt", None)
    config = _load(ChatConfig, given)
    from deploy.cli.chat import run

    return run(config, prompt)


def _scale(given: dict[str, Any]) -> int:
    config = _load(ScaleConfig, given)
    from deploy.cli.scale import run

    return run(config)


def _eval(given: dict[str, Any]) -> int:
    config = _measuring(EvalConfig, given)
    from bench.eval.evaluate import run

    return run(config)


def _bench_serve(given: dict[str, Any]) -> int:
    config = _measuring(BenchServeConfig, given)
    from bench.commands.serve import run

    return run(config)


def _bench_goodput(given: dict[str, Any]) -> int:
    config = _measuring(BenchGoodputConfig, given)
    from bench.commands.goodput import run

    return run(config)


def _bench_compare(given: dict[str, Any]) -> int:
    config = _measuring(BenchCompareConfig, given)
    from bench.commands.compare import run

    return run(config)


def _bench_batching(given: dict[str, Any]) -> int:
    config = _measuring(BenchBatchingConfig, given)
    from bench.commands.batching import run

    return run(config)


def _bench_plan(given: dict[str, Any]) -> int:
    config = _measuring(BenchPlanConfig, given)
    from bench.commands.plan import run

    return run(config)


def _bench_roofline(given: dict[str, Any]) -> int:
    config = _measuring(BenchRooflineConfig, given)
    from common.platform.device import calm_threads

    calm_threads()
    from bench.commands.roofline import run

    return run(config)


def _bench_kernels(given: dict[str, Any]) -> int:
    config = _measuring(BenchKernelsConfig, given)
    from common.platform.device import calm_threads

    calm_threads()
    from bench.commands.kernels import run

    return run(config)


def _keygen(given: dict[str, Any]) -> int:
    config = _load(KeygenConfig, given)
    from common.net import keys

    if config.cluster_key_file:
        keys.narrow(
            Path(config.cluster_key_file), cast(keys.Party, config.role), config.path, overwrite=config.overwrite
        )
        print(f"wrote {config.path}: enough for {config.role} processes, and for nothing else")
    else:
        keys.make(config.path, overwrite=config.overwrite)
        print(f"wrote {config.path}: whoever reads it can join the cluster; copy it over a safe channel only")
    return 0


def _config(name: str, given: dict[str, Any]) -> int:
    """Prints each value of a command's configuration and where it came from."""
    config = COMMANDS[name][1]
    fixed = {"role": name} if config is WorkerConfig else {}
    loaded: Loaded[Any] = load_config(config, given, os.environ, **fixed)
    rows = []
    for item in options(config):
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


COMMANDS: dict[str, tuple[str, type[Any], Command]] = {
    "up": ("serve on this machine: a coordinator and its workers", UpConfig, _up),
    "coordinator": ("the door: HTTP, routing, text", CoordinatorConfig, _coordinator),
    "prefill": ("a prefill worker that joins a coordinator", WorkerConfig, _prefill),
    "decode": ("a decode worker that joins a coordinator", WorkerConfig, _decode),
    "chat": ("talk to a running server in the terminal", ChatConfig, _chat),
    "scale": ("grow or shrink the pools of a running tandem up", ScaleConfig, _scale),
    "eval": ("ask a running server the golden set and judge its answers", EvalConfig, _eval),
    "bench serve": ("put load on any OpenAI-compatible server and measure it", BenchServeConfig, _bench_serve),
    "bench goodput": ("find the highest rate that a server bears", BenchGoodputConfig, _bench_goodput),
    "bench compare": ("should this workload be disaggregated on these cores?", BenchCompareConfig, _bench_compare),
    "bench plan": ("what compare would say of pools that are not there, by simulation", BenchPlanConfig, _bench_plan),
    "bench batching": ("what continuous batching brings over static", BenchBatchingConfig, _bench_batching),
    "bench roofline": ("what this machine can do at best", BenchRooflineConfig, _bench_roofline),
    "bench kernels": ("attention and linear layers beside this machine's limits", BenchKernelsConfig, _bench_kernels),
    "keygen": ("make the keys by which the parts of a cluster know each other", KeygenConfig, _keygen),
}
"""Name, help, configuration and function of every command; ``config`` explains any of them."""
FAMILIES = {"bench": "measure servers, and what disaggregation brings"}
"""First word of the commands of two words, and what they are for."""
