"""Decode steps as CUDA graphs: all kernels of a step (model, sampling, the next step's input) in one launch.

Graphs are captured before serving, one for each of some numbers of rows and each kind of sampling; a step runs in the
smallest that has room, and the rest is padding, which writes nothing to the pool. All graphs share one memory pool and
the same input and output tensors, whose addresses never change. Per step the host fills one pinned buffer, queues its
upload, the replay and the download of the sampled tokens, and goes on. The tokens also stay on the device, where the
next step finds them: it can be launched before the host has read them.

Everything is queued in one order on the device, so what a step writes is there for the next one. On the host, pinned
buffers are used in turns of two, which is enough as at most two steps are unread (:mod:`common.worker.overlap`).

The ranks of a tensor-parallel worker have the same graphs. Rank 0 sends each step that it launches to the others, which
queue it as well, and gives them its tokens within the graph (:mod:`common.engine.rank_graphs`).

Rows with log-probabilities, penalties, biases, a grammar or restrictions, and prompts, run outside graphs. The mask of
a grammar depends on the last token, so a step with one cannot be launched before that is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.attention.interface import Span
from common.core.errors import InvariantBroken
from common.core.sequence import Batch, StepResult
from common.core.sequence import Sequence as Tokens
from common.engine import faults
from common.engine.batch import FlatStep
from common.engine.capture_audit import audit
from common.engine.device_sampler import Columns, sample_on_device
from common.engine.graph_calls import Event, GraphCalls
from common.engine.launched import LaunchedStep
from common.engine.progress import StepProgress, not_reported
from common.engine.rank_graphs import GraphRanks
from common.engine.sample_plan import PLAIN, Features, SamplePlanner
from common.engine.sampler import uniforms
from common.engine.token_counts import TokenCounts

MAX_ROWS = 512
"""Most rows of a graph; steps with more run without."""
KINDS = (PLAIN, Features(random=True), Features(random=True, min_p=True, top_k=True, top_p=True))
"""Kinds of sampling that are captured. A step takes the first that covers all its rows; only the last one sorts."""
_NUMBERS = ("top_k", "temperature", "top_p", "min_p")
_OF_MODEL = 4
"""Columns before those of sampling."""
_NAMES = ("given", "positions", "blocks", "offsets", "noise", *_NUMBERS)
"""Columns of a step: 8-byte numbers. ``given`` is a token id, or -1 - i for the token that row i of the step before has
sampled; ``blocks`` is -1 for padding."""
_REAL = ("noise", "temperature", "top_p", "min_p")
_PADDING = {"given": 0, "positions": 0, "blocks": -1, "offsets": 0, "noise": 0, "top_k": 1}
UNREAD = 2
"""Most launched steps whose tokens have not been read, and pinned buffers that are used in turns."""

Slots = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, Slots, Any], torch.Tensor]
"""Runs the model on token ids and positions int64 [n], which belong to the slots (block and offset, int64 [n] each) and
to the attention plan; returns logits [n, vocab]."""


class GraphAttention(Protocol):
    """An attention backend whose plan of a decode step lies at fixed addresses. It is used by captured steps only: a
    step outside graphs could need larger buffers."""

    def reserve(self, rows: int, blocks: int, heads: int) -> None:
        """Make room for steps of up to ``rows`` rows of ``blocks`` blocks each, in layers of ``heads`` heads: no buffer
        moves from then on."""
        ...

    def plan(self, spans: Sequence[Span], rows: int | None = None) -> Any:
        """Queue the upload of a step's plan of ``rows`` rows, and return it. Rows behind ``spans`` are padding."""
        ...


def sizes_of(rows: int) -> list[int]:
    """Return the numbers of rows to capture for steps of up to ``rows`` rows: padding is less than a sixth from 48 rows
    on, and the few small steps, which are the fastest, have none or little."""
    wanted = chain((1, 2, 4), range(8, 128, 8), range(128, 256, 16), range(256, MAX_ROWS + 1, 32))
    most = min(rows, MAX_ROWS)
    return [*(size for size in wanted if size < most), most]


