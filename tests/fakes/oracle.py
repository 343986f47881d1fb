"""An engine without a model whose next token proves that every KV byte is right.

The KV of position p is a keyed rolling hash of tokens 0..p, different in every layer and in keys and values, as numbers
that every element type holds exactly: what a pool of another type converts means the same. The next token is a
function of *all* KV bytes of the sequence as read back from the pool, the seed, the choice and the output position. A
stale, missing, swapped, foreign or misplaced byte anywhere changes the very next token, and the right stream is
computable in a few lines (:func:`oracle_stream`). No torch: a process with it starts at once.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from common.ids import SequenceId
from common.kv.cache import BlockCopy
from common.kv.convert import Bytes, converted
from common.kv.layout import ELEMENT_BYTES, KvDtype, KvLayout, LayerLayout
from common.kv.memory import KvMemory, Table
from common.sequence import Batch, Segment, StepResult, TokenLogprobs

LAYERS = (LayerLayout(1, 2, 1), LayerLayout(2, 1, 2), LayerLayout(1, 3, 3))
_PARTS = [
    (struct.pack("<III", index, part, 0), layer.kv_heads * width)
    for index, layer in enumerate(LAYERS)
    for part, width in enumerate((layer.k_dim, layer.v_dim))
]
"""Keys (part 0) and values (1) of each layer: a name, and how many elements (at most 8) they have at one position."""
VOCABULARY = 1000
_NOISE, _SCALE = np.uint16(0x87FF), np.uint16(0x3800)
"""Of a bfloat16 number: what is random (sign, low exponent, mantissa) and what is fixed, so that it lies between 2^-15
and 2 and is a float16 number, too."""


def oracle_layout(block_size: int = 16, dtype: KvDtype = "float32") -> KvLayout:
    return KvLayout(LAYERS, dtype, block_size)


def _roll(before: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", before, token), 7)


@functools.lru_cache(1 << 13)
def _columns(rolled: int, dtype: KvDtype) -> list[bytes]:
    """Keys and values of each layer of the position with this rolling hash; made once for all that compute it."""
    key, size, columns, at = struct.pack("<Q", rolled), ELEMENT_BYTES[dtype], [], 0
    noise = b"".join([xxhash.xxh3_128_digest(key + name)[: 2 * width] for name, width in _PARTS])
    patterns = np.frombuffer(noise, np.uint16) & _NOISE | _SCALE
    numbers = converted(patterns.view(np.uint8), "bfloat16", dtype).tobytes()
    for _, width in _PARTS:
        columns.append(numbers[at : at + width * size])
        at += width * size
    return columns


def canonical(layout: KvLayout, rolled: list[int], layers: range) -> Bytes:
    """The right canonical bytes of the positions whose rolling hashes are given."""
    positions = [_columns(value, layout.dtype) for value in rolled]
    columns = range(2 * layers.start, 2 * layers.stop)
    return np.frombuffer(b"".join([position[column] for column in columns for position in positions]), np.uint8)


def _choose(everything: bytes | Bytes, seed: int, choice: int, position: int) -> int:
    """The next token after canonical bytes of float32 elements."""
    digest = xxhash.xxh3_64_intdigest(everything)
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQII", digest, seed & (2**64 - 1), choice, position))
    return mixed % VOCABULARY


def oracle_stream(prompt: list[int], seed: int, choice: int, count: int) -> list[int]:
    """The ``count`` output tokens that a request must get."""
    rolled = 0
    output: list[int] = []
    columns = [bytearray() for _ in _PARTS]
    for at in range(len(prompt) + count - 1):
        rolled = _roll(rolled, prompt[at] if at < len(prompt) else output[-1])
        for column, row in zip(columns, _columns(rolled, "float32"), strict=True):
            column += row
        if at >= len(prompt) - 1:
            output.append(_choose(b"".join(columns), seed, choice, len(output)))
    return output


class OracleEngine:
    """Implements :class:`common.worker.Engine`. ``token_s`` and ``step_s`` make it as slow as a model."""

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        dtype: KvDtype = "float32",
        max_model_len: int = 4096,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        self.layout = oracle_layout(block_size, dtype)
        self.memory = KvMemory(self.layout, blocks)
        self.fingerprint, self.vocab_size, self.max_model_len = "oracle", VOCABULARY, max_model_len
        self.on_layer: Callable[[int], None] | None = None
        self.step_s, self.token_s = step_s, token_s
        self._rolled: dict[SequenceId, list[int]] = {}
        self.steps = 0

    def step(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        self.steps += 1
        rolled = [self._roll_to(segment) for segment in batch.segments]
        for layer in range(len(LAYERS)):
            for segment, table, values in zip(batch.segments, batch.tables, rolled, strict=True):
                where, layers = range(segment.start, segment.end), range(layer, layer + 1)
                data = canonical(self.layout, values[segment.start : segment.end], layers)
                self.memory.write(table, where, layers, data)
            if self.on_layer is not None:
                self.on_layer(layer)
        if pause := self.step_s + self.token_s * batch.length:
            time.sleep(pause)
        tokens = [self._sample(segment, table) for segment, table in zip(batch.segments, batch.tables, strict=True)]
        self._rolled = {segment.sequence.id: values for segment, values in zip(batch.segments, rolled, strict=True)}
        logprobs = [self._logprobs(segment, ids) for segment, ids in zip(batch.segments, tokens, strict=True)]
        return StepResult(tokens, logprobs, time.perf_counter() - started)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for source, target in copies:
            self.memory.raw[target] = self.memory.raw[source]

    def close(self) -> None:
        self.memory.close()

    def _roll_to(self, segment: Segment) -> list[int]:
        values = self._rolled.get(segment.sequence.id, [])[: segment.end]
        for token in segment.sequence.tokens[len(values) : segment.end]:
            values.append(_roll(values[-1] if values else 0, token))
        return values

    def _sample(self, segment: Segment, table: Table) -> list[int]:
        if not segment.wants_token:
            return []
        sequence = segment.sequence
        data = self.memory.read(table, range(segment.end), range(len(LAYERS)))
        everything = converted(data, self.layout.dtype, "float32")
        seed, position = sequence.request.sampling.seed, sequence.output_length
        return [_choose(everything, seed, choice, position) for choice in sequence.choices]

    @staticmethod
    def _logprobs(segment: Segment, ids: list[int]) -> list[TokenLogprobs]:
        wanted = segment.sequence.request.sampling.logprobs
        return [] if wanted is None else [TokenLogprobs(-float(token) / VOCABULARY) for token in ids]
