"""From flags, environment, a YAML file and defaults to one frozen dataclass, each value knowing where it came from.

A dataclass field made with :func:`option` *is* the option: argparse, the environment variable, the YAML key, ``tandem
config`` and the table in the README are all generated from it. This file owns the mechanism, the other modules of this
package the options. Whatever is wrong raises :class:`~common.core.errors.StartError`, in words.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from common.core.errors import StartError, reason
from common.net.hosts import parse_address
from common.platform import secret_files

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
ENV_PREFIX = "TANDEM_"
_CONFIG_ENV = "TANDEM_CONFIG"
GROUPS = (
    "pools", "model", "memory", "batch", "cores", "routing", "queue", "transfer", "network and keys", "client", "chat",
    "evaluation", "load", "workload", "systems", "results", "logs",
)  # fmt: skip
"""In the order in which they are shown."""

# -- kinds: how text becomes a value ----------------------------------------------------------------------------------

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")


@dataclass(frozen=True)
class OptionKind:
    """What an option takes: its name in the help, what a good value is, and the parser (ValueError if none).
    ``between``: its flag takes several words, too, which are one text with this between them; it is given several times
    where a word that follows a flag is a positional one. In a file it may be a list."""

    metavar: str
    expects: str
    parse: Callable[[str], Any]
    between: str | None = None


def parse_number(text: str) -> int:
    """A whole number; vLLM's suffixes (``32k`` is 32,000, ``32K`` 32,768), and bytes (``4GiB``, ``4GB``)."""
    match = _NUMBER.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(text)
    digits, letter, binary, byte = match.groups()
    if binary:
        letter = letter.upper()
    elif byte:
        letter = letter.lower()
    value = float(digits) * _SUFFIXES[letter] if "." in digits else int(digits) * _SUFFIXES[letter]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def count(least: int = 0, most: int | None = None) -> OptionKind:
    """A whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        value = parse_number(text)
        if value < least or (most is not None and value > most):
            raise ValueError(text)
        return value

    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    suffixes = " (32k is 32,000, 32K is 32,768)" if most is None or most >= 1 << 16 else ""
    return OptionKind("N", f"a whole number {bounds}{suffixes}", parse)


def decimal(least: float, most: float, metavar: str = "X") -> OptionKind:
    """A number from ``least`` to ``most``."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return OptionKind(metavar, f"a number from {least:g} to {most:g}", parse)


def one_of(*choices: str) -> OptionKind:
    """One of a few words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return OptionKind("{" + ",".join(choices) + "}", f"one of {', '.join(choices)}", parse)


def _parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def _parse_switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _parse_cpus(text: str) -> str:
    parse_cpus(text)
    return text


def parse_cpus(text: str) -> tuple[int, ...]:
    """``0-3,5`` as sorted core numbers."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < 4096:
            raise ValueError(text)
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def _parse_address(text: str) -> str:
    parse_address(text)
    return text


def _parse_numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.replace(",", " ").split())
    if not numbers or not all(number >= 0 for number in numbers):
        raise ValueError(text)
    return numbers


def _parse_rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def _parse_rates(text: str) -> tuple[float, ...]:
    rates = _parse_numbers(text)
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(text)
    return rates


def _parse_pairs(text: str) -> dict[str, str]:
    pairs = dict(line.split("=", 1) for line in text.splitlines() if line)
    if not pairs or not all(pairs):
        raise ValueError(text)
    return pairs


