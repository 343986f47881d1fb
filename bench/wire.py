"""How fast KV travels between two hosts' worth of processes, encrypted and not: ``python -m bench.wire``.

The real hand-off (:mod:`kvtransfer.sender` to :mod:`kvtransfer.receiver`, checksums, credit, acknowledgements) over TCP
on loopback, from a pool in this process to a pool in another one. The rate is that of a whole transfer, from its
announcement to its acceptance: what a network that is faster than the processes would see.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from common import heap, keys
from common.channel import Channels
from common.ids import BlockId, TransferId, WorkerName, new_incarnation, new_request_id
from common.kv.layout import KvLayout, LayerLayout
from common.kv.memory import KvMemory
from common.messages import Peer
from kvtransfer.receiver import Landed, Receiver
from kvtransfer.sender import FirstTokens, Sender, Shipped

LAYOUT = KvLayout((LayerLayout(8, 128, 128),) * 32, "bfloat16", 16)
"""A Llama of 8 billion parameters: 128 KiB per token."""
_FIRST = FirstTokens(b"\0\0\0\0", (0,), (-1,), (None,))
_PUMP_S = 0.005
_TOKEN = b"t" * 16


def _receive(pipe: Connection, key_file: Path, encrypt: bool, tokens: int) -> None:
    """The decode end: expects every transfer that it is told of, and says when it has ended."""
    heap.keep_freed()  # as workers do
    memory = KvMemory(LAYOUT, LAYOUT.blocks_for(tokens))
    memory.raw[:] = 0  # touched, so that no page is given out while the clock runs
    channels = Channels(keys.load(key_file, "decode"), encrypt_kv=encrypt)
    receiver = Receiver(channels, memory, "there", "tcp://127.0.0.1:*", transport="zmq")
    channels.register(pipe.fileno())
    pipe.send(receiver.address)
    try:
        while True:
            if pipe.fileno() in channels.poll(0.05):
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


def _peer(name: str, address: str) -> Peer:
    return Peer(WorkerName(name), new_incarnation(), address, "elsewhere", LAYOUT.dtype, _TOKEN)


def _table(memory: KvMemory) -> list[BlockId]:
    return [BlockId(index) for index in range(memory.blocks)]


def measure(encrypt: bool, tokens: int, repeats: int) -> list[float]:
    """Bytes per second of each of ``repeats`` transfers of ``tokens`` tokens, after one that does not count."""
    heap.keep_freed()
    with tempfile.TemporaryDirectory() as directory:
        key_file = Path(directory) / "cluster.key"
        keys.make(key_file)
        here, there = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_receive, args=(there, key_file, encrypt, tokens))
        child.start()
        there.close()
        memory = KvMemory(LAYOUT, LAYOUT.blocks_for(tokens))
        memory.raw[:] = 1
        channels = Channels(keys.load(key_file, "prefill"), encrypt_kv=encrypt)
        sender = Sender(channels, memory, new_incarnation(), "here", transport="zmq")
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


def _transfer(sender: Sender, channels: Channels, memory: KvMemory, peer: Peer, pipe: Connection, tokens: int) -> float:
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
        channels.poll(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a transfer, 128 KiB each")
    parser.add_argument("--repeats", type=int, default=10, help="transfers of each kind that count")
    options = parser.parse_args()
    print("| --kv-encryption | GB/s, median | slowest | fastest |\n|---|---|---|---|")
    for encryption in ("curve", "none"):
        rates = [rate / 1e9 for rate in measure(encryption == "curve", options.tokens, options.repeats)]
        print(f"| {encryption} | {statistics.median(rates):.2f} | {min(rates):.2f} | {max(rates):.2f} |")


if __name__ == "__main__":
    main()
