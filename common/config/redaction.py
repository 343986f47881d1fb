"""Removes keys and passwords from command lines and URLs, so that they can be logged and saved."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

SECRETS, MANY_SECRETS, FLAGS = ("--api-key", "--admin-api-key"), ("--header",), "--up-flags"
"""Options with one secret value, options with several, and the option that contains options of another command."""


def without_secrets(words: Iterable[str]) -> Iterator[str]:
    """Yield the words of a command with keys replaced by "..." and without user and password in URLs."""
    flag = ""  # the option whose value the next word may be
    for word in words:
        option, equals, value = word.partition("=")
        if option.startswith("--") and " " not in option:
            flag, said = option.replace("_", "-"), f"{option}{equals}"
        else:
            equals, said, value = "", "", word
        if flag in (*SECRETS, *MANY_SECRETS):
            shown = value and "..."
        elif flag == FLAGS:
            shown = shlex.join(without_secrets(shlex.split(value)))
        else:
            shown = without_login(value)
        if equals or (value and flag not in MANY_SECRETS):
            flag = ""
        yield said + shown


def without_login(text: str) -> str:
    """Return ``text`` without the user and password in its URLs."""
    return re.sub(r"(?<=://)[^/@]+@", "", text)


def holds_key(flags: str) -> bool:
    """Return whether ``flags``, in shell syntax, contain a secret option; raises ValueError if the syntax is wrong."""
    options = (word.partition("=")[0].replace("_", "-") for word in shlex.split(flags))
    return any(option in (*SECRETS, *MANY_SECRETS) for option in options)
