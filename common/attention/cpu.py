"""Attention over block tables in plain torch, arranged for CPUs.

Whole blocks are gathered (contiguous runs of a few KiB, near copy speed) into head-major buffers. Scores and outputs
are batched matrix products in the model's own dtype, with the query heads of a group folded into rows. This is several
times faster than ``scaled_dot_product_attention``, and one code path serves windows, softcaps, sinks and unequal head
sizes.

- Prefill spans are processed in tiles of rows, so that a tile's scores stay in cache, and columns that no row can see
  are not computed.
- Decode rows are grouped by length. A group is padded to its longest member; a new group begins when padding would
  waste more than about a thousand positions, so that one long sequence does not slow down short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.attention.interface import Params, Span
from common.kv.storage.tensors import KvStore

TILE_SCORES = 3 << 20
TILE_ROWS = (32, 96)
"""Most scores of one prefill tile, over all heads, and the fewest and most rows of a tile: large enough for efficient
products, small enough for the cache."""
GROUP_WASTE = 1024
"""Padded positions that cost about as much as the operator calls of one more group."""
GROUP_BYTES = 1 << 20
"""Bytes of keys in one decode group, which should stay in the second-level cache while they are gathered, transposed
and multiplied."""


@dataclass(slots=True)
class DecodeGroup:
    """Decode rows that share one padded gather.

    ``rows`` int64 [n]: their indices in the step. ``blocks`` int64 [n * blocks per row]: block ids, padded by repeating
    a row's first block. ``span``: positions per row after the gather. ``hidden`` bool [n, 1, 1, span]: True where a row
    must not look; None if all is visible. ``dead`` int64: indices into [n * span] of positions behind their row's end,
    which can hold anything, even NaN, and are zeroed.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    span: int
    hidden: torch.Tensor | None
    dead: torch.Tensor


@dataclass(slots=True)
class Tile:
    """Rows ``[row, row + rows)`` of the step against gathered positions ``[low, high)`` of their span.

    ``hidden`` bool [rows, 1, high - masked] masks positions from ``masked`` on; None if all are visible.
    """

    row: int
    rows: int
    low: int
    high: int
    masked: int
    hidden: torch.Tensor | None


@dataclass(slots=True)
class PrefillSpan:
    """One prefill span: the ids of the ``blocks`` to gather, int64 [m], and its tiles, whose positions count from the
    start of the first of these blocks."""

    blocks: torch.Tensor
    tiles: list[Tile]


@dataclass(slots=True)
class WindowPlan:
    """The part of a plan that all layers with the same window and number of heads share."""

    decode: list[DecodeGroup]
    prefill: list[PrefillSpan]


@dataclass(slots=True)
class CpuPlan:
    """One step: its spans, and a plan per (window, heads), made when the first such layer is called."""

    decode: list[Span]
    prefill: list[Span]
    by_window: dict[tuple[int | None, int], WindowPlan] = field(default_factory=dict)


