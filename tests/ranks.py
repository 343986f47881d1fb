"""Tensor-parallel engines whose ranks are threads of the test's process, over the sockets and memory of real ones.

On GPUs, which are fake here, the ranks meet in a process group of gloo, and each has a slab of its own.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.registry import Wanted
from common.checkpoint.files import open_checkpoint
from common.core.ids import BlockId
from common.core.sequence import Batch, Segment
from common.engine import loading, parallel, rank_follower, rank_pools
from common.engine.loading import load_engine
from common.engine.pool import cuda_store, make_store
from common.engine.runner import ModelEngine, sequence_of
from common.kv.layout import KvLayout
from common.kv.storage.interface import KvStorage
from common.model import parallel_check
from common.model.process_group import connect
from common.platform.device import Device, probe_cpu
from common.platform.wiring import Wiring
from deploy.ranks.channel import FollowerChannel, LeaderChannel
from tests.fakes.device_calls import FakeDevice
from tests.fakes.stand_in_gpu import stand_in

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "batch_hint": 16}
"""Options of every engine, unless others are given."""
TOLERANCE = 1e-4
"""Largest difference of logits, in float32, between one process and several ranks."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "one KV head": ("llama-untied", {"num_key_value_heads": 1}),
    "mixtral": ("mixtral", {}),
    "gemma3": ("gemma3", {}),
    "phi3, which gathers": ("phi3", {}),
    "deepseek-v3, whose attention is whole": ("deepseek-v3", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
"""Models: kinds of :mod:`tests.models`, with changes of their configuration."""
SHARDS = {"one KV head": 1, "phi3, which gathers": 1, "deepseek-v3, whose attention is whole": 1}
"""Shards of the pool, if not two."""
_loading = threading.Lock()


def _in_turn(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``load`` run while no other thread loads a model: transformers patches torch meanwhile."""

    def alone(*arguments: Any) -> Any:
        with _loading:
            return load(*arguments)

    return alone


_load_share, _load_whole = _in_turn(parallel.load_share), _in_turn(parallel_check.load_whole)


def _close(engine: ModelEngine) -> None:
    if hasattr(engine.memory, "generations"):  # else the test has closed it
        engine.close()


@contextmanager
def fake_gpus() -> Iterator[list[FakeDevice]]:
    """Put the pools of stand-in GPUs into the memory of fake devices, one per pool; yield these."""
    devices: list[FakeDevice] = []

    def device(_: Any = None) -> FakeDevice:
        devices.append(FakeDevice())
        return devices[-1]

    def one(layout: KvLayout, blocks: int, machine: Device, where: torch.device, codec: Any) -> KvStorage:
        if machine.gpu is None:
            return make_store(layout, blocks, machine, where, codec)
        return cuda_store(layout, blocks, where, device(), codec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_pools, "device_calls", device)
        patch.setattr(loading, "make_store", one)
        yield devices
    assert not any(each.allocated for each in devices), "memory of a GPU was not freed"


@contextmanager
def split_engine(model: Path, ranks: int, *, gpu: bool = False, **options: Any) -> Iterator[ModelEngine]:
    """Yield an engine of ``model`` with ``ranks`` ranks, for the duration of the block; an ordinary one for 1.
    ``options`` are those of ``load_engine``. With ``gpu`` it computes on stand-ins, within :func:`fake_gpus`. A rank
    that fails makes the block fail with its error."""
    checkpoint, shared = open_checkpoint(str(model)), OPTIONS | options
    machine = stand_in() if gpu else probe_cpu()
    shared |= {"machine": machine, "attention": Wanted("torch")} if gpu else {}
    own = {"max_batched_tokens": 512, "max_num_seqs": 8, "num_kv_blocks": 256}
    own |= {name: shared.pop(name) for name in own if name in shared}
    if ranks == 1:
        engine = load_engine(checkpoint, **shared, **own)
        yield engine
        _close(engine)
        return
    wiring, errors = Wiring.create_store() if gpu else Wiring.create(ranks), list[Exception]()

    def follow(rank: int, end: socket.socket) -> None:
        try:
            with closing(connect(rank, ranks, wiring, machine)) as collective:
                rank_follower.follow(checkpoint, collective, FollowerChannel(end), **shared)
        except Exception as error:
            errors.append(error)
            release()
            end.close()

    def release() -> None:
        """Let no rank wait for another that has failed; what it then computes is not used."""
        for signal in wiring.signals.values():
            os.write(signal, (1 << 20).to_bytes(8, "little"))

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for module in (parallel, parallel_check, rank_follower):
            patch.setattr(module, "load_share", _load_share)
        patch.setattr(parallel_check, "load_whole", _load_whole)
        stack.callback(wiring.close)
        pairs = [socket.socketpair() for _ in range(1, ranks)]
        threads = [
            threading.Thread(target=follow, args=(rank, theirs), name=f"rank-{rank}")
            for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        for ends in pairs:
            for end in ends:
                stack.callback(end.close)
        try:
            collective = stack.enter_context(closing(connect(0, ranks, wiring, machine)))
            leader = parallel.Leader(collective, LeaderChannel([ours for ours, _ in pairs]))
            engine = load_engine(checkpoint, **shared, **own, leader=leader)
            yield engine
            _close(engine)
        except BaseException:
            first = errors[:1]  # of rank 0's errors, those that follow from another rank's
            release()
            if first:
                raise first[0] from None
            raise
        finally:
            for ours, _ in pairs:
                ours.shutdown(socket.SHUT_RDWR)


def logits_of(engine: ModelEngine) -> torch.Tensor:
    """Return the logits of a prompt in three chunks beside another, then of a decode step of both."""
    rng = random.Random(3)
    one, other = ([rng.randrange(8, 512) for _ in range(length)] for length in (75, 40))
    tables = [BlockId(block) for block in range(9, 0, -2)], [BlockId(block) for block in (2, 4, 6)]
    rows = []
    for first, second in (((0, 30), (0, 17)), ((30, 31), (17, 39)), ((31, 74), (39, 40))):
        chunks = ((one, first), (other, second))
        parts = (Segment(sequence_of(tokens[:end]), start, end - start) for tokens, (start, end) in chunks)
        rows.append(engine.logits(Batch(tuple(parts), tables)))
    rows.append(engine.logits(Batch((Segment(sequence_of(one), 74, 1),), tables[:1])))
    return torch.cat(rows)
