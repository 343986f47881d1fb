"""An engine without a model whose next token verifies that every KV byte is correct.

The KV of position p is a keyed rolling hash of tokens 0..p, different in each layer and in keys and values. Its numbers
are exact in every element type, so a conversion to a pool of another type keeps their values. The next token is a
function of *all* KV bytes of the sequence, as read back from the pool, of the seed, the choice and the output position.
A stale, missing, swapped, foreign or misplaced byte anywhere changes the next token. :func:`oracle_stream` computes the
expected tokens. It does not need torch, so a process with this engine starts fast.
"""

from __future__ import annotations

import functools
import itertools
import struct
import time
from array import array
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from common.core.ids import Incarnation, SequenceId, WorkerName
from common.core.prompt_span import PromptSpan
from common.core.sequence import Batch, Segment, StepResult, TokenLogprobs
from common.engine.launched import StepLauncher
from common.grammar.masks import Grammars
from common.kv.cache import BlockCopy
from common.kv.convert import Bytes, converted
from common.kv.layout import ELEMENT_BYTES, KvDtype, KvLayout, LayerLayout
from common.kv.storage.host import KvMemory, Table
from common.net.messages import PROTOCOL, Hello

LAYERS = (LayerLayout(2, 1, 3), LayerLayout(4, 1, 1))
_WIDTHS = [layer.kv_heads * width for layer in LAYERS for width in (layer.k_dim, layer.v_dim)]
"""Elements per position of each layer's keys and of its values, in that order."""
_ELEMENTS = sum(_WIDTHS)
VOCABULARY = 1000
Pick = Callable[[list[int], int], list[int]]
"""Returns the tokens that follow an output, given the one that the KV chooses; none if the output has ended."""
_NOISE, _SCALE = (int.from_bytes(bits.to_bytes(2, "little") * _ELEMENTS, "little") for bits in (0x87FF, 0x3800))
"""Bit masks over all bfloat16 numbers of a position: random bits (sign, low exponent bits, mantissa), and fixed bits.
The magnitude of each number therefore lies between 2^-15 and 2, and it is exact in float16 too."""


def oracle_layout(block_size: int = 16, dtype: KvDtype = "float32", head_shards: int = 1) -> KvLayout:
    return KvLayout(LAYERS, dtype, block_size, head_shards)


