"""Start-up check of a loaded model: a run on 32 tokens before it serves.

The flags of transformers do not say reliably whether an architecture works with our attention, so the check runs the
model. Our attention must be called exactly once per layer, and the logits must equal those of transformers' eager
attention, at the positions that the model itself gives the tokens. The masks of the eager run must allow what our
attention does, up to the longest context. The engine then repeats the comparison through its paged pool, in chunks and
in a batch with another sequence. That detects a model that keeps state outside the KV cache.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from common.attention.interface import ATTENTION, LayerCall, Params, bind
from common.attention.torch_reference import attend_one
from common.checkpoint.files import Checkpoint
from common.core.errors import StartError
from common.kv.budget import SHORTEST_CONTEXT
from common.kv.layout import LayerLayout
from common.model.linears import marking_read_weights
from common.model.masks import MaskRecorder, declared_window, difference

PROBE_TOKENS = SHORTEST_CONTEXT
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest accepted difference of logits, by their dtype. The difference of a row is the root mean square over the
vocabulary, divided by the standard deviation of the row's logits; the median over rows counts."""

LONGEST_MASK = 1 << 20
"""Up to which position masks are compared."""

QUANTISED_TOLERANCE = 0.25
"""The largest accepted difference for weights, activations or KV that are rounded to 8 bits."""


@dataclass
class Recorder:
    """Dense attention over one sequence. Records (layer, KV shape, heads and parameters) of each call in ``calls``, and
    the largest magnitude of each KV head's keys and of its values, float32 [kv_heads] each, in ``peaks``."""

    calls: list[tuple[int, LayerLayout, LayerCall]] = field(default_factory=list)
    peaks: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Params
    ) -> torch.Tensor:
        shape = LayerLayout(key.shape[1], key.shape[2], value.shape[2])
        self.calls.append((layer, shape, LayerCall(query.shape[1], params)))
        self.peaks.append((key.abs().amax(dim=(0, 2)).float(), value.abs().amax(dim=(0, 2)).float()))
        return attend_one(query, key, value, 0, params).to(query.dtype)


@dataclass(frozen=True)
class Probe:
    """Result of :func:`probe`. ``layers``: the model's KV shapes. ``calls``: how it calls each layer's attention.
    ``tokens``: the 32 ids that were run. ``logits`` [32, vocab], in the model's dtype: their logits with eager
    attention, which our attention must reproduce. ``peaks``: per layer, the largest magnitude of each KV head's keys
    and of its values."""

    layers: tuple[LayerLayout, ...]
    calls: tuple[LayerCall, ...]
    tokens: list[int]
    logits: torch.Tensor
    peaks: tuple[tuple[list[float], list[float]], ...] = ()


def forward(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None, keep: torch.Tensor | None
) -> torch.Tensor:
    """Run the model on T tokens and return logits [rows, vocab] in the model's dtype. ``input_ids`` and
    ``position_ids`` are int64 [1, T]; None leaves the positions to the model. ``keep`` (int64 [rows]) selects the
    tokens whose logits are returned; None returns all T."""
    extra: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
    out = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
    logits: torch.Tensor = out.logits[0]
    return logits


def probe_tokens(checkpoint: Checkpoint) -> list[int]:
    """Return the token ids on which models are compared."""
    return [(7 + 13 * i * i) % checkpoint.vocab_size for i in range(PROBE_TOKENS)]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; those of packed and quantized layers are on "meta"."""
    return next(each.device for each in model.parameters() if each.device.type != "meta")


@torch.inference_mode()
def probe(model: Any, checkpoint: Checkpoint) -> Probe:
    """Run the model on 32 tokens with eager attention and with ours, without the paged pool. StartError, with the
    reason, if the model cannot be run in this way or the logits differ."""
    parameters = inspect.signature(model.forward).parameters
    if not {"position_ids", "logits_to_keep"} <= parameters.keys():
        raise _unfit(checkpoint, "its forward pass takes no position_ids or no logits_to_keep")
    tokens = probe_tokens(checkpoint)
    where = device_of(model)
    ids, positions = torch.tensor([tokens], device=where), torch.arange(PROBE_TOKENS, device=where)[None]
    masks, recorder = MaskRecorder(), Recorder()
    try:
        with masks.record(model), marking_read_weights(model):
            eager = _eager(model, ids, None)
        bind(model, recorder)
        ours = forward(model, ids, positions, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise _unfit(checkpoint, f"its forward pass fails with {type(error).__name__}: {str(error)[:200]}") from error
    layers = _layers(checkpoint, recorder)
    if deviation(ours, eager) > TOLERANCE[eager.dtype] >= deviation(ours, _eager(model, ids, positions)):
        raise _unfit(checkpoint, "it gives tokens other positions than 0, 1, 2, …")
    _check_masks(checkpoint, model, masks, recorder)
    require_equal(checkpoint, ours, eager, "with our attention")
    peaks = tuple((k.tolist(), v.tolist()) for k, v in recorder.peaks)
    return Probe(layers, tuple(call for _, _, call in recorder.calls), tokens, eager, peaks)


def _eager(model: Any, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return the logits with transformers' own attention."""
    model.set_attn_implementation("eager")
    try:
        return forward(model, ids, positions, None)
    finally:
        model.set_attn_implementation(ATTENTION)


