"""Checks before anything heavy is imported or started. A failed check raises StartError."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from errno import EADDRNOTAVAIL
from typing import NamedTuple

from common.checkpoint.cache_root import cache_root
from common.checkpoint.files import Checkpoint, open_checkpoint
from common.checkpoint.formats import refuse_use
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.core.errors import NOT_OURS, StartError, reason
from common.kv.budget import fit, human_bytes
from common.kv.gpu_budget import GpuShare, most_for_kv
from common.kv.layout import KvDtype, KvLayout
from common.platform import device, memory
from deploy.launcher import cores
from deploy.launcher.gpus import Place, address

PROCESS_BYTES = 256 << 20
"""Memory of a worker, or of one of its ranks, without model and KV: the interpreter, torch, transformers."""


class Checked(NamedTuple):
    """A configuration that can be started. ``chats``: whether the model has a chat template."""

    config: UpConfig
    chats: bool


@contextlib.contextmanager
def check_up(config: UpConfig, places: Sequence[Place], say: Callable[[str], object] = str) -> Iterator[Checked]:
    """Check the start of workers at ``places`` and yield ``config`` with free ports in place of port 0. The ports are
    reserved within the block. Calls ``say`` with what is to be known about the checkpoint. Raises StartError."""
    config.check_binds()
    cache_root()  # if it is a temporary one, it is this process's, and the workers share it
    config.check_telemetry()
    checkpoint = open_checkpoint(config.model, config.revision, config.trust_remote_code)
    refuse_use(checkpoint.name, checkpoint.format, config.quantization, _ranks(config))
    check_memory(checkpoint, config, len(places), places)
    chats = check_text(checkpoint, config)
    for remark in checkpoint.remarks():
        say(remark)
    wanted = {"--port": (config.host, config.port), "--control-port": (config.control_host, config.control_port)}
    claimed = dict[str, int]()
    with contextlib.ExitStack() as stack:
        for flag, (host, port) in sorted(
            wanted.items(), key=lambda item: item[1][1] == 0
        ):  # fixed ports first, so that a free port cannot collide with one
            claimed[flag] = stack.enter_context(claim_port(host, port, flag)).getsockname()[1]
        yield Checked(replace(config, port=claimed["--port"], control_port=claimed["--control-port"]), chats)


def check_worker(checkpoint: Checkpoint, config: WorkerConfig) -> None:
    """Check the start of one worker without a launcher. Raises StartError."""
    refuse_use(checkpoint.name, checkpoint.format, config.quantization, config.tensor_parallel_size)
    cores.choose(config.cores)
    check_name(config.coordinator)
    machines, _ = device.choose_ranks(config.device, config.tensor_parallel_size)
    gpus = tuple(each.gpu for each in machines if each.gpu is not None)
    place = Place(address(gpus[0]), gpus, config.workers_on_gpu) if gpus else Place()
    check_memory(checkpoint, config, config.workers_on_host, [place] if gpus else [place] * config.workers_on_host)
    if config.role == "decode":
        claim_port(config.host, 0, "--host").close()


def check_name(coordinator: str) -> None:
    """Raise StartError if the host in the address of the coordinator is a name that cannot be resolved. Whether the
    coordinator runs is not checked: it may start later than its workers."""
    host = coordinator.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or reason(error)
        raise StartError(
            f"cannot find the coordinator {coordinator}",
            f"the name {host} cannot be resolved: {why}",
            "correct --coordinator, or give an IP address",
        ) from error


def check_memory(
    checkpoint: Checkpoint, config: UpConfig | WorkerConfig, workers: int, coming: Sequence[Place]
) -> None:
    """Check the memory of the workers that are to be started, at the places ``coming``; ``workers`` is the number of
    workers on this machine once they run.

    Raises StartError if a KV pool cannot hold one full-length request, by the same rule as the engine, or if this
    machine has too little free memory for the new workers and their full KV pools; the kernel would kill a process once
    the pools fill. A model whose configuration does not give the shape of its KV is not checked here but by the engine.
    """
    if (layers := checkpoint.kv_layers()) is None:
        return
    for place in dict.fromkeys(coming):
        machine = device.probe_cpu() if place.gpu is None else device.probe_gpu(place.gpu)
        dtype, _ = device.choose_dtype(config.dtype, checkpoint.dtype, machine)
        layout = KvLayout(layers, "fp8" if config.kv_cache_dtype == "fp8" else dtype, config.block_size)
        plan = fit(
            layout,
            checkpoint.max_position,
            config.max_model_len,
            kv_bytes=_most_for_kv(checkpoint, config, workers, place, dtype),
            num_kv_blocks=config.num_kv_blocks,
            limit=checkpoint.position_limit,
            scaling=checkpoint.scaling,
        )
        if place.gpu is None:
            weights = checkpoint.bytes_in(dtype, config.quantization)
            _check_host(weights, plan.blocks * layout.block_bytes, coming.count(place), _ranks(config))


def _most_for_kv(
    checkpoint: Checkpoint, config: UpConfig | WorkerConfig, workers: int, place: Place, dtype: KvDtype
) -> int:
    """Return the bytes of KV that a worker at ``place`` can have. Raises StartError if its weights do not fit."""
    if place.gpu is None:
        return kv_bytes(config, workers)
    ranks = len(place.gpus)
    weights = checkpoint.bytes_in(dtype) // ranks
    share = GpuShare(config.gpu_memory_utilization, place.sharing)
    most = ranks * min(most_for_kv(gpu.total_bytes, gpu.free_bytes, weights, share) for gpu in place.gpus)
    return most if config.kv_cache_memory is None else config.kv_cache_memory


def _check_host(weights: int, wanted: int, coming: int, ranks: int) -> None:
    """Check this machine's memory for ``coming`` workers on the CPU with ``ranks`` ranks, and ``weights`` and
    ``wanted`` bytes of KV each."""
    free = memory.free_memory()
    process = weights + PROCESS_BYTES * ranks
    if process * coming > free:
        raise StartError(
            f"cannot start {coming} workers",
            f"each takes {human_bytes(process)} beside its KV, and this machine has {human_bytes(free)} of memory free",
            f"start {free // process} or fewer",
        )
    if wanted * coming > free:
        raise StartError(
            f"cannot allocate {human_bytes(wanted)} of KV for each of {coming} workers",
            f"this machine has {human_bytes(free)} of memory free",
            f"use --kv-cache-memory {free // 2 // coming >> 20}MiB or less",
        )


def _ranks(config: UpConfig | WorkerConfig) -> int:
    """Return the most ranks of any worker."""
    if isinstance(config, WorkerConfig):
        return config.tensor_parallel_size
    prefill, decode, colocated = config.pools(len(cores.usable_cores()))
    counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
    return max((config.ranks_of(role) for role, count in counts.items() if count), default=1)  # type: ignore[arg-type]


def check_text(checkpoint: Checkpoint, config: UpConfig) -> bool:
    """Load the tokenizer and the chat template as the coordinator will. Return whether there is a template. Raises
    StartError if one cannot be used."""
    from coordinator.text.tokenizer import (
        TextModel,  # imports the tokenizers library: after all cheaper checks
    )

    text = TextModel(
        checkpoint.path,
        vocab_size=checkpoint.vocab_size,
        chat_template=config.chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return text.templates is not None


def kv_bytes(config: UpConfig | WorkerConfig, workers: int) -> int:
    """Return the bytes of the KV pool of each of ``workers`` workers: as configured, else a share of the free
    memory."""
    return memory.kv_budget(workers) if config.kv_cache_memory is None else config.kv_cache_memory


def claim_port(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket bound to ``port``, or to a free port for 0. Raises StartError if it cannot be bound.

    The socket does not listen and sets SO_REUSEADDR, so a child process can listen on the port meanwhile. While it is
    open, Linux does not assign the port to a process that binds to port 0."""
    claimed = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        claimed = socket.socket(family, socket.SOCK_STREAM)
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
    except OSError as error:
        if claimed is not None:
            claimed.close()
        raise StartError(
            f"cannot listen on {host}:{port}",
            reason(error),
            NOT_OURS if error.errno == EADDRNOTAVAIL else f"stop what uses that port, or choose another with {flag}",
        ) from error
    return claimed
