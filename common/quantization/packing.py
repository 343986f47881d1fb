"""Codes of fewer than 8 bits in bytes and words: the order of our own layout, and that of int32 words on the hub."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD = 32


def pack_nibbles(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Pack ``codes`` (uint8 below 16) [rows, columns] to uint8 [rows, columns / 2]: within a group, byte j has code j
    in its low and code j + group / 2 in its high half."""
    rows, columns = codes.shape
    halves = codes.view(rows, columns // group, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, columns // 2)


def unpack_nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Undo :func:`pack_nibbles`."""
    rows, half = packed.shape
    groups = packed.view(rows, 2 * half // group, group // 2)
    return torch.stack([groups & 15, groups >> 4], 2).view(rows, 2 * half)


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack ``codes`` uint8 [rows, columns] of 4 or 8 bits to int32 [rows, words], the first in the lowest bits. The
    last word is filled with zeros."""
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (_WORD // bits)))
    if bits == 4:
        filled = filled[:, ::2] | filled[:, 1::2] << 4
    return filled.clone(memory_format=torch.contiguous_format).view(torch.int32)  # also if it is one row or column


def unpack_int32(words: torch.Tensor, bits: int, along: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpack the codes in int32 ``words`` [a, b] to uint8: dimension ``along`` grows to 32 / bits codes per word.

    The codes of a row or column are one stream of bits from the lowest bit of the first word on, so codes of 3, 5, 6 or
    7 bits may lie across two words. ``order``: the code at position i of a word belongs at position ``order[i]``.
    """
    if along == 0:
        return unpack_int32(words.t(), bits, 1, order).t()
    words = words.clone(memory_format=torch.contiguous_format)  # also if it is one row or column
    rows, columns = words.shape
    if _WORD % bits:
        codes = _stream(words, bits)
        return codes if order is None else codes.view(rows, -1, len(order))[:, :, _inverse(order)].view(rows, -1)
    taken, mask = words.view(torch.uint8), (1 << bits) - 1
    if order is None:
        return torch.stack([taken >> shift & mask for shift in range(0, 8, bits)], 2).view(rows, -1)
    starts = [place * bits for place in _inverse(order)]
    of_words = taken.view(rows, columns, 4)
    return torch.stack([of_words[:, :, at // 8] >> at % 8 & mask for at in starts], 2).view(rows, -1)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


def unpack_padded(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes along the columns of int32 ``words`` of which each has 32 // bits whole codes and no part of one."""
    parts = [words >> shift & (1 << bits) - 1 for shift in range(0, _WORD // bits * bits, bits)]
    return torch.stack(parts, 2).to(torch.uint8).view(words.shape[0], -1)


def _stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes that may lie across two words."""
    start = torch.arange(words.shape[1] * _WORD // bits) * bits
    first, shift = start // _WORD, start % _WORD
    wide = words.long() & 0xFFFFFFFF
    after = torch.cat([wide[:, 1:], torch.zeros_like(wide[:, :1])], 1)
    return ((wide[:, first] | after[:, first] << _WORD) >> shift & (1 << bits) - 1).to(torch.uint8)
