"""Command lines, addresses and their like, shown without the keys and passwords that stand in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

SECRETS, MANY_SECRETS, FLAGS = ("--api-key", "--admin-api-key"), ("--header",), "--up-flags"
"""Options with a secret, with several, and the one that has options of another command in it."""


def without_secrets(words: Iterable[str]) -> Iterator[str]:
    """The words of a command as they may be saved: keys are left out, and what URLs say before their host."""
    flag = ""  # that a word may be the value of
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
    """``text`` without what its URLs say before their host: a user's name and password."""
    return re.sub(r"(?<=://)[^/@]+@", "", text)


def holds_key(flags: str) -> bool:
    """Whether a secret option is among ``flags``, written as a shell takes them. ValueError if no shell would."""
    options = (word.partition("=")[0].replace("_", "-") for word in shlex.split(flags))
    return any(option in (*SECRETS, *MANY_SECRETS) for option in options)
