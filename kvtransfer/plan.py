"""The order in which KV cells are sent while later ones are still being computed.

Pure. A transfer covers (layers × tokens ``[have, total)``). Prefill computes chunk after chunk of tokens, and within a
chunk layer after layer; the outbox turns that progress into rectangles of about ``target_bytes``, oldest chunk first.
If one layer of one block is larger than that, it is cut between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.layout import KvLayout
from kvtransfer.frames import Rectangle

TARGET_BYTES = 1 << 20
"""Size of a frame: large enough to make its fixed cost negligible, small enough to overlap with computation and to pace
the receiver."""


@dataclass(slots=True)
class _Span:
    """A chunk of tokens; its first ``ready`` layers are computed, and its first ``sent`` layers were handed out."""

    first_token: int
    last_token: int
    ready: int
    sent: int = 0


def _span_tokens(layout: KvLayout, target_bytes: int) -> int:
    """Return the number of tokens per frame: as many whole blocks of the largest layer as fit in ``target_bytes``, or
    an equal part of a block if none fits. A frame is then smaller than twice ``target_bytes``, provided that one token
    of a layer fits."""
    most = max(layer.elements for layer in layout.layers) * layout.element_bytes
    if blocks := target_bytes // (most * layout.block_size):
        return blocks * layout.block_size
    parts = -(-most * layout.block_size // target_bytes)
    return max(1, layout.block_size // parts)


class SendPlan:
    """Turns progress into rectangles to send: each cell exactly once, and within a layer in token order. ``have`` of
    ``total`` tokens need not be sent; raises ValueError if none is left."""

    def __init__(self, layout: KvLayout, have: int, total: int, target_bytes: int = TARGET_BYTES) -> None:
        if not 0 <= have < total:
            raise ValueError(f"{have} of {total} tokens are already there")
        self.layout, self.total, self.target_bytes = layout, total, target_bytes
        self._layers = len(layout.layers)
        self._spans: list[_Span] = []
        self._covered = have  # tokens that belong to a span, or that the receiver already has
        self._span_tokens = _span_tokens(layout, target_bytes)

    @property
    def complete(self) -> bool:
        """Whether every cell has been handed out."""
        return self._covered == self.total and not self._spans

    def computed(self, tokens: int, layers: int) -> None:
        """Record that layers ``[0, layers)`` of all tokens before ``tokens``, and all layers of earlier chunks, are
        computed."""
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
        """Whether :meth:`next` would return a rectangle."""
        return self._find() is not None

    def next(self) -> Rectangle | None:
        """Hand out the next rectangle, or return None until enough is computed."""
        found = self._find()
        return self._take(*found) if found is not None else None

    def _find(self) -> tuple[_Span, int] | None:
        """Return the span to send from and the layer to stop at. A layer of a later span waits for the same layer of
        the span before it, since the receiver accepts the tokens of a layer in order only."""
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