def _layers(checkpoint: Checkpoint, recorder: Recorder) -> tuple[LayerLayout, ...]:
    """Return the KV shape of each layer. StartError unless every layer called our attention exactly once and passed
    its sliding window, if it has one."""
    config = checkpoint.text_config
    count = config.get("num_hidden_layers", config.get("n_layer", len(recorder.calls)))
    if [layer for layer, _, _ in recorder.calls] != list(range(count)):
        raise _unfit(checkpoint, f"{count} layers call attention {len(recorder.calls)} times, not once each in order")
    if config.get("attention_chunk_size"):
        raise _unfit(checkpoint, "it attends in chunks, which is not supported")
    kinds = config.get("layer_types") or ()
    for (layer, _, call), kind in zip(recorder.calls, kinds, strict=False):
        if kind == "sliding_attention" and call.params.window is None:
            raise _unfit(checkpoint, f"layer {layer} has a sliding window that it does not pass to attention")
    return tuple(layout for _, layout, _ in recorder.calls)


def _check_masks(checkpoint: Checkpoint, model: Any, masks: MaskRecorder, recorder: Recorder) -> None:
    """Raise StartError if a layer's mask in the eager run allows something else than our attention, at any position
    that can be served; also if masks are not known and the configuration has a window that no layer passes."""
    where, positions = device_of(model), min(checkpoint.position_limit, LONGEST_MASK)
    found = dict[tuple[int, int | None], str]()
    for layer, _, call in recorder.calls:
        if (rule := masks.rules.get(layer)) is not None:
            key = id(rule), call.params.window
            if key not in found:
                found[key] = difference(rule, call.params, positions, where)
            if found[key]:
                raise _unfit(checkpoint, f"of layer {layer}, {found[key]}")
    if not masks.rules:
        calls = [call.params for _, _, call in recorder.calls]
        window = declared_window(model.config.get_text_config(), positions, calls)
        if window is not None:
            raise _unfit(checkpoint, f"it has a sliding window of {window:,} tokens that no layer passes to attention")


def require_equal(
    checkpoint: Checkpoint, ours: torch.Tensor, eager: torch.Tensor, how: str, tolerance: float | None = None
) -> None:
    """Raise StartError unless the logits [rows, vocab] agree within ``tolerance``, given for a model that is
    rounded to 8 bits (default: what their dtype allows); ``how`` describes in the error's text how ``ours`` were
    computed."""
    off = deviation(ours, eager)
    if tolerance is not None and not off <= tolerance:
        raise StartError(
            f"cannot serve {checkpoint.name} in 8 bits",
            f"its logits are off by {off:.2g} standard deviations, more than {tolerance:g}",
            "leave out --quantization and --kv-cache-dtype, or choose another model",
        )
    if tolerance is None and not off <= TOLERANCE[eager.dtype]:
        raise _unfit(checkpoint, f"{how} its logits are off by {off:.2g} standard deviations")


def deviation(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the difference of logits [rows, vocab] in the measure of :data:`TOLERANCE`."""
    wanted = expected.float()
    error = (logits.float() - wanted).pow(2).mean(dim=-1).sqrt() / wanted.std(dim=-1).clamp(min=1e-6)
    return float(error.median())


def _unfit(checkpoint: Checkpoint, why: str) -> StartError:
    return StartError(
        f"cannot serve {checkpoint.name}",
        f"{checkpoint.architecture} does not work with paged attention: {why}",
        "choose another model (Llama, Qwen, Mistral, Gemma, Phi, GPT-OSS, DeepSeek and most decoder-only ones work)",
    )
