"""One worker process: loads an engine and runs its role until it is drained or stopped.

The composition root of a worker: the only place that combines an engine, a role and the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from common.checkpoint.files import Checkpoint, open_checkpoint
from common.config.worker import WorkerConfig
from common.core.errors import DeviceLost, StartError
from common.core.ids import WorkerName, new_incarnation
from common.kv.gpu_budget import GpuShare
from common.net.hosts import host_id
from common.net.keys import ClusterKeys
from common.net.messages import PROTOCOL, Hello
from common.net.sockets import Channels, is_local, is_ours, nearby
from common.platform import device, gpu, malloc, open_files, threads
from common.platform.core_lease import MAX_CORES, CoreLease, Lending
from common.platform.process_usage import process_usage
from common.worker import health
from common.worker.loop import Worker, WorkerSettings
from deploy import gpu_watch
from deploy.launcher import cores, status
from deploy.launcher.preflight import kv_bytes
from kvtransfer.links.choice import links_of, require_transport

if TYPE_CHECKING:
    from common.engine.runner import ModelEngine
    from deploy.ranks.group import RankGroup

log = logging.getLogger("tandem.worker")

CPU_BATCHED_TOKENS = 512
"""Default chunk size on a CPU, in tokens: large enough to keep its matrix units busy, small enough to keep the pauses
of streams on a colocated worker short."""
GPU_BATCHED_TOKENS = 2048
"""The same on a GPU, for workers that decode: a step with as many prompt tokens takes some tens of milliseconds."""
GPU_PREFILL_TOKENS = 8192
"""The same for prefill workers on a GPU, which have no streams to stall: as vLLM's server on GPUs of 70 GiB and more. A
chunk reads all weights and all KV before it once, so larger chunks read less; beyond this size the matrix products do
not get faster, while the activations need more memory."""
DEVICE_LOST = 71
"""Exit code of a worker whose GPU has failed: EX_OSERR of sysexits.h."""
AHEAD_BYTES = 256 << 20
"""Bytes of the KV pool beyond its peak use that are pre-faulted while idle. The rest takes memory on first use."""
DECODE_ROWS_HINT = 16
"""Typical batch size of a decode step, for which the weights are packed."""


def run(config: WorkerConfig, lending: Lending | None = None, keys: ClusterKeys | None = None) -> int:
    """Run one worker until it is drained; returns 0. Raises StartError if it cannot start.

    ``lending``: the core lease shared with the other workers of this machine. ``keys``: cluster keys created by the
    launcher; without them those of the configured file are used."""
    config.check_binds(keys)
    lent, others = None, list[int]()
    if lending is not None and config.cores:
        lent = CoreLease(lending.descriptor, config.cores)
        lent.take_back()  # an earlier process may have died while it lent its cores
        others = [core for core in lending.cores if core in range(MAX_CORES) and core not in config.cores]
    if config.out_of_reach:
        log.warning(
            "other machines cannot reach this worker at %s: set --host to an address that they can", config.host
        )
    malloc.keep_freed()
    open_files.raise_limit()
    checkpoint = open_checkpoint(config.model, config.revision, config.trust_remote_code)
    machines = _devices(config)
    _check_transport(config, machines)
    with _ranks(config, machines) as ranks, _leaving_if_lost(ranks):
        worker = build(config, checkpoint, keys or config.keys_of(config.role), machines, ranks)
        with (
            _borrowing(lent, others) as worker.steps.cores,
            health.answering(config.host, config.health_port, worker),
        ):
            gc.freeze()  # the model lives as long as the process: collections need not traverse it
            worker.run()
    if sys.modules.get("triton") is not None:
        gc.unfreeze()  # at exit its bindings complain of objects that nothing frees
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # already exiting: another SIGTERM must not change the exit code
    return 0


def build(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    keys: ClusterKeys | None,
    machines: Sequence[device.Device],
    ranks: RankGroup | None = None,
) -> Worker:
    """Load the engine of ``checkpoint`` on the first of ``machines``, warm it up, and return a worker of the configured
    role, ready to run. ``ranks``: the other ranks of a tensor-parallel worker, which on GPUs are on the other
    machines."""
    machine = machines[0]
    status.report("importing", text="torch and transformers")
    monitor = gpu_watch.start(machines)
    own = cores.choose(config.cores)
    device.pin(*_shares(config)[0])
    threads.compute()
    batched_tokens = _batched_tokens(config, machine)
    engine = _load(config, checkpoint, machine, batched_tokens, ranks)
    try:
        importlib.import_module("llguidance")  # which the first grammar needs, perhaps in the middle of other streams
    except ImportError as error:  # a source tree on a machine where nothing can be installed
        log.warning("outputs cannot be constrained to grammars: %s", error)
    status.report("warming up")
    step_times = engine.warm_up(partial(status.report, "warming up"))
    address, coordinator_host = f"tcp://{config.coordinator}", config.coordinator.rpartition(":")[0]
    if is_local(config.host) and is_local(address):
        # As for our own sockets: other machines must not reach the ports that UCX and NCCL open.
        for name in ("UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    settings = WorkerSettings(
        coordinator=nearby(address) if status.supervised() and is_ours(coordinator_host) else address,
        host_id=host_id(),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        kv_transport=config.kv_transport,
        data_address=f"tcp://{config.host}:*",
        drain_timeout_s=config.drain_timeout,
        ahead_bytes=AHEAD_BYTES,
        supervised=status.supervised(),
    )
    hello = _hello(config, settings, engine, machine.kind, config.encrypts_kv(keys))
    pinned = own is not None  # an unpinned worker's I/O threads find an idle core, which real-time threads do not
    channels = Channels(keys, encrypt_kv=config.encrypts_kv(keys), at_once=pinned)
    worker = _role(config.role)(engine, settings, hello, channels)
    worker.report.usage = process_usage
    if monitor is not None:
        worker.watch_gpus(monitor)
    for step_time in step_times:
        worker.step_times.took(*step_time)
    status.ready(
        kv_tokens=engine.memory.blocks * engine.layout.block_size,
        kv_bytes=engine.memory.blocks * engine.layout.block_bytes,
        max_model_len=engine.max_model_len,
        device=_shown(machines),
        dtype=engine.layout.dtype,
        notes=list(engine.notes),
    )
    return worker


def _devices(config: WorkerConfig) -> list[device.Device]:
    """Return the device to compute on, of a tensor-parallel worker on GPUs that of each rank. Raises StartError if they
    cannot be used."""
    machines, why = device.choose_ranks(config.device, config.tensor_parallel_size)
    if machines[0].gpu is not None:
        gpu.number_by_bus()
    else:
        device.hide_triton()
    if why and machines[0].gpu is None:
        log.warning("%s", why)
    return machines


def _check_transport(config: WorkerConfig, machines: Sequence[device.Device]) -> None:
    """Raise StartError if this worker cannot use the configured transport. Its links check that, too, but only after
    the model has been loaded."""
    kind: Literal["host", "cuda"] = "host" if machines[0].gpu is None else "cuda"
    require_transport(config.kv_transport, kind, config.tensor_parallel_size, sends=config.role == "prefill")


def _shown(machines: Sequence[device.Device]) -> str:
    """Return the devices as the start line shows them."""
    if len(machines) == 1:
        return machines[0].shown
    numbers = ", ".join(str(each.gpu.number) for each in machines if each.gpu is not None)
    return f"GPUs {numbers} ({machines[0].name})"


def _batched_tokens(config: WorkerConfig, machine: device.Device) -> int:
    """Return the most tokens of a step."""
    default = CPU_BATCHED_TOKENS
    if machine.gpu is not None:
        default = GPU_PREFILL_TOKENS if config.role == "prefill" else GPU_BATCHED_TOKENS
    return max(config.max_num_batched_tokens or default, config.max_num_seqs)


def _batch_hint(config: WorkerConfig, machine: device.Device) -> int:
    """Return the typical number of rows of a step, for which the weights are packed."""
    return _batched_tokens(config, machine) if config.role == "prefill" else DECODE_ROWS_HINT


def _shares(config: WorkerConfig) -> list[cores.CoreShare]:
    """Return the cores and threads of each rank."""
    return cores.among_ranks(
        cores.choose(config.cores), config.tensor_parallel_size, config.threads, config.workers_on_host
    )


@contextlib.contextmanager
def _ranks(config: WorkerConfig, machines: Sequence[device.Device]) -> Iterator[RankGroup | None]:
    """Run the other ranks of a tensor-parallel worker within the block; None without tensor parallelism."""
    if config.tensor_parallel_size == 1:
        yield None
        return
    from deploy.ranks.group import RankGroup

    gpus = [each.address for each in machines if each.gpu is not None]
    if gpus:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # the ranks are on one machine, and so is all that uses NCCL here
        # else a rank would wait for the others in the middle of a capture, which may fail on one of them
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    with RankGroup(config, _shares(config), _batch_hint(config, machines[0]), _end, gpus) as ranks:
        yield ranks


def _end(error: StartError) -> NoReturn:
    """End this process at once, since another rank has failed, perhaps while the main thread waits for it."""
    log.error("%s: %s; %s", error.what, error.why, error.todo)
    status.failed(error)
    logging.shutdown()
    os._exit(1)


def _load(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    machine: device.Device,
    batched_tokens: int,
    ranks: RankGroup | None,
) -> ModelEngine:
    """Load the engine of ``checkpoint`` on ``machine``. Imports torch, after all cheaper checks."""
    from common.attention.registry import Wanted
    from common.engine.loading import load_engine

    leader = None
    if ranks is not None:
        from common.engine.parallel import Leader

        leader = Leader(ranks.connect(machine), ranks.channel)
    return load_engine(
        checkpoint,
        machine=machine,
        dtype=config.dtype,
        quantization=config.quantization,
        products=config.products,
        weight_cache=config.weight_cache,
        enforce_eager=config.enforce_eager,
        decodes=config.role != "prefill",
        gpu_fusion=config.fused_parts,
        attention=Wanted(config.attention, config.prefill_attention, config.decode_attention, config.decode_splits),
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=config.max_model_len,
        kv_bytes=kv_bytes(config, config.workers_on_host) if machine.gpu is None else config.kv_cache_memory,
        gpu_share=GpuShare(config.gpu_memory_utilization, config.workers_on_gpu),
        num_kv_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        max_batched_tokens=batched_tokens,
        max_num_seqs=config.max_num_seqs,
        batch_hint=_batch_hint(config, machine),
        progress=_loading,
        captured=partial(status.report, "capturing CUDA graphs"),
        trust_remote_code=config.trust_remote_code,
        leader=leader,
    )


def _hello(
    config: WorkerConfig, settings: WorkerSettings, engine: ModelEngine, device_kind: str, encrypts_kv: bool
) -> Hello:
    """Describe this worker to the coordinator."""
    return Hello(
        protocol=PROTOCOL,
        name=WorkerName(config.name or f"{config.role}-{platform.node()}-{os.getpid()}"),
        incarnation=new_incarnation(),
        role=config.role,
        model=config.served_name,
        fingerprint=engine.fingerprint,
        layout=engine.layout.fingerprint,
        pid=os.getpid(),
        host=socket.gethostname(),
        host_id=settings.host_id,
        data_address="",
        links=links_of(config.kv_transport, engine.memory.kind),
        kv_blocks=engine.memory.blocks,
        block_size=engine.layout.block_size,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        device=device_kind,
        dtype=engine.layout.dtype,
        kv_encryption="curve" if encrypts_kv else "none",
    )


@contextlib.contextmanager
def _borrowing(lent: CoreLease | None, others: Sequence[int]) -> Iterator[CoreLease | None]:
    """Let this process borrow the cores ``others`` within the block. Yields ``lent``, the lease of its own cores, or
    None if there is none or the CPU kernels are not available."""
    from common.kernels import cpu

    library = cpu.library()
    if lent is None or library is None:
        yield None
        return
    lent.borrowed_s = library.borrowed_s
    with threads.borrowing():
        library.borrow(lent.address, (ctypes.c_int32 * len(others))(*others), len(others))
    try:
        yield lent
    finally:
        library.give_back()
        lent.close()


@contextlib.contextmanager
def _leaving_if_lost(ranks: RankGroup | None) -> Iterator[None]:
    """End the process if the block raises because its GPU has failed: before the exchange with the other ``ranks`` is
    closed, which could wait for that GPU. They end with this process."""
    try:
        yield
    except (DeviceLost, RuntimeError) as error:
        if (lost := _device_lost(error)) is None:
            raise
        if ranks is not None:
            ranks.report_failure()  # NCCL's error here may be what another rank's death leads to
        _leave(lost)


def _device_lost(error: DeviceLost | RuntimeError) -> DeviceLost | None:
    """Return what ``error`` says about a GPU that has failed for good; None if it is another error."""
    if isinstance(error, DeviceLost):
        return error
    from common.engine import faults  # imports torch, which is there by now if a GPU can have failed

    try:
        faults.raise_if_lost(error)
    except DeviceLost as lost:
        return lost
    return None


def _leave(lost: DeviceLost) -> NoReturn:
    """End the process because its GPU has failed, without the clean-up of Python and CUDA, which can abort or hang."""
    log.critical("the GPU has failed: %s; this worker ends, and its requests continue on others", lost)
    status.failed(
        StartError("the GPU has failed", str(lost), "see nvidia-smi and the kernel's log if it happens again")
    )
    logging.shutdown()
    sys.stdout.flush()
    os._exit(DEVICE_LOST)


def _loading(done: int, total: int, text: str) -> None:
    """Report the progress of reading weight files, from bytes in percent. After the last one, report the stage in which
    the layers are built."""
    status.report("loading", 100 * done // max(1, total), 100, text)
    if done == total:
        status.report("preparing", text="the model's layers")


def _role(role: str) -> type[Worker]:
    """Return the worker class of ``role``. Imports the package of that role only."""
    if role == "prefill":
        from prefill.role import PrefillWorker

        return PrefillWorker
    from decode.role import DecodeWorker

    return DecodeWorker