@functools.lru_cache(1 << 13)
def _roll(before: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", before, token), 7)


@functools.lru_cache(1 << 13)
def _columns(rolled: int, dtype: KvDtype) -> list[bytes]:
    """Return the bytes of each layer's keys and values at the position with this rolling hash."""
    key, size, columns, at = struct.pack("<Q", rolled), ELEMENT_BYTES[dtype], [], 0
    # two 128-bit digests are enough for all elements
    noise = xxhash.xxh3_128_intdigest(key, 0) | xxhash.xxh3_128_intdigest(key, 1) << 128
    numbers = (noise & _NOISE | _SCALE).to_bytes(2 * _ELEMENTS, "little")
    if dtype == "float32":  # bfloat16 is the upper half of float32; for so few numbers faster than numpy
        wide = bytearray(4 * _ELEMENTS)
        wide[2::4], wide[3::4] = numbers[::2], numbers[1::2]
        numbers = bytes(wide)
    else:
        numbers = converted(np.frombuffer(numbers, np.uint8), "bfloat16", dtype).tobytes()
    for width in _WIDTHS:
        columns.append(numbers[at : at + width * size])
        at += width * size
    return columns


def _choose(everything: bytes | Bytes, seed: int, choice: int, position: int) -> int:
    """Return the next token after the KV in ``everything``: canonical bytes of float32 elements."""
    digest = xxhash.xxh3_64_intdigest(everything)
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<QQII", digest, seed & (2**64 - 1), choice, position))
    return mixed % VOCABULARY


def oracle_stream(prompt: list[int], seed: int, choice: int, count: int, pick: Pick | None = None) -> list[int]:
    """Return the first ``count`` output tokens that a request must get; fewer if ``pick`` ends the output."""
    rolled = list(itertools.accumulate(prompt, _roll, initial=0))[1:]
    columns = [bytearray().join(rows) for rows in zip(*(_columns(each, "float32") for each in rolled), strict=True)]
    output: list[int] = []
    while len(output) < count:
        for token in output[len(rolled) - len(prompt) :]:
            rolled.append(_roll(rolled[-1], token))
            for column, row in zip(columns, _columns(rolled[-1], "float32"), strict=True):
                column += row
        token = _choose(b"".join(columns), seed, choice, len(output))
        more = [token] if pick is None else pick(output, token)
        if not more:
            break
        output += more
    return output[:count]


def oracle_prompt(prompt: list[int], start: int, end: int, tops: int) -> PromptSpan:
    """Return the log-probabilities of prompt positions ``[start, end)``: each depends on all tokens up to its own."""
    span = PromptSpan(start, tops, array("f"), array("I"), array("I"), array("f"))
    for rolled in list(itertools.accumulate(prompt[:end], _roll, initial=0))[start + 1 :]:
        span.logprobs.append(-(rolled % 4096) / 512)
        span.ranks.append(1 + rolled % 7)
        span.top_ids.extend((rolled + place) % VOCABULARY for place in range(tops))
        span.top.extend(-(rolled % 512) / 512 - place for place in range(tops))
    return span


class OracleEngine:
    """Implements :class:`common.worker.loop.Engine`. A step takes at least ``step_s`` seconds, plus ``token_s`` per
    token."""

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        dtype: KvDtype = "float32",
        head_shards: int = 1,
        max_model_len: int = 4096,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        self.layout = oracle_layout(block_size, dtype, head_shards)
        self.memory = KvMemory(self.layout, blocks)
        self.fingerprint, self.vocab_size, self.max_model_len = "oracle", VOCABULARY, max_model_len
        self.on_layer: Callable[[int], None] | None = None
        self.launch: StepLauncher | None = None
        self.grammars: Grammars | None = None
        self.step_s, self.token_s = step_s, token_s
        self._rolled: dict[SequenceId, list[int]] = {}
        self._places: list[tuple[int, int]] = []
        """Offset in a shard, and bytes per position there, of each layer's keys and of its values."""
        for at, layer in zip(self.layout.layer_offsets, LAYERS, strict=True):
            heads = layer.kv_heads // head_shards
            keys, values = (heads * width * self.layout.element_bytes for width in (layer.k_dim, layer.v_dim))
            self._places += [(at, keys), (at + keys * block_size, values)]
        self._shards = range(head_shards)
        self.steps = 0

    def step(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        self.steps += 1
        rolled = [self._roll_to(segment) for segment in batch.segments]
        # layer by layer only if a hook wants each layer as soon as it is computed
        count = len(LAYERS) if self.on_layer is None else 1
        for first in range(0, len(LAYERS), count):
            layers = range(first, first + count)
            for segment, table, values in zip(batch.segments, batch.tables, rolled, strict=True):
                self.place(table, range(segment.start, segment.end), layers, values)
            if self.on_layer is not None:
                self.on_layer(first)
        if pause := self.step_s + self.token_s * batch.length:
            time.sleep(pause)
        tokens = [self._sample(segment, table) for segment, table in zip(batch.segments, batch.tables, strict=True)]
        self._rolled = {segment.sequence.id: values for segment, values in zip(batch.segments, rolled, strict=True)}
        logprobs = [self._logprobs(segment, ids) for segment, ids in zip(batch.segments, tokens, strict=True)]
        return StepResult(tokens, logprobs, time.perf_counter() - started, prompts=_prompts(batch))

    def place(self, table: Table, tokens: range, layers: range, rolled: list[int]) -> None:
        """Write the KV of positions ``tokens`` in ``layers``, given the rolling hashes of all positions so far.

        Copies bytes, which is faster than numpy for the few positions of a step."""
        pool, size, block_bytes, at = self._pool(), self.layout.block_size, self.layout.block_bytes, tokens.start
        while at < tokens.stop:
            block, row = divmod(at, size)
            end = min(at - row + size, tokens.stop)
            positions = [_columns(value, self.layout.dtype) for value in rolled[at:end]]
            for column in range(2 * layers.start, 2 * layers.stop):
                offset, width = self._places[column]
                for shard in self._shards:
                    first = table[block] * block_bytes + shard * self.layout.shard_bytes + offset + row * width
                    heads = slice(shard * width, (shard + 1) * width)
                    rows = b"".join([position[column][heads] for position in positions])
                    pool[first : first + (end - at) * width] = rows
            at = end

    def _read(self, table: Table, end: int) -> bytes:
        """Return the canonical KV bytes of the positions before ``end``."""
        pool, size, block_bytes = self._pool(), self.layout.block_size, self.layout.block_bytes
        blocks = [block * block_bytes for block in table[: self.layout.blocks_for(end)]]
        if len(self._shards) > 1:
            shards = [shard * self.layout.shard_bytes for shard in self._shards]
            return b"".join(
                pool[(at := blocks[token // size] + shard + offset + token % size * width) : at + width]
                for offset, width in self._places
                for token in range(end)
                for shard in shards
            )
        unused, parts = len(blocks) * size - end, list[memoryview]()
        for offset, width in self._places:
            parts += [pool[block + offset : block + offset + size * width] for block in blocks]
            parts[-1] = parts[-1][: (size - unused) * width]
        return b"".join(parts)

    def _pool(self) -> memoryview:
        return memoryview(self.memory.raw).cast("B")

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
        data = np.frombuffer(self._read(table, segment.end), np.uint8)
        everything = converted(data, self.layout.dtype, "float32")
        seed, position = sequence.request.sampling.seed, sequence.output_length
        return [_choose(everything, seed, choice, position) for choice in sequence.choices]

    @staticmethod
    def _logprobs(segment: Segment, ids: list[int]) -> list[TokenLogprobs]:
        wanted = segment.sequence.request.sampling.logprobs
        return [] if wanted is None else [TokenLogprobs(-float(token) / VOCABULARY) for token in ids]


def _prompts(batch: Batch) -> dict[int, PromptSpan]:
    spans = {}
    for index, segment in enumerate(batch.segments):
        if rows := segment.rows_to_score:
            tokens, tops = segment.sequence.tokens, segment.sequence.request.sampling.prompt_logprobs or 0
            spans[index] = oracle_prompt(tokens, rows.start + 1, rows.stop + 1, tops)
    return spans


def hello_of(engine: OracleEngine) -> Hello:
    """Return the Hello of a decode worker with this engine and four sequence slots."""
    return Hello(
        PROTOCOL, WorkerName("d"), Incarnation("i"), "decode", "m", engine.fingerprint, engine.layout.fingerprint, 1,
        "h", "h", "", ("zmq",), engine.memory.blocks, engine.layout.block_size, engine.max_model_len,
        engine.vocab_size, 4, 64, "cpu", engine.layout.dtype,
    )  # fmt: skip