def _parse_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def parse_key(text: str) -> str:
    """A key as it can stand in a header."""
    key = text.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError("no key")  # without its text: it may be one with a character too many
    return key


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?/?")
_NO_ORIGINS = ("about", "blob", "data", "file", "javascript")
"""Schemes of pages whose origin browsers spell as null."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def _parse_origins(text: str) -> tuple[str, ...]:
    """Origins in lines, in words, with commas between, or as JSON lists; as browsers spell them."""
    try:
        words = json.loads(text)
    except ValueError:
        words = []
        for line in filter(str.strip, text.splitlines()):
            words += json.loads(line) if line.lstrip().startswith("[") else line.replace(",", " ").split()
    origins = [_parse_origin(word) for word in words] if isinstance(words, list) else []
    if not origins:
        raise ValueError(text)
    return ("*",) if "*" in origins else tuple(dict.fromkeys(origins))


def _parse_origin(word: object) -> str:
    if word == "*":
        return "*"
    match = _ORIGIN.fullmatch(word.strip().lower()) if isinstance(word, str) else None
    if match is None or match[1] in _NO_ORIGINS:
        raise ValueError(word)
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _DEFAULT_PORTS.get(scheme) else "")


TEXT = OptionKind("TEXT", "some text", _parse_text)
LIST = OptionKind("TEXT", "some text", _parse_text, ",")
KEY = OptionKind("TEXT", "printable ASCII characters", parse_key)
ORIGINS = OptionKind(
    "ORIGINS", "origins such as https://a.example,http://b.example:3000 (or a JSON list), or *", _parse_origins, "\n"
)
PAIRS = OptionKind(
    "NAME=VALUE", "NAME=VALUE, several as several words (in a variable or file: lines)", _parse_pairs, "\n"
)
SIZE = OptionKind("SIZE", "a size in bytes such as 4GiB or 512MB, more than 0", count(1).parse)
SECONDS = decimal(0, 1e6, "SECONDS")
DEADLINE = decimal(0.001, 1e6, "SECONDS")
RATE = OptionKind("X", "a number more than 0, or inf", _parse_rate)
FLAGS = OptionKind("FLAGS", "flags, as one word", _parse_text)
RATES = OptionKind("X,X", "finite numbers of more than 0 with commas between, such as 0.5,1,2", _parse_rates)
NUMBERS = OptionKind("X,X", "numbers from 0 up with commas between, such as 50,95,99", _parse_numbers)
JSON_OBJECT = OptionKind("JSON", "a JSON object", _parse_object)
SWITCH = OptionKind("", "true or false", _parse_switch)
PORT = count(0, 65535)
CPUS = OptionKind("CORES", "core numbers such as 0-3,5", _parse_cpus)
ADDRESS = OptionKind("HOST:PORT", "an address such as 10.0.0.1:8001", _parse_address)

# -- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """One option of one command, as its dataclass field declares it."""

    name: str
    kind: OptionKind
    default: Any
    help: str
    group: str
    aliases: tuple[str, ...] = ()
    positional: bool = False
    secret: bool = False
    shown_default: str | None = None

    @property
    def flag(self) -> str:
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as people read it; an automatic one says how it is chosen."""
        if self.positional:
            return self.shown_default or "the built-in one"
        return self.shown_default if self.shown_default is not None else show(self.default)

    def parse(self, text: str, origin: str) -> Any:
        try:
            return self.kind.parse(text)
        except (ValueError, OverflowError):
            shown = "what was given" if self.secret else repr(text)
            raise StartError(
                f"{origin} cannot be {shown}", f"it takes {self.kind.expects}", f"correct {origin}"
            ) from None


def option(
    default: T,
    help: str,
    kind: OptionKind,
    group: str,
    *,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    shown_default: str | None = None,
) -> T:
    """A dataclass field that is an option. ``shown_default`` says how an automatic default (None) is chosen."""
    meta = {"help": help, "kind": kind, "group": group, "aliases": aliases, "secret": secret}
    field: Any = dataclasses.field(
        default=default, repr=not secret, metadata={"option": {**meta, "shown_default": shown_default}}
    )
    return field  # type: ignore[no-any-return]


def positional(help: str, group: str, shown_default: str | None = None) -> Any:
    """Metadata of a required field that is given by position (and ``TANDEM_<NAME>``, and its YAML key)."""
    meta = {"help": help, "kind": TEXT, "group": group, "positional": True, "shown_default": shown_default}
    return {"option": meta}


def options(config: type[Any]) -> list[Option]:
    """The options of one dataclass, by group, and in the order of its fields."""
    found = [
        Option(field.name, default=None if field.default is dataclasses.MISSING else field.default, **meta)
        for field in dataclasses.fields(config)
        if (meta := field.metadata.get("option"))
    ]
    return sorted(found, key=lambda item: (GROUPS.index(item.group), not item.positional))


