"""Reads a command's configuration from flags, environment, a YAML file and defaults, with the origin of each value.

A dataclass field made with :func:`option` *is* the option: argparse, the environment variable, the YAML key, ``tandem
config`` and the reference page of all flags are generated from it. This module owns the mechanism; the other modules of
this package own the options. Every invalid value or combination of values raises
:class:`~common.core.errors.StartError`, also when a configuration is constructed.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar
from urllib.parse import urlsplit

from common.config.redaction import without_login
from common.core.errors import StartError, reason
from common.net.hosts import parse_address
from common.platform import secret_files

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
ENV_PREFIX = "TANDEM_"
_CONFIG_ENV = "TANDEM_CONFIG"
CACHE_ENV = "TANDEM_CACHE"
"""Variable with the directory of :func:`common.checkpoint.cache_root.cache_root`, which is no option."""
GROUPS = (
    "pools", "model", "memory", "batch", "cores", "routing", "queue", "transfer", "network and keys", "client", "chat",
    "evaluation", "load", "workload", "systems", "results", "logs", "ray",
)  # fmt: skip
"""The groups of options, in the order in which they are shown."""

# -- kinds: parsers of option values ----------------------------------------------------------------------------------

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")


@dataclass(frozen=True)
class OptionKind:
    """The type of an option's value: its metavar in the help, a description of valid values, and the parser, which
    raises ValueError.

    With ``between`` the flag takes several words, which are joined with ``between`` before parsing, and the YAML value
    may be a list. In commands with a positional argument the flag takes one word and is repeated instead. ``bare`` is
    the value of a flag that is given without one; None if it needs one.
    """

    metavar: str
    expects: str
    parse: Callable[[str], Any]
    between: str | None = None
    bare: str | None = None


def parse_number(text: str) -> int:
    """Parse a whole number with vLLM's suffixes (``32k`` is 32,000, ``32K`` is 32,768) or units of bytes (``4GiB``,
    ``4GB``). Raises ValueError."""
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


def count(least: int = 0, most: int | None = None, step: int = 1) -> OptionKind:
    """Return the kind of whole numbers from ``least`` to ``most`` that are multiples of ``step``."""

    def parse(text: str) -> int:
        value = parse_number(text)
        if value < least or (most is not None and value > most) or value % step:
            raise ValueError(text)
        return value

    number = "whole number" if step == 1 else f"multiple of {step}"
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    suffixes = " (32k is 32,000, 32K is 32,768)" if most is None or most >= 1 << 16 else ""
    return OptionKind("N", f"a {number} {bounds}{suffixes}", parse)


def decimal(least: float, most: float, metavar: str = "X") -> OptionKind:
    """Return the kind of numbers from ``least`` to ``most``."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value

    return OptionKind(metavar, f"a number from {least:g} to {most:g}", parse)


