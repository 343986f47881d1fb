"""The engine: a model, its paged KV, and one step at a time.

A step is any mix of prefill chunks and decode tokens; the engine knows no role, no schedule and no request state. What
differs between workers is given at construction (``batch_hint``) or as the ``on_layer`` hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from common.attention.interface import AttentionBackend, Params, Rotation, bind
from common.checkpoint.files import Checkpoint
from common.core.ids import BlockId, new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Batch, Segment, StepResult
from common.core.sequence import Sequence as Tokens
from common.engine import faults
from common.engine.batch import FlatStep, flatten, rows_to_sample
from common.engine.decoder import FusedDecoder, find_decoder
from common.engine.device_steps import DeviceSteps, Entry
from common.engine.faults import NOT_FINITE, REQUEST_FAULTS
from common.engine.graph_calls import GraphCalls
from common.engine.graph_capture import Capture, GraphUse
from common.engine.launched import StepLauncher
from common.engine.progress import StepProgress, not_reported
from common.engine.prompt_scores import forward_and_score, most_wanted, read
from common.engine.restrictions import restricted
from common.engine.sampler import NOTHING_LEFT, peaks, sample
from common.grammar import errors as grammar_errors
from common.grammar.masks import Grammars, StepMasks, begin_masks
from common.grammar.matcher import Mask
from common.kv.cache import BlockCopy
from common.kv.layout import KvLayout
from common.kv.storage.cuda import Memory
from common.kv.storage.interface import KvStorage
from common.model.probe import Probe, forward, require_equal

WARM_UP_ROWS, _WARM_UP_BATCH = 64, 16
"""Most rows and most sequences of a warm-up step: enough to get the kernels compiled. A step of hundreds of rows would
take seconds on a CPU with a model of billions of parameters."""


class _Output(NamedTuple):
    """The output of a forward pass: ``logits`` [rows, vocab], valid until the next step, their :func:`peaks` if these
    are known already, and the ``scores`` of scored rows, as :func:`common.engine.prompt_scores.score`."""

    logits: torch.Tensor
    peaks: list[int] | None = None
    scores: torch.Tensor | None = None


class PagedAttention:
    """The function that the model's attention modules call (a :class:`common.attention.interface.LayerAttention`). It
    stores a layer's keys and values of this step in the pool, announces the layer through ``on_layer``, and attends."""

    def __init__(self, store: KvStorage, backend: AttentionBackend) -> None:
        self.store, self.backend = store, backend
        self.on_layer: Callable[[int], None] | None = None
        self.stored = 0
        """Number of layers of this step whose keys and values are in the pool and announced."""

    @property
    def decode_backend(self) -> AttentionBackend:
        """The backend of decode rows; prompts may have another one."""
        backend: AttentionBackend = getattr(self.backend, "decode", self.backend)
        return backend

    def begin(self, step: FlatStep) -> Any:
        """Plan ``step``; return the backend's plan, which all layers share."""
        self._step, self._plan, self.stored = step, self.backend.plan(step.spans), 0
        return self._plan

    def wrote(self, layer: int) -> None:
        """Note that this process has written the keys and values of ``layer``."""
        self.announce(layer)

    def announce(self, layer: int) -> None:
        """Report that this step's keys and values of ``layer`` are in the pool."""
        if self.on_layer is not None:
            self.on_layer(layer)
        self.stored = layer + 1

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        self.store.write(layer, key, value, (self._step.tensor("blocks"), self._step.tensor("offsets")))
        self.wrote(layer)
        return self.backend.attend(self._plan, layer, query, params)

    def rotated(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        params: Params,
    ) -> torch.Tensor:
        """See :class:`common.attention.interface.RotatingAttention`."""
        slots = self._step.tensor("blocks"), self._step.tensor("offsets")
        store: Any = self.store  # layers that call this run on GPUs, over a SlabStore
        store.write_rotated(layer, query, key, value, *rotation, slots)
        self.wrote(layer)
        return self.backend.attend(self._plan, layer, query, params)