def show(value: object) -> str:
    """A value as text, the way a flag takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join(map(show, value))
    return str(value)


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A configuration, where each value came from, and what is odd but no error."""

    config: T
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` most likely was meant to be."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def unknown(kind: str, word: str, known: Iterable[str], where: str, listed_by: str) -> StartError:
    """The error for a word nobody knows, with the nearest one that exists."""
    guess = nearest(word, known)
    todo = f"did you mean {guess}? " if guess else ""
    return StartError(f"unknown {kind} {word}", f"{where} has no such {kind}", f"{todo}{listed_by} lists them all")


class Parser(argparse.ArgumentParser):
    """argparse with StartErrors for errors, no guesses from abbreviations, ``--a_b`` for ``--a-b``, and values that are
    flags."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{self.prog} cannot read its arguments", message, f"{self.prog} --help lists them")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(None if args is None else list(self._words(args)), namespace)

    def _words(self, args: Iterable[str]) -> Iterator[str]:
        """A value that is flags itself begins with a dash: argparse takes that for the next option, unless behind =."""
        takes_flags = {flag for each in self._actions if each.metavar == FLAGS.metavar for flag in each.option_strings}
        words = iter(args)
        for word in map(_dashes, words):
            value = next(words, None) if word in takes_flags else None
            yield word if value is None else f"{word}={value}"


def _dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:  # several flags in one word are somebody's value
        return word
    return flag.replace("_", "-") + equals + value


def add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Gives ``parser`` the flags of a configuration; what is not given stays out of the namespace."""
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of these options"
    )
    groups: dict[str, Any] = {}
    last = not any(item.positional for item in options(config))  # no word that follows a flag is a positional one
    for item in options(config):
        group = groups.get(item.group) or groups.setdefault(item.group, parser.add_argument_group(item.group))
        text = item.help.replace("%", "%%")
        if item.positional:
            group.add_argument(item.name, nargs="?", metavar=item.flag, default=argparse.SUPPRESS, help=text)
            continue
        text += f" ({item.default_text})".replace("%", "%%")
        flags = [item.flag, *item.aliases]
        if item.kind is SWITCH:
            action = argparse.BooleanOptionalAction
            group.add_argument(*flags, dest=item.name, action=action, default=argparse.SUPPRESS, help=text)
        else:
            words: Any = {}
            if item.kind.between is not None:
                words = {"nargs": "+"} if last else {"action": "append"}
            group.add_argument(
                *flags, dest=item.name, metavar=item.kind.metavar, default=argparse.SUPPRESS, help=text, **words
            )


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every flag that ``parser`` takes."""
    return [flag for action in parser._actions for flag in action.option_strings]


def load(
    config: type[T],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    every: Iterable[type[Any]],
    **fixed: Any,
) -> Loaded[T]:
    """Builds ``config``: flag (``given``) over environment over YAML file over default.

    ``every`` are all configurations that exist: what another command takes may stand in a shared file or environment.
    ``fixed`` are fields that are no options.
    """
    everything: dict[str, bool] = {}  # name of each option that exists, and whether it is secret
    for item in (item for each in every for item in options(each)):
        everything[item.name] = item.secret or everything.get(item.name, False)
    path = given.get("config") or environ.get(_CONFIG_ENV)
    file = _read_yaml(Path(path), everything) if path else {}
    values: dict[str, Any] = dict(fixed)
    origins: dict[str, str] = {}
    for item in options(config):
        found = _find(item, given, environ, file, path)
        if found is not None:
            values[item.name], origins[item.name] = found
        else:
            origins[item.name] = "default"
            if item.positional and item.name not in fixed:
                values[item.name] = ""
    return Loaded(config(**values), origins, tuple(_strange(environ, set(everything))))


def _find(
    item: Option, given: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any], path: str | None
) -> tuple[Any, str] | None:
    """The value of one option and where it came from; None when nobody set it."""
    if (value := given.get(item.name)) is not None:
        if isinstance(value, list):
            value = (item.kind.between or "").join(value)
        return (value if isinstance(value, bool) else item.parse(value, item.flag)), item.flag
    if environ.get(item.env):
        return item.parse(environ[item.env], item.env), item.env
    if (value := file.get(item.name)) is not None:
        if isinstance(value, list):
            if item.kind.between is None:
                raise StartError(f"{path}: {item.name} is no single value", "it takes one", "correct the file")
            value = item.kind.between.join(map(str, value))
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return item.parse(text, f"{item.name} in {path}"), str(path)
    return None


def _strange(environ: Mapping[str, str], everything: set[str]) -> Iterable[str]:
    """A warning for each ``TANDEM_*`` variable that nothing reads."""
    known = {ENV_PREFIX + name.upper() for name in everything} | {_CONFIG_ENV}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            guess = nearest(name, known)
            yield f"{name} is set but nothing reads it" + (f"; did you mean {guess}?" if guess else "")


def _read_yaml(path: Path, everything: Mapping[str, bool]) -> dict[str, Any]:
    """The options in a YAML file: a flat mapping, spelled with ``-`` or ``_``. A file that sets a secret one
    (``everything`` says of each name whether it is one) is its owner's alone; no error shows what stands in it."""
    import yaml  # only who has a file pays for it

    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {secret_files.shown(path)}"
        raise StartError(what, reason(error), f"correct --config or {_CONFIG_ENV}") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        loaded = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise StartError(f"{path} is not YAML", _where(error), "correct the file") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # of values that do not fit their tags
        why = "a value is not what its tag or its form says, or too deep"
        raise StartError(f"{path} is not YAML", why, "correct the file") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise StartError(f"{path} is no mapping", "it must hold lines such as `port: 8000`", "correct the file")
    values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    if any(everything.get(key) and value is not None for key, value in values.items()):
        secret_files.check(status, path)
    for key, value in values.items():
        if key not in everything:
            raise _unknown_key(key, node, everything, path)
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
        ):
            raise StartError(f"{path}: {key} is no single value", "each key takes one", "correct the file")
    return values


_SYNTAX = re.compile(r"<[a-z ]+>|[^\w\s]")
"""What may stand between quotation marks in an error of the parser: the name of a token, or punctuation."""


def _where(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the line itself and without a word of it: that may be a key."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    if '"' in problem or not all(map(_SYNTAX.fullmatch, re.findall(r"'(.*?)'", problem))):
        problem = re.split(r"['\"]", problem)[0].rstrip()
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


def _unknown_key(key: str, node: yaml.Node | None, everything: Iterable[str], path: Path) -> StartError:
    """The error for an unknown key. One that resembles no option is not shown: it may be a secret itself."""
    if nearest(key, everything):
        return unknown("key", key, everything, f"{path} sets it, and Tandem", "tandem config")
    pairs = node.value if node is not None else ()
    lines = [each.start_mark.line + 1 for each, _ in pairs if str(each.value).replace("-", "_") == key]
    where = f"line {lines[0]} of {path}" if lines else f"{path}"
    return StartError("unknown key", f"{where} sets it, and Tandem has no such key", "tandem config lists them all")