def _parse_otlp(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.fragment or "@" in url.netloc:
        raise ValueError(text)
    if url.port == 0:  # also raises ValueError for a port that is no number
        raise ValueError(text)
    return text


def one_of(*choices: str) -> OptionKind:
    """Return the kind of values that are one of ``choices``, in any case."""

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
    """Parse core numbers such as ``0-3,5``; return them sorted. Raises ValueError."""
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
    """Parse a key that is valid in an HTTP header. Raises ValueError, without the key in its text."""
    key = text.strip()
    if not (key and key.isascii() and key.isprintable()):
        raise ValueError("no key")  # without the text, which may be a key with one wrong character
    return key


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?/?")
_NO_ORIGINS = ("about", "blob", "data", "file", "javascript")
"""Schemes of pages for which browsers send the origin "null"."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def _parse_origins(text: str) -> tuple[str, ...]:
    """Parse origins separated by spaces, commas or lines, or given as JSON lists; return them as browsers send them."""
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
    "NAME=VALUE", "NAME=VALUE, several separated by spaces (in a variable or file: by lines)", _parse_pairs, "\n"
)
SIZE = OptionKind("SIZE", "a size greater than 0, in bytes or such as 4GiB or 512MB", count(1).parse)
SECONDS = decimal(0, 1e6, "SECONDS")
DEADLINE = decimal(0.001, 1e6, "SECONDS")
RATE = OptionKind("X", "a number greater than 0, or inf", _parse_rate)
FLAGS = OptionKind("FLAGS", "flags in one word, such as '--max-num-seqs 8'", _parse_text)
RATES = OptionKind("X,X", "finite numbers greater than 0, separated by commas, such as 0.5,1,2", _parse_rates)
NUMBERS = OptionKind("X,X", "numbers of at least 0, separated by commas, such as 50,95,99", _parse_numbers)
JSON_OBJECT = OptionKind("JSON", "a JSON object", _parse_object)
SWITCH = OptionKind("", "true or false", _parse_switch)
PORT = count(0, 65535)
CPUS = OptionKind("CORES", "core numbers such as 0-3,5", _parse_cpus)
OTLP_URL = OptionKind("URL", "an http or https URL without a login, such as http://127.0.0.1:4318", _parse_otlp)
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
        """The flag, such as ``--dtype``; for a positional option its name in the usage line, such as ``MODEL``."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as shown to users; for an automatic one, how it is chosen."""
        if self.positional:
            return self.shown_default or "the built-in model"
        return self.shown_default if self.shown_default is not None else show(self.default)

    def parse(self, text: str, origin: str) -> Any:
        """Parse the value that ``origin`` (a flag, variable or key of a file) gives. Raises StartError if it is not
        valid; the text of a secret value, and the password in a URL, are not shown."""
        try:
            return self.kind.parse(text)
        except (ValueError, OverflowError):
            shown = "what was given" if self.secret else repr(without_login(text))
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
    """Return a dataclass field that is an option.

    ``help`` is one line for ``--help``, which appends the default. ``shown_default`` says how an automatic default
    (None) is chosen. A ``secret`` value is never shown.
    """
    meta = {"help": help, "kind": kind, "group": group, "aliases": aliases, "secret": secret}
    field: Any = dataclasses.field(
        default=default, repr=not secret, metadata={"option": {**meta, "shown_default": shown_default}}
    )
    return field  # type: ignore[no-any-return]


def positional(help: str, group: str, shown_default: str | None = None) -> Any:
    """Return the metadata of a field that is given by position, or by ``TANDEM_<NAME>`` or its YAML key."""
    meta = {"help": help, "kind": TEXT, "group": group, "positional": True, "shown_default": shown_default}
    return {"option": meta}


def options(config: type[Any]) -> list[Option]:
    """Return the options of a dataclass by group, within a group the positional one first, then in field order."""
    found = [
        Option(field.name, default=None if field.default is dataclasses.MISSING else field.default, **meta)
        for field in dataclasses.fields(config)
        if (meta := field.metadata.get("option"))
    ]
    return sorted(found, key=lambda item: (GROUPS.index(item.group), not item.positional))


def show(value: object) -> str:
    """Format a value the way it is written after a flag."""
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
    """A configuration, the origin of each value by option name, and warnings."""

    config: T
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to ``word``, None if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


def unknown(kind: str, word: str, known: Iterable[str], where: str, listed_by: str) -> StartError:
    """Return the error for an unknown word, with the most similar known one as a suggestion."""
    guess = nearest(word, known)
    todo = f"did you mean {guess}? " if guess else ""
    return StartError(f"unknown {kind} {word}", f"{where} has no such {kind}", f"{todo}{listed_by} lists them all")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises StartError, accepts no abbreviations, takes ``--a_b`` for ``--a-b``, and allows
    values that are flags themselves."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise StartError with ``message`` instead of printing the usage and exiting."""
        raise StartError(f"{self.prog} cannot read its arguments", message, f"{self.prog} --help lists them")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after each flag was rewritten with ``-`` for ``_``."""
        return super().parse_known_args(None if args is None else list(self._words(args)), namespace)

    def _words(self, args: Iterable[str]) -> Iterator[str]:
        """Join options of kind FLAGS and their value with "=": the value starts with a dash, so that argparse would
        else take it for the next option."""
        takes_flags = {flag for each in self._actions if each.metavar == FLAGS.metavar for flag in each.option_strings}
        words = iter(args)
        for word in map(_dashes, words):
            value = next(words, None) if word in takes_flags else None
            yield word if value is None else f"{word}={value}"


def _dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or " " in flag:  # a word with several flags is the value of a FLAGS option
        return word
    return flag.replace("_", "-") + equals + value


def add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add the flags of a configuration to ``parser``; flags that are not given stay out of the namespace."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with any of these options; flags and environment variables override it",
    )
    groups: dict[str, Any] = {}
    last = not any(item.positional for item in options(config))  # words after a flag can only be its values
    for item in options(config):
        group = groups.get(item.group) or groups.setdefault(item.group, parser.add_argument_group(item.group))
        text = item.help.replace("%", "%%")
        if item.positional:
            group.add_argument(item.name, nargs="?", metavar=item.flag, default=argparse.SUPPRESS, help=text)
            continue
        text += f" (default: {item.default_text})".replace("%", "%%")
        flags = [item.flag, *item.aliases]
        if item.kind is SWITCH:
            action = argparse.BooleanOptionalAction
            group.add_argument(*flags, dest=item.name, action=action, default=argparse.SUPPRESS, help=text)
        else:
            words: Any = {}
            if item.kind.between is not None:
                words = {"nargs": "+"} if last else {"action": "append"}
            elif item.kind.bare is not None:
                words = {"nargs": "?", "const": item.kind.bare}
            group.add_argument(
                *flags, dest=item.name, metavar=item.kind.metavar, default=argparse.SUPPRESS, help=text, **words
            )


def known_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Return every flag that ``parser`` takes."""
    return [flag for action in parser._actions for flag in action.option_strings]


def load(
    config: type[T],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    every: Iterable[type[Any]],
    **fixed: Any,
) -> Loaded[T]:
    """Build ``config``; a flag (``given``) takes precedence over the environment, the YAML file and the default.

    ``every`` lists all configuration classes: a shared file or environment may contain options of other commands.
    ``fixed`` are fields that are not options. Raises StartError for an invalid value or unknown key.
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
    """Return the value of one option and its origin; None if it is not set."""
    if (value := given.get(item.name)) is not None:
        if isinstance(value, list):
            value = (item.kind.between or "").join(value)
        return (value if isinstance(value, bool) else item.parse(value, item.flag)), item.flag
    if environ.get(item.env):
        return item.parse(environ[item.env], item.env), item.env
    if (value := file.get(item.name)) is not None:
        text = file_text(item, value)
        if text is None:
            raise StartError(f"{path}: {item.name} is not a single value", "it takes one", "correct the file")
        return item.parse(text, f"{item.name} in {path}"), str(path)
    return None


def file_text(item: Option, value: object) -> str | None:
    """Return a value of a YAML file as the text of a flag; None for a list where the option takes one value."""
    if isinstance(value, list):
        return None if item.kind.between is None else item.kind.between.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _strange(environ: Mapping[str, str], everything: set[str]) -> Iterable[str]:
    """Yield a warning for each ``TANDEM_*`` variable that is no option."""
    known = {ENV_PREFIX + name.upper() for name in everything} | {_CONFIG_ENV, CACHE_ENV}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            guess = nearest(name, known)
            yield f"{name} is set but nothing reads it" + (f"; did you mean {guess}?" if guess else "")


def _read_yaml(path: Path, everything: Mapping[str, bool]) -> dict[str, Any]:
    """Read the options in a YAML file, a flat mapping with keys spelled with ``-`` or ``_``.

    ``everything`` maps the name of each option to whether it is secret. A file that sets a secret one must not be
    readable by other users. No error shows contents of the file, which may be secret.
    """
    document = read_document(path, f"--config or {_CONFIG_ENV}")
    values = {name: document.value(value) for name, _, value in document.items()}
    if secret := next((key for key, value in values.items() if everything.get(key) and value is not None), None):
        secret_files.check(document.status, path, secret)
    for key, value in values.items():
        if key not in everything:
            raise _unknown_key(key, document, everything)
        if not is_flat(value):
            raise StartError(f"{path}: {key} is not a single value", "each key takes one", "correct the file")
    return values


@dataclass(frozen=True)
class YamlOptions:
    """A YAML file with options. ``node`` is its root, with merge keys resolved, None if it is empty; ``status`` that of
    the open file; ``own`` the keys that it spells out, with their lines."""

    path: Path
    status: os.stat_result
    node: yaml.Node | None
    loader: yaml.SafeLoader
    own: list[tuple[str, int]]

    def items(self) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield the name, the line and the value of each key, in the order of the file."""
        for key, value in self.node.value if self.node is not None else ():
            yield *_key(key), value

    def value(self, node: yaml.Node) -> Any:
        """Return a value as a Python object. Raises StartError if it does not fit its tag."""
        try:
            return self.loader.construct_object(node, deep=True)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise _not_yaml(self.path, "a value does not fit its tag, or is nested too deeply") from None
        except Exception as error:  # the parser's own, whose class is imported only with the parser
            raise _not_yaml(self.path, _where(error)) from None


def _not_yaml(path: Path, why: str) -> StartError:
    return StartError(f"{path} is not YAML", why, "correct the file")


def read_document(path: Path, given_by: str) -> YamlOptions:
    """Read a YAML file that is a mapping, or empty. ``given_by``: the flag that names it. Raises StartError, without
    contents of the file."""
    import yaml  # here, so that only commands with a file pay for the import

    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {secret_files.shown(path)}"
        raise StartError(what, reason(error), f"correct {given_by}") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        own = [] if not isinstance(node, yaml.MappingNode) else [_key(key) for key, _ in node.value]
        if isinstance(node, yaml.MappingNode):
            loader.flatten_mapping(node)
    except yaml.YAMLError as error:
        raise _not_yaml(path, _where(error)) from None
    except RecursionError:
        raise _not_yaml(path, "it is nested too deeply") from None
    document = YamlOptions(path, status, node, loader, own)
    if isinstance(node, yaml.ScalarNode) and document.value(node) is None:
        return replace(document, node=None)
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise StartError(f"{path} is not a mapping", "it must have lines such as `port: 8000`", "correct the file")
    return document


def _key(node: yaml.Node) -> tuple[str, int]:
    """Return the name of an option as its key spells it, with ``_``, and the line of the key, from 1."""
    return str(node.value).replace("-", "_"), node.start_mark.line + 1


def is_flat(value: object) -> bool:
    """Return whether a value of a YAML file can be that of an option: a single value, or a list of these."""
    return not isinstance(value, dict) and not (
        isinstance(value, list) and any(isinstance(each, dict | list) for each in value)
    )


_SYNTAX = re.compile(r"<[a-z ]+>|[^\w\s]")
"""Quoted text that may be shown from an error of the YAML parser: the name of a token, or punctuation."""


def _where(error: Exception) -> str:
    """Return the problem and its position, without any text of the file, which may be a key."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be parsed"
    if '"' in problem or not all(map(_SYNTAX.fullmatch, re.findall(r"'(.*?)'", problem))):
        problem = re.split(r"['\"]", problem)[0].rstrip()
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else problem


def _unknown_key(key: str, document: YamlOptions, everything: Iterable[str]) -> StartError:
    """Return the error for an unknown YAML key. A key that resembles no option is not shown: it may be a secret."""
    if nearest(key, everything):
        return unknown("key", key, everything, f"{document.path} sets it, and Tandem", "tandem config")
    line = next(line for name, line, _ in document.items() if name == key)
    where = f"line {line} of {document.path}"
    return StartError("unknown key", f"{where} sets it, and Tandem has no such key", "tandem config lists them all")
