"""The checksum of KV cells that a GPU can compute in parallel.

XXH3 (:mod:`kvtransfer.frames`) is sequential, so a GPU's memory would have to be copied to the host for it. This hash
is a sum over 64-bit words, which any number of threads can add up in any order. Like XXH3 it finds damage, not attacks.
``kvtransfer/PROTOCOL.md`` specifies it. Pure: :mod:`common.kv.storage.cuda_driver` computes the same with torch.
"""

from __future__ import annotations

import numpy as np

from common.kv.convert import Bytes

WORD_BYTES = 8
PLACE, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = (30, 27, 31)
"""Each word is mixed by the finalizer of SplitMix64 (https://prng.di.unimi.it/splitmix64.c). Each step is a bijection,
so a change of one word changes the hash; and it spreads every bit over the word, so that changes of several words do
not cancel each other."""
MASK = (1 << 64) - 1


def device_hash(data: Bytes) -> int:
    """Return the hash of ``data``, uint8 [n]. It is never 0, which stands for "not said" in a frame header."""
    whole = np.zeros(-(-len(data) // WORD_BYTES) * WORD_BYTES, np.uint8)
    whole[: len(data)] = data
    words = whole.view(np.dtype("<u8")).astype(np.uint64)
    with np.errstate(over="ignore"):
        words ^= np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(PLACE)
        for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
            words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
        total = int(words.sum(dtype=np.uint64))
    return finished(total, len(data))


def finished(total: int, size: int) -> int:
    """Return the hash of ``size`` bytes whose mixed words add up to ``total`` modulo 2^64."""
    return (total + size * PLACE) & MASK or 1
