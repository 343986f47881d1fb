"""Prepares a checkpoint's model for an engine: its weights on their device, in the form in which they are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from common.checkpoint.files import ROUNDED, Checkpoint
from common.checkpoint.formats import refuse_use
from common.engine.faults import shortage_in_words
from common.engine.parallel import Leader
from common.kernels import cpu, triton
from common.kv.layout import KvDtype
from common.model.collective import Collective
from common.model.compact import integer_formats
from common.model.fp8 import Fp8Linear, round_linears
from common.model.gpu_layers import fuse_gpu_layers
from common.model.layers import fuse_layers
from common.model.linears import PackedLinear, pack_linears
from common.model.load import Progress, detach_from_files, load_model, read_weights
from common.model.load_compact import load_compact
from common.model.probe import Probe, probe
from common.model.rotary import freeze_rotary
from common.model.round_linears import round_to_groups
from common.platform.device import Device
from common.quantization.open import open_source
from common.quantization.rounded import open_rounded
from common.quantization.source import WeightSource

Quantization = Literal["none", "int8", "int4", "fp8"]
Products = Literal["auto", "exact", "integer"]
WeightCache = Literal["auto", "none"]
SMALLEST_KEPT = 32 << 20
"""Fewest bytes of weights whose packed form is kept in a file."""
FEWER_WEIGHTS = "choose a smaller model, free the GPU, or run fewer workers on it"


@dataclass(frozen=True)
class PreparedModel:
    """A model on device ``where``, and what was done to it: ``fused`` layers in C, ``packed`` linear layers, linear
    layers ``rounded`` to fp8. ``formats`` counts the matrices that stay quantized, by format; products with those of
    the formats ``integer`` round activations, products with all others are exact. ``seen`` is what its probe found.
    ``weights`` and ``rotary`` are hashes: of all weights in the files, and of frozen rotary frequencies ("" for
    none). ``notes`` are choices in words."""

    model: nn.Module
    where: torch.device
    seen: Probe
    quantization: str
    weights: str
    rotary: str
    fused: int
    packed: int
    rounded: Sequence[Fp8Linear]
    formats: Mapping[str, int]
    integer: frozenset[str]
    notes: list[str]

    @property
    def is_rounded(self) -> bool:
        """Whether results differ from those of the checkpoint's weights, since weights or activations are rounded."""
        return self.quantization in ROUNDED or bool(self.rounded) or bool(self.integer)

    def fingerprint(self, checkpoint: Checkpoint, kv: str) -> str:
        """Return the fingerprint of the loaded model: the checkpoint's, a dot, and the hash of all weights in its
        files. If loading has changed what keys mean (frozen rotary frequencies, quantized weights, integer products,
        ``kv`` with scales), another dot and a hash of these changes follow."""
        quantized = "" if self.quantization == "none" else self.quantization
        products = "integer" if self.integer else ""
        made = [part for part in (self.rotary, quantized, products, kv) if part]
        loaded = f"{checkpoint.fingerprint}.{self.weights}"
        return f"{loaded}.{hashlib.blake2b('/'.join(made).encode(), digest_size=8).hexdigest()}" if made else loaded

    def layer_notes(self, batch_hint: int, at_once: bool) -> Iterator[str]:
        """Yield notes on how layers are computed; ``at_once``: those in C in a single call."""
        if self.fused:
            yield f"{self.fused} layers run as fused kernels in C{', all in one call' if at_once else ''}"
        if self.packed:
            by_onednn = any(isinstance(each, PackedLinear) for each in self.model.modules())
            how = f"for about {batch_hint} rows per step" if by_onednn else "for any number of rows"
            yield f"{self.packed} linear layers packed {how}"
        if self.formats:
            kept = ", ".join(f"{count} in {name}" for name, count in self.formats.items())
            how = "integer (activations rounded to 8 or 16 bits)" if self.integer else "exact"
            if self.integer and (others := [name for name in self.formats if name not in self.integer]):
                how += f", exact with {', '.join(others)}"
            in_c = self.where.type == "cpu" and cpu.library() is not None
            is_fast = in_c or (not self.integer and triton.unusable(self.where.type) is None)
            place = "" if is_fast else ", in torch, which is slow"
            yield f"weights stay quantized: {kept}; products are {how}{place}"
        if self.rounded:
            slow = sum(not each.in_hardware for each in self.rounded)
            how = f", {slow} of them emulated in float32, which is for tests and slow" if slow else ""
            parts = sum(each.is_part for each in self.rounded)
            which = f" (in {parts}, of which each rank has some columns, per rank, too)" if parts else ""
            yield f"{len(self.rounded)} linear layers in fp8 with a scale per row and per token{which}{how}"