class DecodeGraphs:
    """The captured decode steps of one model on ``device``, over a pool of ``block_size`` tokens per block.

    To be made and captured in inference mode, and used only by the thread that runs the engine.
    """

    def __init__(
        self,
        calls: GraphCalls,
        forward: Forward,
        attention: GraphAttention,
        rows: int,
        device: torch.device,
        block_size: int,
        ranks: GraphRanks | None = None,
    ) -> None:
        self._calls, self._forward, self._attention = calls, forward, attention
        self._device, self._block_size, self._ranks = device, block_size, ranks
        self.sizes = sizes_of(rows)
        most = self.sizes[-1]
        self._words = torch.zeros(len(_NAMES), most, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        """The last step's tokens, as inputs of the next one: 0 where there is none."""
        self._sampled = torch.zeros(most, dtype=torch.int64, device=device)
        """The last step's tokens, as results: -1 where the logits were not finite."""
        self._inputs = [_Input(calls.pinned(len(_NAMES), most)) for _ in range(UNREAD)]
        self._outputs = [calls.pinned(most) for _ in range(UNREAD)]
        self._uploaded: list[Event | None] = [None] * UNREAD
        """On other ranks than 0, which read nothing: when the device has read each of the inputs."""
        self._graphs: dict[tuple[int, Features], Callable[[], None]] = {}
        self._launched = self._read = 0
        self._rows: dict[Tokens, int] = {}
        """The sequences of the last launched step, and their rows."""
        self._parameters = _Parameters([], PLAIN, {})

    # -- before serving -----------------------------------------------------------------------------------------------

    def prepare(self, blocks: int, heads: int) -> None:
        """Make the inputs those of a step of padding. ``blocks``: most blocks of a sequence; ``heads``: most query
        heads of a layer."""
        self._attention.reserve(self.sizes[-1], blocks, heads)
        self._inputs[0].pad(0, self.sizes[-1])
        self._calls.copy(self._words, self._inputs[0].words)
        self._calls.event().synchronize()
        columns, plan = self._columns(1), self._attention.plan([], self.sizes[0])
        slots = columns["blocks"], columns["offsets"]
        vocab_size = self._forward(columns["given"], columns["positions"], slots, plan).shape[-1]
        if self._ranks is not None and not self._ranks.samples:
            return
        self._counts = TokenCounts(vocab_size, self._device)
        self._sampling = SamplePlanner(vocab_size, self._counts)

    def obstacle(self) -> str:
        """Return why the model's step cannot be captured, in words; "" if it can. It tries the smallest step."""
        plan = self._attention.plan([], self.sizes[0])

        def run() -> None:
            self._run(self.sizes[0], KINDS[-1], plan)

        run()  # the first run of a step fills caches and compiles kernels
        blockers, why = audit(run), ""
        if blockers:
            why = f"{sum(each.times for each in blockers)} operations would stop capture, the first: {blockers[0]}"
        if why := why if self._ranks is None else self._ranks.agreed(why):
            return why
        try:
            self._calls.capture(run)
        except RuntimeError as error:
            faults.raise_if_lost(error)
            if faults.is_out_of_memory(error):
                raise
            return f"capture fails: {str(error).partition(chr(10))[0]}"
        return ""

    def capture(self, captured: StepProgress = not_reported) -> None:
        """Capture all sizes and kinds, the largest first: the others then find room in its memory."""
        for number, rows in enumerate(reversed(self.sizes)):
            captured(number, len(self.sizes))
            self.capture_size(rows)
        captured(len(self.sizes), len(self.sizes))

    def capture_size(self, rows: int) -> None:
        """Capture all kinds of a step of ``rows`` rows. RuntimeError if that is not possible."""
        plan = self._attention.plan([], rows)
        self._run(rows, KINDS[-1], plan)  # compiles the kernels for this size
        for kind in reversed(KINDS):
            self._graphs[rows, kind] = self._calls.capture(partial(self._run, rows, kind, plan))

    def _run(self, rows: int, kind: Features, plan: Any) -> None:
        """Compute a step of ``rows`` rows from what the input tensors contain."""
        columns = self._columns(rows)
        given = columns["given"]
        known = self._tokens.index_select(0, (-1 - given).clamp(min=0))
        ids = torch.where(given < 0, known, given)
        logits = self._forward(ids, columns["positions"], (columns["blocks"], columns["offsets"]), plan)
        if self._ranks is None or self._ranks.samples:
            parameters = None if kind == PLAIN else self._sampling_columns(columns, ids)
            self._sampled[:rows].copy_(sample_on_device(logits, parameters, kind, self._counts)[:, 0])
        tokens = self._sampled[:rows].clamp(min=0)  # a row that failed is dropped, but its input must be an id
        self._tokens[:rows].copy_(tokens if self._ranks is None else self._ranks.share_tokens(tokens))

    def _columns(self, rows: int) -> dict[str, torch.Tensor]:
        """Return views of the first ``rows`` numbers of each input."""
        return {
            name: words[:rows].view(torch.float64) if name in _REAL else words[:rows]
            for name, words in zip(_NAMES, self._words, strict=True)
        }

    @staticmethod
    def _sampling_columns(columns: dict[str, torch.Tensor], unused: torch.Tensor) -> Columns:
        """Return the columns of a kind without penalties and biases, whose own columns are ``unused``."""
        used = {name: columns[name].float() for name in _NUMBERS if name in _REAL}
        used |= {"top_k": columns["top_k"], "noise": columns["noise"]}
        return Columns(**{name: used.get(name, unused) for name in Columns._fields})

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # the tensors were made in it, and torch writes them only there
    def launch(self, batch: Batch) -> LaunchedStep | None:
        """Queue the decode step ``batch``; None if it must run without a graph. See
        :class:`common.engine.launched.StepLauncher`."""
        count = len(batch.segments)
        if not 0 < count <= self.sizes[-1] or batch.length != count:
            return None
        parameters = self._parameters_of(batch)
        if parameters is None:
            return None
        if self._launched - self._read >= UNREAD:
            raise InvariantBroken(f"{UNREAD} steps are launched and none of them is read")
        rows = next(size for size in self.sizes if size >= count)
        turn = self._launched % UNREAD
        spans = self._inputs[turn].fill(batch, self._rows, self._block_size, parameters, rows)
        if self._ranks is not None:
            self._ranks.launched(self._inputs[turn].step(spans), rows, KINDS.index(parameters.kind))
        try:
            self._queue(turn, spans, rows, parameters.kind)
            self._calls.copy(self._outputs[turn], self._sampled)
            done = self._calls.event()
        except RuntimeError as error:
            faults.raise_if_lost(error)
            raise
        self._launched += 1
        self._parameters = parameters
        self._rows = {segment.sequence: row for row, segment in enumerate(batch.segments)}
        return _Launched(self, count, self._outputs[turn], done)

    @torch.inference_mode()
    def repeat(self, step: FlatStep, rows: int, kind: int) -> None:
        """Queue the decode ``step`` that rank 0 has launched, by the graph of ``rows`` rows and of the kind with this
        index."""
        turn = self._launched % UNREAD
        if (before := self._uploaded[turn]) is not None:
            before.synchronize()
        self._inputs[turn].take(step, rows)
        self._queue(turn, step.spans, rows, KINDS[kind])
        self._uploaded[turn] = self._calls.event()
        self._launched += 1

    def _queue(self, turn: int, spans: Sequence[Span], rows: int, kind: Features) -> None:
        """Queue the upload of a step and its graph."""
        self._attention.plan(spans, rows)
        self._calls.copy(self._words, self._inputs[turn].words)
        self._graphs[rows, kind]()

    def close(self) -> None:
        """Drop the graphs; no step can be launched any more."""
        self._graphs.clear()

    def _parameters_of(self, batch: Batch) -> _Parameters | None:
        """Return the sampling parameters of the batch's rows; None if some row needs more than graphs have."""
        sequences = [segment.sequence for segment in batch.segments]
        for segment in batch.segments:
            sequence = segment.sequence
            if segment.end < len(sequence.tokens) or sequence.siblings or sequence.masked:
                return None
            if segment.end - sequence.prompt_length < sequence.request.sampling.min_tokens:
                return None
        if sequences == self._parameters.sequences:
            return self._parameters
        params = [sequence.request.sampling for sequence in sequences]
        features = self._sampling.features(params)
        if features.penalties or features.logprobs is not None or any(one.logit_bias for one in params):
            return None
        kind = next(kind for kind in KINDS if _covers(kind, features)) if features.random else PLAIN
        positions, choices = [0] * len(params), [sequence.choice for sequence in sequences]
        numbers = self._sampling.numbers(params, positions, choices) if features.random else {}
        columns = {name: np.frombuffer(numbers[name], np.int64) for name in _NUMBERS if name in numbers}
        return _Parameters(sequences, kind, columns)

    def read(self) -> None:
        """Record that the oldest launched step has been read."""
        self._read += 1


class _Launched:
    """A launched step of ``count`` rows, whose tokens will be in ``tokens``."""

    def __init__(self, graphs: DecodeGraphs, count: int, tokens: torch.Tensor, done: Event) -> None:
        self._graphs, self._count, self._tokens, self._done = graphs, count, tokens, done

    def result(self) -> StepResult:
        try:
            self._done.synchronize()
        except RuntimeError as error:
            faults.raise_if_lost(error)
            raise
        self._graphs.read()
        sampled: list[int] = self._tokens[: self._count].tolist()
        errors = {row: faults.NOT_FINITE for row, token in enumerate(sampled) if token < 0}
        tokens = [[token] if token >= 0 else [] for token in sampled]
        return StepResult(tokens, [[] for _ in sampled], 0.0, errors)


def _covers(kind: Features, wanted: Features) -> bool:
    return all(getattr(kind, name) or not getattr(wanted, name) for name in ("random", "min_p", "top_k", "top_p"))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The sampling parameters of the rows of ``sequences``, which most steps share with the step before."""

    sequences: list[Tokens]
    kind: Features
    columns: dict[str, npt.NDArray[np.int64]]
    """The words of :data:`_NUMBERS`; empty if all rows take their most likely token."""


class _Input:
    """A pinned buffer for the columns of one step, int64 [names, rows]."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self._columns = dict(zip(_NAMES, words.numpy(), strict=True))
        self._sequences: list[Tokens] | None = None

    def fill(
        self, batch: Batch, before: dict[Tokens, int], block_size: int, parameters: _Parameters, rows: int
    ) -> list[Span]:
        """Fill in ``batch``, padded to ``rows`` rows, and return its spans. ``before`` has the rows of the sequences in
        the step launched before."""
        given, blocks, positions = [], [], []
        spans = []
        for row, (segment, table) in enumerate(zip(batch.segments, batch.tables, strict=True)):
            tokens, start = segment.sequence.tokens, segment.start
            if start < len(tokens):
                given.append(tokens[start])
            elif segment.sequence in before:
                given.append(-1 - before[segment.sequence])
            else:
                raise InvariantBroken(f"no step samples the token that {segment.sequence} continues with")
            positions.append(start)
            blocks.append(table[start // block_size])
            spans.append(Span(row, 1, start, table))
        count, columns = len(spans), self._columns
        at = np.array(positions, np.int64)
        columns["given"][:count], columns["positions"][:count], columns["blocks"][:count] = given, at, blocks
        columns["offsets"][:count] = at % block_size
        if parameters.columns:
            self._fill_sampling(batch, parameters)
        self.pad(count, rows)
        return spans

    def _fill_sampling(self, batch: Batch, parameters: _Parameters) -> None:
        count, sequences = len(batch.segments), parameters.sequences
        if sequences is not self._sequences:
            for name, column in parameters.columns.items():
                self._columns[name][:count] = column
            self._sequences = sequences
        params = [sequence.request.sampling for sequence in sequences]
        positions = [segment.end - segment.sequence.prompt_length for segment in batch.segments]
        noise = uniforms([one.seed for one in params], [each.choice for each in sequences], positions)
        self._columns["noise"][:count] = noise.view(np.int64)

    def step(self, spans: list[Span]) -> FlatStep:
        """Return what was filled in, without the sampling of its rows."""
        given, positions, blocks, offsets = (
            array("q", self._columns[name][: len(spans)].tobytes()) for name in _NAMES[:_OF_MODEL]
        )
        return FlatStep(given, positions, blocks, offsets, array("q"), spans, [])

    def take(self, step: FlatStep, rows: int) -> None:
        """Fill in ``step``, padded to ``rows`` rows."""
        columns, count = (step.ids, step.positions, step.blocks, step.offsets), len(step.ids)
        for name, column in zip(_NAMES, columns, strict=False):
            self._columns[name][:count] = column
        self.pad(count, rows)

    def pad(self, count: int, rows: int) -> None:
        """Make padding of the rows from ``count`` on."""
        if rows > count:
            for name, column in self._columns.items():
                column[count:rows] = _PADDING.get(name, 0)
