"""Text that arrives in pieces, and the search for markers in it.

Readers are generators over a :class:`TextStream`. They consume text from ``at`` on and yield when they need more; they
are resumed when more has arrived or the output has ended. A reader may leave unconsumed at most what may be the
beginning of a marker, so each piece costs work in proportion to its own length.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator

Reading = Generator[None, None, None]
"""A reader without a result."""
SPACE = " \t\r\n"
SPACES = re.compile(r"[ \t\r\n]*")


class Markers:
    """A set of marker texts to search for. None may be the beginning of another one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self._search = re.compile("|".join(map(re.escape, texts)) or "(?!)").search
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self.longest = max(map(len, texts), default=1)

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the first marker in ``text`` from ``at`` on."""
        return self._search(text, at)

    def held(self, text: str, at: int) -> int:
        """Return how many characters at the end of ``text``, none before ``at``, may be the beginning of a marker."""
        for length in range(min(self.longest - 1, len(text) - at), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@functools.lru_cache(maxsize=1024)
def markers(*texts: str) -> Markers:
    """Return the set of ``texts`` without the empty ones."""
    return Markers(tuple(dict.fromkeys(text for text in texts if text)))


@functools.lru_cache(maxsize=16)
def _any_of(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


class TextStream:
    """The unread part of one output. ``tokens``: texts that only stand for markers, or parts of them, where they
    arrived as one token of the tokenizer. Spelled by other tokens they are ordinary text."""

    def __init__(self, tokens: frozenset[str] = frozenset()) -> None:
        self.text = ""
        self.at = 0
        """Index of the first unread character in ``text``."""
        self.ended = False
        self._tokens = _any_of(tokens) if tokens else None
        self._arrived = set[tuple[int, int]]()
        """Places of text that arrived as such a token."""
        self._control: list[tuple[int, int]] = []
        self._record: list[str] | None = None
        self._record_from = 0

    def push(self, text: str, control: bool = False, whole: bool = False) -> None:
        """Append ``text`` and drop what was read, except its last character. ``control``: this is a control token,
        which prose does not show. ``whole``: this is one token, added to the vocabulary with this text."""
        if self._record is not None:
            self._record.append(self.text[self._record_from : self.at])
        dropped = max(self.at - 1, 0)
        if self._control:
            self._control = [(first - dropped, last - dropped) for first, last in self._control if first >= self.at]
        if self._arrived:
            self._arrived = {(first - dropped, last - dropped) for first, last in self._arrived if first >= self.at}
        self.text = self.text[dropped:] + text
        self.at -= dropped
        self._record_from = self.at
        place = (len(self.text) - len(text), len(self.text))
        if control:
            self._control.append(place)
        if (control or whole) and self._tokens is not None:
            self._arrived.add(place)

    def find(self, searched: Markers, at: int) -> re.Match[str] | None:
        """Return the first marker in the text from index ``at`` on, None if there is none."""
        found = searched.find(self.text, at)
        while found is not None and not self.genuine(*found.span()):
            found = searched.find(self.text, found.start() + 1)
        return found

    def genuine(self, start: int, end: int) -> bool:
        """Return whether the text between two indices, which reads as a marker, is one."""
        if self._tokens is None:
            return True
        return all(token.span() in self._arrived for token in self._tokens.finditer(self.text, start, end))

    def names_token(self, marker: str) -> bool:
        """Return whether ``marker`` only counts where it, or part of it, arrived as a token."""
        return self._tokens is not None and self._tokens.search(marker) is not None

    def begins_with(self, text: str) -> bool:
        """Return whether the unread text begins with the marker ``text``."""
        return self.text.startswith(text, self.at) and self.genuine(self.at, self.at + len(text))

    def verbatim(self, end: int) -> str:
        """Read up to index ``end``; return that text, control tokens too."""
        begin, self.at = self.at, end
        return self.text[begin:end]

    def prose(self, end: int) -> str:
        """Read up to index ``end``; return that text without control tokens."""
        begin, self.at = self.at, end
        if not self._control:
            return self.text[begin:end]
        parts = list[str]()
        for first, last in self._control:
            if begin <= first and last <= end:
                parts.append(self.text[begin:first])
                begin = last
        return "".join([*parts, self.text[begin:end]])

    def record(self, length: int) -> None:
        """Keep what is read, from ``length`` characters before the current position on."""
        self._record = []
        self._record_from = self.at - length

    def recorded(self) -> str:
        """Return what was read since :meth:`record`, and stop keeping it."""
        assert self._record is not None
        text = "".join([*self._record, self.text[self._record_from : self.at]])
        self._record = None
        return text

    def forget(self) -> None:
        """Stop keeping what is read."""
        self._record = None

    def pass_until(self, searched: Markers, emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Read to the end of the first marker and emit the text before it. Return the marker, or "" if the output
        ended."""
        while True:
            found = self.find(searched, self.at)
            end = len(self.text) - (0 if self.ended else searched.held(self.text, self.at))
            if found is not None and found.start() <= end:
                if found.start() > self.at:
                    emit(self.prose(found.start()))
                self.at = found.end()
                return found.group()
            if end > self.at:
                emit(self.prose(end))
            if self.ended:
                return ""
            yield

    def skip_space(self) -> Generator[None, None, str]:
        """Skip whitespace. Return the next character, which stays unread, or "" if the output ended."""
        while True:
            found = SPACES.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            yield

    def accept(self, searched: Markers) -> Generator[None, None, str]:
        """Read whitespace and then one of the markers, if one stands here, and return it; otherwise read no more than
        whitespace and return ""."""
        yield from self.skip_space()
        while True:
            for text in searched.texts:
                if self.begins_with(text):
                    self.at += len(text)
                    return text
            rest = self.text[self.at : self.at + searched.longest]
            if self.ended or not any(len(text) > len(rest) and text.startswith(rest) for text in searched.texts):
                return ""
            yield
