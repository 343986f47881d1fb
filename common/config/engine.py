"""Options of the engine, for workers and for ``tandem up``, which starts them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from common.config.options import (
    CPUS,
    SIZE,
    SWITCH,
    OptionKind,
    count,
    decimal,
    one_of,
    option,
    parse_cpus,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "fp8"]
Products = Literal["auto", "exact", "integer"]
WeightCache = Literal["auto", "none"]
KvCacheDtype = Literal["auto", "fp8"]
Attention = Literal["auto", "native", "cpu", "torch", "triton", "flash"]
KvTransport = Literal["auto", "shm", "zmq", "cuda-ipc", "nccl", "nixl"]
PLAIN_TRANSPORTS = {"nixl": "UCX", "nccl": "NCCL"}
"""Values of ``--kv-transport`` that neither encrypt nor authenticate, with what carries the bytes."""
LocalPrefill = Literal["auto", "never", "always"]
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def _parse_device(text: str) -> str:
    if _DEVICE.fullmatch(text.lower()) is None:
        raise ValueError(text)
    return text.lower()


GPU_PARTS = ("linears", "norms", "rotary", "activation")
"""Parts of decoder layers that can be fused, see :mod:`common.model.gpu_layers`."""


def _parse_fusion(text: str) -> str:
    if text != "none" and not set(text.split(",")) <= set(GPU_PARTS):
        raise ValueError(text)
    return text


FUSION = OptionKind("PARTS", f"none, or a list of {', '.join(GPU_PARTS)}", _parse_fusion)
DEVICE = OptionKind("DEVICE", "auto, cpu, cuda or cuda:N", _parse_device)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one worker's engine."""

    device: str = option(
        "auto",
        "where to compute: cpu, cuda (tandem up divides the visible GPUs among its workers), cuda:N (visible GPU N; "
        "with --tensor-parallel-size also those after it), or auto (GPUs if the driver shows any and torch is built "
        "with CUDA, else the CPU)",
        DEVICE,
        "model",
    )

    dtype: Dtype = option(
        "auto",
        "element type of weights, activations and KV; auto is the checkpoint's, or where that is bfloat16 float32 on "
        "CPUs and float16 on GPUs that have no bfloat16",
        one_of("auto", "float32", "bfloat16", "float16"),
        "model",
    )
    quantization: Quantization = option(
        "none",
        "int8 or int4 (CPUs) round the weights of linear layers to 8 or 4 bits in groups of 64, unless the checkpoint "
        "has them quantized; fp8 (GPUs; emulated and slow on CPUs) also multiplies in 8 bits; must be the same on all "
        "workers",
        one_of(*get_args(Quantization)),
        "model",
    )
    products: Products = option(
        "auto",
        "products with quantized weights: exact (weights dequantized), integer (activations rounded to 8 or 16 "
        "bits, which is faster), or auto (integer on CPUs where codes are integers, else exact); must be the same on "
        "all workers",
        one_of(*get_args(Products)),
        "model",
    )
    weight_cache: WeightCache = option(
        "auto",
        "keep packed quantized weights in a file that workers on this machine map and share, in $TANDEM_CACHE, else "
        "$XDG_CACHE_HOME/tandem, else ~/.cache/tandem (auto), or not (none)",
        one_of(*get_args(WeightCache)),
        "model",
    )
    attention: Attention = option(
        "auto",
        "attention backend: native (kernels in C) or cpu (torch) on CPUs, triton or flash (flash-attn) on GPUs, "
        "torch (a slow reference), or auto (the best one that works)",
        one_of(*get_args(Attention)),
        "model",
    )
    prefill_attention: Attention | None = option(
        None,
        "attention backend for prompts",
        one_of(*get_args(Attention)),
        "model",
        shown_default="that of --attention",
    )
    decode_attention: Attention | None = option(
        None,
        "attention backend for single tokens",
        one_of(*get_args(Attention)),
        "model",
        shown_default="that of --attention",
    )
    decode_splits: int | None = option(
        None,
        "parts into which triton splits each sequence for a single token; with a fixed number its attention does not "
        "depend on the batch",
        count(1, 32),
        "model",
        shown_default="by the number of sequences",
    )
    tensor_parallel_size: int = option(
        1,
        "number of ranks (processes, on GPUs with one each) among which each worker splits the model",
        count(1, 64),
        "model",
    )
    kv_cache_dtype: KvCacheDtype = option(
        "auto",
        "element type of the KV pool: auto is --dtype, fp8 halves it; must be the same on all workers",
        one_of("auto", "fp8"),
        "memory",
    )
    kv_cache_memory: int | None = option(
        None,
        "size of the KV pool of each worker, in bytes or such as 4GiB",
        SIZE,
        "memory",
        aliases=("--kv-cache-memory-bytes",),
        shown_default="a quarter of the free memory, divided among the workers, at most 4GiB each; on a GPU what "
        "--gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "part of a GPU's memory that the workers on it may take for weights, activations and KV",
        decimal(0.01, 1),
        "memory",
    )
    num_kv_blocks: int | None = option(
        None,
        "number of KV blocks of each worker; overrides --kv-cache-memory",
        count(1),
        "memory",
        aliases=("--num-gpu-blocks-override",),
        shown_default="as many as --kv-cache-memory holds",
    )
    block_size: int = option(16, "tokens per KV block; a multiple of 16", count(16, 1 << 16, 16), "memory")
    max_num_seqs: int = option(
        64, "maximum number of sequences that a worker decodes together", count(1, 1 << 16), "batch"
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens that a worker computes in one step; longer prompts are computed in chunks",
        count(1),
        "batch",
        shown_default="512 on a CPU; on a GPU 8192 for prefill, else 2048",
    )
    enforce_eager: bool = option(False, "run decode steps on GPUs without CUDA graphs", SWITCH, "batch")
    gpu_fusion: str = option(
        ",".join(GPU_PARTS),
        "parts of decoder layers to fuse on GPUs, or none: to measure what each saves",
        FUSION,
        "model",
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of prompt prefixes that were computed before", SWITCH, "batch"
    )
    kv_transport: KvTransport = option(
        "auto",
        "how KV gets from prefill to decode workers: shm (shared memory), zmq, cuda-ipc (between GPUs of one "
        "host), nccl (between GPUs, else zmq), nixl (decode reads it over UCX), or auto (shm or cuda-ipc on one "
        "host, else zmq)",
        one_of("auto", "shm", "zmq", "cuda-ipc", "nccl", "nixl"),
        "transfer",
    )
    threads: int | None = option(
        None,
        "number of compute threads per worker, or per rank with --tensor-parallel-size",
        count(1, 4096),
        "cores",
        shown_default="one per core of the worker",
    )
    cpus: str | None = option(
        None,
        "cores to use, such as 0-3,5; tandem up divides them among its processes",
        CPUS,
        "cores",
        shown_default="all",
    )

    @property
    def fused_parts(self) -> tuple[str, ...]:
        """The names in ``gpu_fusion``."""
        return () if self.gpu_fusion == "none" else tuple(self.gpu_fusion.split(","))

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The core numbers in ``cpus``; None if all cores may be used."""
        return parse_cpus(self.cpus) if self.cpus else None