def prepare(
    checkpoint: Checkpoint,
    machine: Device,
    dtype: KvDtype,
    *,
    max_model_len: int | None,
    batch_hint: int,
    quantization: Quantization,
    products: Products,
    gpu_fusion: Sequence[str],
    progress: Progress | None,
    trust_remote_code: bool,
    leader: Leader | None,
    weight_cache: WeightCache = "auto",
) -> PreparedModel:
    """Load and probe the model of ``checkpoint``, with weights of ``dtype``, and change its layers into those that
    compute fastest on ``machine``. The other parameters are those of :func:`common.engine.loading.load_engine`. Raises
    StartError if it cannot be served here, also if another process has taken the GPU's memory since it was looked
    at."""
    weights = read_weights(checkpoint, dtype, progress, for_gpu=machine.gpu is not None, quantization=quantization)
    where, bits = torch.device(machine.address), ROUNDED.get(quantization)
    exact = products == "exact" or (products == "auto" and machine.gpu is not None)
    formats, remarks = dict[str, int](), list[str]()
    if (source := _source(checkpoint, quantization, leader)) is not None:
        key = f"{weights}|{quantization}" if _keeps(checkpoint, machine, dtype, quantization, weight_cache) else ""
        with shortage_in_words("for the weights", where, FEWER_WEIGHTS):
            loaded = load_compact(checkpoint, source, dtype, trust_remote_code, exact=exact, where=where, key=key)
        model, formats, remarks = loaded.model, dict(loaded.formats), loaded.notes
    elif leader is None:
        model = load_model(checkpoint, dtype, trust_remote_code)
    else:
        model = leader.load(checkpoint, dtype, trust_remote_code, where)
    notes, rotary = freeze_rotary(model, max_model_len or checkpoint.max_position)
    with shortage_in_words("for the weights", where, FEWER_WEIGHTS):
        move(model, where)
        seen = probe(model, checkpoint)
        ranks = None if leader is None else leader.collective
        rounded = round_linears(model, ranks) if quantization == "fp8" else []
        if bits is not None:
            more = round_to_groups(model, bits, exact=exact)
            formats |= {name: formats.get(name, 0) + count for name, count in more.items()}
            if checkpoint.format.method:
                layers = sum(more.values())
                notes.append(f"--quantization {quantization} changes only what was not quantized: {layers} layers")
        integer = integer_formats(model)
        fused = fuse_layers(model) if machine.gpu is None and leader is None and not rounded else 0
        if machine.gpu is not None and not rounded:
            notes += fuse_for_gpu(model, gpu_fusion, where, ranks)
    packed = pack_linears(model, batch_hint) if machine.gpu is None else 0
    detach_from_files(model)
    notes = [*remarks, *notes]
    return PreparedModel(
        model, where, seen, quantization, weights, rotary, fused, packed, rounded, formats, integer, notes
    )


def _keeps(
    checkpoint: Checkpoint, machine: Device, dtype: KvDtype, quantization: Quantization, weight_cache: WeightCache
) -> bool:
    """Return whether packed weights are mapped from a file: on CPUs with compiled kernels, if they are not tiny."""
    if machine.gpu is not None or cpu.library() is None or weight_cache == "none":
        return False
    return checkpoint.bytes_in(dtype, quantization) >= SMALLEST_KEPT


def _source(checkpoint: Checkpoint, quantization: Quantization, leader: Leader | None) -> WeightSource | None:
    """Return the weights of a quantized checkpoint, or those of another one that is to be rounded; None for a model
    that is loaded as it is, or by ranks. Raises StartError if a quantized one cannot be served in this way."""
    refuse_use(checkpoint.name, checkpoint.format, quantization, 1 if leader is None else leader.size)
    if checkpoint.format.method:
        return open_source(checkpoint)
    bits = ROUNDED.get(quantization)
    return None if leader is not None or bits is None else open_rounded(checkpoint, bits)


def move(model: nn.Module, where: torch.device) -> None:
    """Move ``model``, whose weights may lie in mapped files, to the memory of ``where``."""
    if where.type == "cuda":
        torch.cuda.set_device(where)
    model.to(where)


def fuse_for_gpu(
    model: nn.Module, parts: Sequence[str], where: torch.device, collective: Collective | None
) -> list[str]:
    """Fuse ``parts`` of the decoder layers, which are on ``where``, and return a note on it, if any are. Without Triton
    only the linears can be. ``collective``: of a rank's share of the model, as
    :func:`common.model.gpu_layers.fuse_gpu_layers`."""
    usable = parts if triton.unusable(where.type) is None else [part for part in parts if part == "linears"]
    if usable and (count := fuse_gpu_layers(model, usable, collective)):
        return [f"{count} layers with fused {', '.join(usable)}"]
    return []
