"""Which cells to send next, while later ones are still being computed.

Pure. A transfer covers (layers × tokens ``[have, total)``). Prefill computes chunk after chunk of tokens, and within a
chunk layer after layer; the outbox turns that progress into rectangles of about ``target_bytes``, oldest chunk first.
A layer of one block that is larger than that is cut between its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.layout import KvLayout
from kvtransfer.frames import Rectangle

TARGET_BYTES = 1 << 20
"""Large enough that a frame's fixed cost vanishes, small enough to overlap with computing and to pace the receiver."""


@dataclass(slots=True)
class _Span:
    """A chunk of tokens of which ``ready`` layers are computed and ``sent`` layers are on their way."""

    first_token: int
    last_token: int
    ready: int
    sent: int = 0


def _span_tokens(layout: KvLayout, target_bytes: int) -> int:
    """How many tokens travel together: as many whole blocks as the largest layer has room for in ``target_bytes``, or
    about equal parts of one block if it has room for none. A frame is then less than twice that large, as long as one
    token of a layer fits."""
    most = max(layer.elements for layer in layout.layers) * layout.element_bytes
    if blocks := target_bytes // (most * layout.block_size):
        return blocks * layout.block_size
    parts = -(-most * layout.block_size // target_bytes)
    return max(1, layout.block_size // parts)


class Outbox:
    """Progress in, rectangles out; every cell exactly once, per layer in token order."""

    def __init__(self, layout: KvLayout, have: int, total: int, target_bytes: int = TARGET_BYTES) -> None:
        if not 0 <= have < total:
            raise ValueError(f"{have} of {total} tokens are already there")
        self.layout, self.total, self.target_bytes = layout, total, target_bytes
        self._layers = len(layout.layers)
        self._spans: list[_Span] = []
        self._covered = have  # tokens that belong to a span, or that the receiver has
        self._span_tokens = _span_tokens(layout, target_bytes)

    @property
    def complete(self) -> bool:
        """Whether every cell has been handed out."""
        return self._covered == self.total and not self._spans

    def computed(self, tokens: int, layers: int) -> None:
        """Layers ``[0, layers)`` of all tokens before ``tokens`` are computed (and all layers of earlier chunks)."""
        if tokens > self._covered:
            for span in self._spans:
                span.ready = self._layers
            for first in range(self._covered, tokens, self._span_tokens):
                self._spans.append(_Span(first, min(first + self._span_tokens, tokens), layers))
            self._covered = tokens
        for span in self._spans:
            span.ready = max(span.ready, layers)

    @property
    def ready(self) -> bool:
        """Whether :meth:`next` has a rectangle to give."""
        return self._find() is not None

    def next(self) -> Rectangle | None:
        """The next rectangle worth sending, or None until more is computed."""
        found = self._find()
        return self._take(*found) if found is not None else None

    def _find(self) -> tuple[_Span, int] | None:
        """The span to send of, and up to which layer. A layer of a later span waits for the same layer of the span
        before it: the receiver takes a layer's tokens in order."""
        before = self._layers
        for span in self._spans:
            last, size, ready = span.sent, 0, min(span.ready, before)
            while last < ready and size < self.target_bytes:
                size += self.layout.range_bytes(last, last + 1, span.last_token - span.first_token)
                last += 1
            if size >= self.target_bytes or (last == self._layers and last > span.sent):
                return span, last
            before = span.sent
        return None

    def _take(self, span: _Span, last_layer: int) -> Rectangle:
        cells = Rectangle(span.sent, last_layer, span.first_token, span.last_token)
        span.sent = last_layer
        if span.sent == self._layers:
            self._spans.remove(span)
        return cells