class ModelEngine:
    """Runs one model's steps over a paged KV pool. ``notes`` are the automatic choices, each with its reason.

    ``device_steps`` are for a model on a device with memory of its own; None on a CPU."""

    def __init__(
        self,
        model: nn.Module,
        store: KvStorage,
        backend: AttentionBackend,
        fingerprint: str,
        vocab_size: int,
        max_model_len: int,
        device_steps: DeviceSteps | None = None,
    ) -> None:
        self.model, self.store = model, store
        self.memory: Memory = store.memory
        self.layout: KvLayout = store.layout
        self.fingerprint, self.vocab_size, self.max_model_len = fingerprint, vocab_size, max_model_len
        self.on_layer: Callable[[int], None] | None = None
        self.grammars: Grammars | None = None
        """Constrains outputs; None if this engine cannot."""
        self.launch: StepLauncher | None = None
        """Starts a decode step without waiting for its tokens, where CUDA graphs are captured."""
        self.notes: list[str] = []
        self.warm_up_rows = WARM_UP_ROWS
        self.max_num_seqs = 1
        self._attention = PagedAttention(store, backend)
        self._device_steps = device_steps
        self.decoder: FusedDecoder | None = None
        """Runs in place of ``model`` if :meth:`shorten` has set it."""
        bind(model, self._attention)

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend that the model calls."""
        return self._attention.backend

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """Compute and store the KV of every row, and sample after the last row of each segment that wants a token.

        If the computation raises, or a segment's logits are NaN, only the segments at fault fail: they are listed in
        the result's ``errors``. Raises DeviceLost if the device itself has failed.
        """
        started = perf_counter()
        try:
            result = self.run_once(batch, self.on_layer)
        except REQUEST_FAULTS as error:
            fault = error.with_traceback(None)  # its frames would keep the step's tensors in memory
        else:
            result.seconds = perf_counter() - started
            return result
        stored = self._attention.stored
        result = self._in_parts(batch, fault)
        for layer in range(stored, len(self.layout.layers)):
            if self.on_layer is not None:
                self.on_layer(layer)
        result.seconds = perf_counter() - started
        return result

    def run_once(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Compute ``batch`` as :meth:`step`, but raise what the computation raises."""
        scores = any(segment.sequence.to_score > segment.start for segment in batch.segments)
        if self.decoder is not None and not scores:  # none of its tensors tracks gradients; inference mode costs 40 us
            return self._compute(batch, on_layer)
        with torch.inference_mode():
            return self._compute(batch, on_layer)

    def _compute(self, batch: Batch, on_layer: Callable[[int], None] | None) -> StepResult:
        result = StepResult([[] for _ in batch.segments], [[] for _ in batch.segments], 0.0)
        if not batch.segments:
            return result
        step = flatten(batch, self.layout.block_size)
        masks = begin_masks(self.grammars, batch, step.sampled)
        self._attention.on_layer = on_layer
        if self._device_steps is not None:
            self._compute_on_device(self._device_steps, batch, step, masks, result)
            return result
        logits, best, scores = self._logits(step, most_wanted(batch, step, self.vocab_size))
        if scores is not None:
            _put_scores(result, batch, step, scores)
        if step.sampled:
            self._sample(batch, step.sampled, logits, best or peaks(logits), masks, result)
        return result

    def _compute_on_device(
        self, steps: DeviceSteps, batch: Batch, step: FlatStep, masks: StepMasks | None, result: StepResult
    ) -> None:
        self._attention.stored = 0  # before the upload, which may raise
        plan = steps.plan([batch.segments[index].sequence for index in step.sampled])
        uploaded = steps.upload(step, plan)
        logits, _, scores = self._logits(uploaded, most_wanted(batch, step, self.vocab_size))
        if scores is not None:
            _put_scores(result, batch, step, scores)
        if not step.sampled:
            steps.wait()
            return
        if masks is not None:
            masks.finish()
        ready = masks.ready if masks is not None else {}
        rows: list[Mask | None] = [
            restricted(batch.segments[index].sequence, ready[index].mask if index in ready else None, self.vocab_size)
            for index in step.sampled
        ]
        for index, entries in zip(step.sampled, steps.sample(logits, uploaded, plan, rows), strict=True):
            _put(result, index, entries)
        if masks is not None:
            masks.settle(result)

    def _logits(self, step: FlatStep, most: int = 0) -> _Output:
        """Return the logits of the sampled rows (of row 0 if there are none) and the scores of the scored ones, with
        ``most`` most likely tokens each."""
        plan = self._attention.begin(step)
        if step.scored:  # even if there is a decoder, which keeps no hidden states
            logits, scores = forward_and_score(self.model, step, most)
            return _Output(logits, None, scores)
        if self.decoder is None:
            ids, positions = step.tensor("ids")[None], step.tensor("positions")[None]
            return _Output(forward(self.model, ids, positions, step.tensor("kept")))
        return _Output(*self.decoder(step, plan, self._attention.announce if self._attention.on_layer else None))

    def _sample(
        self,
        batch: Batch,
        sampled: Sequence[int],
        logits: torch.Tensor,
        best: Sequence[int],
        masks: StepMasks | None,
        result: StepResult,
    ) -> None:
        if masks is not None:
            masks.finish()
            masks.settle(result)
        if min(best) < 0 or result.late or result.refusals:
            left_out = result.late | result.refusals.keys()
            for index, token in zip(sampled, best, strict=True):
                if token < 0 and index not in left_out:
                    result.errors[index] = NOT_FINITE
            good = [place for place, token in enumerate(best) if token >= 0 and sampled[place] not in left_out]
            if not good:
                return
            logits, sampled, best = logits[good], [sampled[place] for place in good], [best[place] for place in good]
        sequences = [batch.segments[index].sequence for index in sampled]
        if all(len(each.tokens) >= each.best_from for each in sequences):
            for index, sequence, token in zip(sampled, sequences, best, strict=True):
                result.tokens[index] = [token] * (sequence.siblings + 1)
            return
        ready = masks.ready if masks is not None else None
        tokens, logprobs = sample(logits, rows_to_sample(batch, sampled, logits.shape[1], ready))
        at = 0
        for index in sampled:
            end = at + len(batch.segments[index].sequence.choices)
            _put(result, index, list(zip(tokens[at:end], logprobs[at:end], strict=True)))
            at = end

    def _in_parts(self, batch: Batch, error: Exception) -> StepResult:
        """Repeat the step in parts after it raised ``error``, so that only the segments that raise again fail: one by
        one, or in halves if the GPU's memory was too small for all at once."""
        faults.raise_if_lost(error)
        if self._device_steps is not None:
            self._device_steps.forget()
        count, size = len(batch.segments), 1
        result = StepResult([[] for _ in batch.segments], [[] for _ in batch.segments], 0.0)
        if faults.is_out_of_memory(error):
            faults.free_cached(self.store.device)
            size = -(-count // 2)
        if count == 1:
            result.errors[0] = faults.describe(error)
            return result
        for first in range(0, count, size):
            part = slice(first, first + size)
            found = self._run_part(Batch(batch.segments[part], batch.tables[part]))
            result.tokens[part], result.logprobs[part] = found.tokens, found.logprobs
            result.errors |= {first + index: why for index, why in found.errors.items()}
            result.refusals |= {first + index: why for index, why in found.refusals.items()}
            result.late |= {first + index for index in found.late}
            result.prompts |= {first + index: span for index, span in found.prompts.items()}
        return result

    def _run_part(self, part: Batch) -> StepResult:
        try:
            return self.run_once(part)
        except REQUEST_FAULTS as error:
            fault = error.with_traceback(None)
        return self._in_parts(part, fault)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Run a step without sampling; return the logits [n, vocab] of the n segments that want a token, in the model's
        dtype."""
        step = flatten(batch, self.layout.block_size)
        if self._device_steps is not None:
            step = self._device_steps.upload(step)
        self._attention.on_layer = None
        return self._logits(step).logits[: len(step.sampled)].clone()

    def close(self) -> None:
        """Release the pool's memory; the engine cannot be used afterwards."""
        if self.grammars is not None:
            self.grammars.close()
        self.store.close()

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole KV blocks; called before the step that reads the targets."""
        self.store.copy_blocks(copies)

    # -- before serving -----------------------------------------------------------------------------------------------

    def warm_up(self, done: StepProgress = not_reported) -> list[tuple[int, int, float]]:
        """Run a few steps, since first ones are slow; return (tokens, positions attended to, seconds) of each. ``done``
        is called with the number of steps that were run and that of all. Only before serving: it overwrites the pool's
        first blocks."""
        rows = min(self.warm_up_rows, self.max_model_len, self.store.blocks * self.layout.block_size)
        blocks = [BlockId(block) for block in range(self.layout.blocks_for(rows))]
        prompt = sequence_of([1] * rows)
        steps = [Batch((Segment(prompt, 0, rows),), (blocks,))]
        batch = 1
        while batch <= min(self.max_num_seqs, _WARM_UP_BATCH):
            steps.append(Batch((Segment(prompt, rows - 1, 1),) * batch, (blocks,) * batch))
            batch *= 2
        paces = []
        with faults.shortage_in_words("for the warm-up steps", self.store.device, faults.SMALLER_POOL):
            for step in steps:
                started = perf_counter()
                self.run_once(step)
                paces.append((step.length, step.attended, perf_counter() - started))
                done(len(paces), len(steps))
        self.store.clear(blocks)
        return paces

    def shorten(self, tokens: Sequence[int]) -> bool:
        """Run all layers as one call into C from now on, if the model allows it and ``tokens`` get bit-identical logits
        that way; return whether it does. Only before serving: it overwrites the pool's first blocks."""
        found = find_decoder(self.model, self._attention.backend)
        size = min(len(tokens), self.max_model_len, self.store.blocks * self.layout.block_size)
        blocks = [BlockId(block) for block in range(self.layout.blocks_for(size))]
        batch = Batch((Segment(sequence_of(tokens[:size]), 0, size),), (blocks,))
        expected = self.logits(batch)
        self.decoder = found
        if found is not None and not torch.equal(self.logits(batch), expected):
            self.decoder = None
        self.store.clear(blocks)
        return self.decoder is not None

    @torch.inference_mode()
    def capture_graphs(self, calls: GraphCalls, captured: StepProgress = not_reported) -> None:
        """Run decode steps as CUDA graphs from now on, if the backend and the model allow it, and add a note on that.
        ``captured`` is called with the progress. Only before serving, after the checks."""
        graphs, note = self._capture.graphs(calls, captured)
        self.launch = None if graphs is None else graphs.launch
        self.notes.append(note)

    @torch.inference_mode()
    def measure_graphs(self, calls: GraphCalls, taken: Callable[[], int], driver_bytes: int) -> GraphUse:
        """Return what :meth:`capture_graphs` would take, as :meth:`common.engine.graph_capture.Capture.measure`."""
        return self._capture.measure(calls, taken, driver_bytes)

    @property
    def _capture(self) -> Capture:
        return Capture(self.model, self._attention, self.max_num_seqs, self.max_model_len)

    def verify(self, checkpoint: Checkpoint, expected: Probe, tolerance: float | None = None) -> None:
        """Repeat the probe through the pool, in three chunks beside another sequence. StartError if logits differ by
        more than ``tolerance`` (default: what the dtype allows). Skipped if pool or context are too small for it. Only
        before serving: it overwrites blocks."""
        size = self.layout.block_size
        half = self.layout.blocks_for(len(expected.tokens))
        if self.store.blocks < 2 * half or self.max_model_len < len(expected.tokens):
            return
        tables = [BlockId(b) for b in range(half)], [BlockId(b) for b in range(2 * half - 1, half - 1, -1)]
        rows: list[torch.Tensor] = []
        ends = (min(size, len(expected.tokens) // 2) - 3, len(expected.tokens) - 1, len(expected.tokens))
        for start, end in zip((0, *ends), ends, strict=False):
            one, other = sequence_of(expected.tokens[:end]), sequence_of(expected.tokens[:end][::-1])
            segments = Segment(other, start, end - start), Segment(one, start, end - start)
            rows.append(self.logits(Batch(segments, (tables[1], tables[0])))[1])
        wanted = expected.logits[[end - 1 for end in ends]]
        require_equal(checkpoint, torch.stack(rows), wanted, "through paged blocks", tolerance)
        self.store.clear([*tables[0], *tables[1]])


def _put_scores(result: StepResult, batch: Batch, step: FlatStep, scores: torch.Tensor) -> None:
    """Store the log-probabilities of prompts in ``result``."""
    result.prompts, faulty = read(batch, step, scores)
    result.errors |= dict.fromkeys(faulty, NOT_FINITE)


def _put(result: StepResult, index: int, entries: Sequence[Entry]) -> None:
    """Store the tokens and log-probabilities sampled for segment ``index`` in ``result``."""
    if (least := min(token for token, _ in entries)) < 0:
        if least == NOTHING_LEFT:
            result.refusals[index] = grammar_errors.NOTHING_LEFT
        else:
            result.errors[index] = NOT_FINITE
        return
    result.tokens[index] = [token for token, _ in entries]
    result.logprobs[index] = [logprobs for _, logprobs in entries if logprobs is not None]


def sequence_of(tokens: Sequence[int]) -> Tokens:
    """Return a greedy sequence of ``tokens`` that belongs to no client's request."""
    request = Request(new_request_id(), pack_tokens(tokens), SamplingParams(1, 0, temperature=0.0))
    return Tokens(request, 0)
