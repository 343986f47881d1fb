"""Strings that record for each character whether a chat template or a client wrote it (taint tracking).

A rendered prompt mixes the template's own text with strings of the client. A control token (such as ``<|im_start|>``)
is recognized only if the template wrote all of its characters, so the origin of each character must survive the string
operations of a template. :class:`Traced` preserves origins through the operations that templates apply to their own
text. The result of any other operation counts as text of the client. So an operation that is missing here can lose a
control token of the template, but no operation can turn text of a client into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

_TEMPLATE = b"\1"


class Traced(str):
    """A string whose ``_own`` has one byte per character: 1 where the template wrote it, 0 where the client did.

    The methods of ``str`` that are overridden here return the same text as in ``str``, with its origins."""

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: object = "", own: bytes | None = None) -> Traced:
        """Create ``text`` with the origins ``own``. Without ``own`` all of it counts as the client's, because a
        template can call this constructor with any text, as ``type(literal)(text)``."""
        self = super().__new__(cls, text)
        self._own = bytes(len(self)) if own is None else own
        return self

    def __str__(self) -> Traced:
        return self

    # -- joining ------------------------------------------------------------------------------------------------------

    def __add__(self, other: object) -> Traced:
        if not isinstance(other, str) or hasattr(other, "__html__"):  # Jinja's Markup: its own __radd__ escapes self
            return NotImplemented
        return Traced(str.__add__(self, other), self._own + origins(other))

    def __radd__(self, other: object) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return Traced(str.__add__(other, self), origins(other) + self._own)

    def __mul__(self, count: SupportsIndex) -> Traced:
        return Traced(str.__mul__(self, count), self._own * int(count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        """Format as ``str``. Origins are kept if ``%s`` is the only conversion."""
        text = str.__mod__(self, values)
        pieces = self.split("%s")
        given = values if isinstance(values, tuple) else (values,)
        if any("%" in piece for piece in pieces) or isinstance(values, dict) or len(given) != len(pieces) - 1:
            return text
        return join([part for pair in zip(pieces, map(str, given), strict=False) for part in pair] + [pieces[-1]])

    def join(self, parts: Iterable[str]) -> Traced:
        spread: list[str] = []
        for part in parts:
            spread += (self, part) if spread else (part,)
        return join(spread)

    # -- cutting ------------------------------------------------------------------------------------------------------

    def __getitem__(self, at: SupportsIndex | slice) -> Traced:
        own = self._own[at] if isinstance(at, slice) else bytes((self._own[at],))
        return Traced(str.__getitem__(self, at), own)

    def __iter__(self) -> Iterator[Traced]:
        return (self[at] for at in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._cut(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._cut(str.splitlines(self, True), 0)
        return whole if keepends else [line[: len(str.splitlines(line)[0])] for line in whole]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = str.partition(self, sep)
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(self) - len(after) :]

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = str.rpartition(self, sep)
        return self[: len(before)], self[len(before) : len(before) + len(found)], self[len(self) - len(after) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        if not old:
            return Traced(str.replace(self, old, new, count))
        text, left, at = str.replace(self, old, new, count), int(count), 0
        made, own, rewritten = bytearray(), self._own, origins(new)
        if _TEMPLATE not in own and _TEMPLATE not in rewritten:
            return Traced(text)
        while left and (found := self.find(old, at)) >= 0:
            made += own[at:found]
            made += rewritten
            at = found + len(old)
            left -= 1
        return Traced(text, bytes(made + own[at:]))

    def _cut(self, parts: list[str], gap: int) -> list[str]:
        """Return ``parts`` with their origins. They are consecutive parts of this string, separated by ``gap``
        characters, or by any white space if ``gap`` is 0. If the whole string is the client's, ``parts`` are returned
        unchanged, which saves time because there may be millions."""
        if _TEMPLATE not in self._own:
            return parts
        cut: list[str] = []
        at = 0
        for part in parts:
            at = at if gap else self.find(part, at)
            cut.append(self[at : at + len(part)])
            at += len(part) + gap
        return cut

    # -- letters ------------------------------------------------------------------------------------------------------

    def upper(self) -> Traced:
        return self._relettered(str.upper)

    def lower(self) -> Traced:
        return self._relettered(str.lower)

    def capitalize(self) -> Traced:
        return self._relettered(str.capitalize)

    def title(self) -> Traced:
        return self._relettered(str.title)

    def _relettered(self, change: Callable[[str], str]) -> Traced:
        """Apply ``change``. Origins are kept if the length stays the same, which means that each character became one
        character."""
        text = change(self)
        return Traced(text, self._own if len(text) == len(self) else None)


def written(text: str) -> Traced:
    """Mark all of ``text`` as written by the template. Also used for words that the server inserts and that may be part
    of a control token."""
    return Traced(text, _TEMPLATE * len(text))


def origins(text: str) -> bytes:
    """Return one byte per character: 1 if the template wrote it, else 0."""
    return text._own if isinstance(text, Traced) else bytes(len(text))


def join(parts: Iterable[str]) -> Traced:
    """Join ``parts`` as ``"".join`` does and keep their origins."""
    kept = list(parts)
    return Traced("".join(kept), b"".join(map(origins, kept)))


def join_with(separator: str, parts: Iterable[str]) -> Traced:
    """Join ``parts`` as ``separator.join`` does and keep their origins."""
    return Traced(separator, origins(separator)).join(parts)
