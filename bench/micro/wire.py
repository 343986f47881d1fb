"""``tandem bench wire``: how fast KV travels between two processes, by link.

Runs the real hand-off (:mod:`kvtransfer.sender` to :mod:`kvtransfer.receiver`, with checksums, credit and
acknowledgements) from a pool in this process to a pool in another one: over TCP on loopback, encrypted and not, and
through shared memory. The rate is that of a whole transfer, from its announcement to its acceptance. Over TCP it is
what a network that is faster than the processes would see.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import results
from bench.load.processes import die_with_parent
from common.config.bench.wire import BenchWireConfig
from common.core.ids import BlockId, TransferId, WorkerName, new_incarnation, new_request_id
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.base import PoolMemory
from common.kv.storage.host import KvMemory
from common.net import keys
from common.net.hosts import host_id
from common.net.messages import Peer
from common.net.sockets import Channels
from common.platform import malloc
from kvtransfer.receiver import Landed, Receiver
from kvtransfer.sender import FirstTokens, Sender, Shipped

LAYOUT = KvLayout((LayerLayout(8, 128, 128),) * 32, "bfloat16", 16)
"""KV layout of a Llama of 8 billion parameters: 128 KiB per token."""
LINKS = (("shared memory", "shm", False), ("ZeroMQ", "zmq", False), ("ZeroMQ, encrypted", "zmq", True))
"""Name of each link, its ``--kv-transport``, and whether it is encrypted."""
_FIRST = FirstTokens(b"\0\0\0\0", (0,), (-1,), (None,))
_PUMP_S = 0.005
_WAIT_S, _DEVICE_S = 0.05, 0.0005
"""Longest waits for a message, alone and while a GPU copies or hashes, whose end wakes no poll: as in workers."""
_TOKEN = b"t" * 16


def _receive(pipe: Connection, key_file: Path, transport: str, encrypt: bool, tokens: int, gpu: bool) -> None:
    """Run the decode end: expect every transfer that ``pipe`` announces, and acknowledge each announcement."""
    die_with_parent()
    malloc.keep_freed()  # as in workers
    memory = _pool(tokens, gpu)
    channels = Channels(keys.load(key_file, "decode"), encrypt_kv=encrypt)
    receiver = Receiver(channels, memory, host_id(), "tcp://127.0.0.1:*", transport=transport)
    channels.register(pipe.fileno())
    pipe.send(receiver.address)
    try:
        while True:
            if pipe.fileno() in channels.poll(_DEVICE_S if receiver.reading else _WAIT_S):
                transfer = pipe.recv()
                if transfer is None:
                    return
                receiver.expect(transfer, tokens, 0, _table(memory), _peer("prefill", ""), time.monotonic())
                pipe.send(None)
            for ended in receiver.pump(time.monotonic, _PUMP_S):
                assert isinstance(ended, Landed), ended
    finally:
        receiver.close()
        channels.close()
        memory.close()


def _pool(tokens: int, gpu: bool) -> Any:
    """Return a pool for ``tokens`` tokens of random KV, in host memory or on the first GPU. All its pages are touched,
    so that no page fault is measured."""
    blocks = LAYOUT.blocks_for(tokens)
    if not gpu:
        memory = KvMemory(LAYOUT, blocks)
        memory.raw[:] = np.random.default_rng(0).integers(0, 256, memory.raw.shape[1], np.uint8)
        return memory
    from common.kv.storage.cuda import CudaMemory
    from common.kv.storage.cuda_driver import torch_driver  # imports torch

    on_gpu = CudaMemory(LAYOUT, blocks, torch_driver(0))
    on_gpu.calls.tensor(on_gpu.slab, on_gpu.slab.size).random_()
    return on_gpu


def _peer(name: str, address: str) -> Peer:
    return Peer(WorkerName(name), new_incarnation(), address, host_id(), LAYOUT.dtype, _TOKEN)


def _table(memory: PoolMemory) -> list[BlockId]:
    return [BlockId(index) for index in range(memory.blocks)]


def measure(transport: str, tokens: int, repeats: int, *, encrypt: bool = False, gpu: bool = False) -> list[float]:
    """Return the bytes per second of each of ``repeats`` transfers of ``tokens`` tokens by ``transport``, after one
    transfer to warm up. With ``gpu`` both pools are in the memory of the first GPU."""
    malloc.keep_freed()
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "cluster.key"
        keys.make(key_file)
        here, there = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(
            target=_receive, args=(there, key_file, transport, encrypt, tokens, gpu)
        )
        child.start()
        there.close()
        memory = _pool(tokens, gpu)
        channels = Channels(keys.load(key_file, "prefill"), encrypt_kv=encrypt)
        sender = Sender(channels, memory, new_incarnation(), host_id(), transport=transport)
        try:
            peer = _peer("decode", here.recv())
            rates = [_transfer(sender, channels, memory, peer, here, tokens) for _ in range(repeats + 1)]
            here.send(None)
            child.join()
            return rates[1:]
        finally:
            child.kill()
            child.join()
            sender.close()
            channels.close()
            memory.close()


def _transfer(
    sender: Sender, channels: Channels, memory: PoolMemory, peer: Peer, pipe: Connection, tokens: int
) -> float:
    transfer, table = TransferId(new_request_id(), 1), _table(memory)
    pipe.send(transfer)
    pipe.recv()
    now = time.monotonic()
    sender.open(transfer, peer, tokens, table, now)
    sender.computed(transfer, table, tokens, len(LAYOUT.layers), now)
    sender.finish(transfer, _FIRST, now)
    while True:
        for ended in sender.pump(time.monotonic()):
            if not isinstance(ended, Shipped):
                raise RuntimeError(f"a transfer was lost: {ended.reason}")
            return ended.bytes / (time.monotonic() - now)
        channels.poll(_DEVICE_S if sender.waits_for_device else _WAIT_S)


def run(config: BenchWireConfig) -> int:
    """Print the rate of each link as it is measured."""
    print("| link | GB/s, median | slowest | fastest |\n|---|---|---|---|")
    found = {}
    for name, transport, encrypt in LINKS:
        rates = found[name] = measure(transport, config.tokens, config.repeats, encrypt=encrypt)
        shown = (statistics.median(rates), min(rates), max(rates))
        print(f"| {name} | {' | '.join(f'{rate / 1e9:.2f}' for rate in shown)} |", flush=True)
    if config.save:
        results.save(Path(config.save), {"tokens": config.tokens, "bytes_per_s": found})
    return 0