class CpuAttention:
    """The portable backend, in plain torch."""

    name = "cpu"

    def __init__(self, store: KvStore) -> None:
        self.store = store

    def plan(self, spans: Sequence[Span]) -> CpuPlan:
        return CpuPlan([s for s in spans if s.length == 1], [s for s in spans if s.length > 1])

    def attend(self, plan: CpuPlan, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        heads, v_dim = query.shape[1], self.store.layout.layers[layer].v_dim
        window = self._plan_window(plan, params.window, layer, heads)
        if len(window.decode) == 1 and not window.prefill and window.decode[0].rows.shape[0] == query.shape[0]:
            return self._decode(window.decode[0], layer, query, params)
        out = query.new_empty(query.shape[0], heads, v_dim)
        for group in window.decode:
            out[group.rows] = self._decode(group, layer, query[group.rows], params)
        for span in window.prefill:
            self._prefill(span, layer, query, params, out)
        return out

    def _plan_window(self, plan: CpuPlan, window: int | None, layer: int, heads: int) -> WindowPlan:
        if (found := plan.by_window.get((window, heads))) is None:
            layout = self.store.layout
            size, shape = layout.block_size, layout.layers[layer]
            limit = GROUP_BYTES // (shape.kv_heads * shape.k_dim * layout.element_bytes)
            found = WindowPlan(
                [_group(spans, window, size) for spans in _by_length(plan.decode, window, size, limit)],
                [_tiles(span, window, size, heads) for span in plan.prefill],
            )
            plan.by_window[window, heads] = found
        return found

    def _decode(self, group: DecodeGroup, layer: int, query: torch.Tensor, params: Params) -> torch.Tensor:
        """Attend with one query row per sequence: ``query`` [n, heads, k_dim] to [n, heads, v_dim]."""
        n, heads, _ = query.shape
        key, value = self.store.gather(layer, group.blocks)
        if group.dead.shape[0]:
            key.index_fill_(0, group.dead, 0)
            value.index_fill_(0, group.dead, 0)
        kv_heads = key.shape[1]
        k = key.view(n, group.span, kv_heads, -1).transpose(1, 2).contiguous()
        v = value.view(n, group.span, kv_heads, -1).transpose(1, 2).contiguous()
        q = (query * params.scaling).view(n, kv_heads, heads // kv_heads, -1)
        weights = _weights(torch.matmul(q, k.transpose(2, 3)), group.hidden, 0, params, (1, kv_heads, -1, 1))
        return torch.matmul(weights.to(v.dtype), v).reshape(n, heads, -1)

    def _prefill(self, span: PrefillSpan, layer: int, query: torch.Tensor, params: Params, out: torch.Tensor) -> None:
        """Compute the rows of one span from ``query`` [T, heads, k_dim] into ``out`` [T, heads, v_dim]."""
        key, value = self.store.gather(layer, span.blocks)
        kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
        k, v = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()  # [kv_heads, S, dim]
        for tile in span.tiles:
            rows = slice(tile.row, tile.row + tile.rows)
            q = (query[rows] * params.scaling).view(tile.rows, kv_heads, group, -1).transpose(0, 1)
            flat = q.reshape(kv_heads, tile.rows * group, -1)
            scores = torch.bmm(flat, k[:, tile.low : tile.high].transpose(1, 2)).view(kv_heads, tile.rows, group, -1)
            weights = _weights(scores, tile.hidden, tile.masked - tile.low, params, (kv_heads, 1, -1, 1))
            result = torch.bmm(weights.to(v.dtype).flatten(1, 2), v[:, tile.low : tile.high])
            out[rows] = result.view(kv_heads, tile.rows, group, -1).transpose(0, 1).flatten(1, 2)


# -- softmax ----------------------------------------------------------------------------------------------------------


def _weights(
    scores: torch.Tensor, hidden: torch.Tensor | None, masked: int, params: Params, sink_shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the softmax over the last dimension of scaled ``scores``.

    ``hidden`` (bool, broadcast) masks the columns from ``masked`` on. Without a softcap or sinks the scores keep their
    dtype: torch's kernel computes in float32 inside and rounds once, so a conversion to float32 would change nothing.
    """
    if params.softcap is not None:
        scores = scores.float().div_(params.softcap).tanh_().mul_(params.softcap)
    if hidden is not None:
        scores[..., masked:].masked_fill_(hidden, -torch.inf)
    if params.sinks is None:
        return torch.softmax(scores, dim=-1)
    return _softmax_with_sink(scores.float(), params.sinks.float().view(sink_shape))


def _softmax_with_sink(scores: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return ``softmax([scores, sink])`` without its last column."""
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = scores.sub_(highest).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True) + (sink - highest).exp_())


# -- planning ---------------------------------------------------------------------------------------------------------


def _first_seen(position: int, window: int | None) -> int:
    """Return the first position that the row at ``position`` sees."""
    return max(0, position - window + 1) if window is not None else 0


def _by_length(spans: list[Span], window: int | None, size: int, limit: int) -> list[list[Span]]:
    """Group decode spans of similar gathered length, the longest first, with at most ``limit`` positions per group."""
    groups: list[list[Span]] = []
    longest = waste = 0
    for length, _, span in sorted(
        ((span.end - _first_seen(span.start, window) // size * size, -span.row, span) for span in spans), reverse=True
    ):
        waste += longest - length
        if not groups or waste > GROUP_WASTE or longest * (len(groups[-1]) + 1) > limit:
            groups.append([])
            longest, waste = length, 0
        groups[-1].append(span)
    for group in groups:
        group.sort(key=lambda span: span.row)
    return groups


def _group(spans: list[Span], window: int | None, size: int) -> DecodeGroup:
    """Return the padded gather of one decode group."""
    ranges = [(_first_seen(span.start, window) // size, -(-span.end // size)) for span in spans]
    each = max(last - first for first, last in ranges)
    blocks: list[int] = []
    seen: list[tuple[int, int]] = []
    for span, (first, last) in zip(spans, ranges, strict=True):
        blocks += span.blocks[first:last]
        blocks += [span.blocks[first]] * (each - (last - first))
        seen.append((_first_seen(span.start, window) - first * size, span.end - first * size))
    bounds = torch.tensor(seen)
    position = torch.arange(each * size)
    dead = position >= bounds[:, 1:]
    hidden = dead if window is None else dead | (position < bounds[:, :1])
    return DecodeGroup(
        torch.tensor([span.row for span in spans]),
        torch.tensor(blocks),
        each * size,
        hidden[:, None, None, :] if bool(hidden.any()) else None,
        dead.flatten().nonzero().squeeze(1),
    )


def _tiles(span: Span, window: int | None, size: int, heads: int) -> PrefillSpan:
    """Cut one prefill span into tiles, whose positions count from the first block that any row sees."""
    first = _first_seen(span.start, window) // size
    origin = first * size
    tiles: list[Tile] = []
    done = 0
    while done < span.length:
        columns = span.start + done + 1 - _first_seen(span.start + done, window)
        rows = min(span.length - done, max(TILE_ROWS[0], min(TILE_ROWS[1], TILE_SCORES // (heads * columns))))
        tiles.append(_tile(span.row + done, rows, span.start + done, window, origin))
        done += rows
    return PrefillSpan(torch.tensor(span.blocks[first : -(-span.end // size)]), tiles)


def _tile(row: int, rows: int, position: int, window: int | None, origin: int) -> Tile:
    """Return the tile of ``rows`` rows from ``position`` on; without a window only its last ``rows`` columns need a
    mask."""
    low, high = _first_seen(position, window), position + rows
    masked = low if _first_seen(high - 1, window) > low else position
    if rows == 1:
        return Tile(row, rows, low - origin, high - origin, high - origin, None)
    column = torch.arange(masked, high)[None, :]
    own = torch.arange(position, high)[:, None]
    hidden = column > own
    if window is not None:
        hidden |= column <= own - window
    return Tile(row, rows, low - origin, high - origin, masked - origin, hidden[:, None, :])
