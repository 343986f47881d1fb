"""Cores that workers lend each other: which worker may use which core, and that help does not change results."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from common.attention.interface import Params
from common.attention.native import NativeAttention
from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.core.sequence import Sequence
from common.kernels import cpu
from common.kv.layout import KvLayout, LayerLayout
from common.kv.storage.host import KvMemory
from common.kv.storage.tensors import KvStore
from common.model.compact import CompactLinear
from common.model.linears import NativeLinear
from common.net.sockets import Channels
from common.platform.core_lease import MAX_CORES, CoreLease
from common.quantization.weight import quantize
from common.worker.loop import WorkerSettings
from decode.role import DecodeWorker
from tests.fakes.oracle import OracleEngine, hello_of
from tests.pace import scaled
from tests.threads import running_threads, until_ended
from tests.unit.common.attention.test_backends import random_spans

library = cpu.library()
VARIANTS = library.variants if library else ()
CORE = max(os.sched_getaffinity(0))


@pytest.fixture
def lent() -> Iterator[CoreLease]:
    cores = CoreLease.create()
    yield cores
    cores.close()


def of(cores: CoreLease, *own: int) -> CoreLease:
    """Return the lease of another process on the same descriptor."""
    return CoreLease(os.dup(cores.descriptor), own)


# -- which worker may use which core -----------------------------------------------------------------------------------


def test_a_worker_that_rests_lends_its_cores_and_takes_them_back(lent: CoreLease) -> None:
    lent.settle([(0, 1), (2,)])
    mine, others = of(lent, 0, 1), of(lent, 2)
    mine.lend()
    assert others.lent() == [0, 1]
    others.lend()
    mine.take_back()
    assert mine.lent() == lent.lent() == [2]
    mine.close()
    others.close()


def test_a_core_that_several_workers_share_is_not_lent(lent: CoreLease) -> None:
    lent.settle([(0,), (1,)])
    one, two = of(lent, 0), of(lent, 1)
    one.lend()
    two.lend()
    lent.settle([(0,), (1,), (1,)])  # a third worker has joined
    assert lent.lent() == [0]
    two.lend()
    assert lent.lent() == [0]
    lent.settle([(1,), (1,)])  # the first worker has left
    one.lend()
    assert lent.lent() == []
    lent.settle([(1,)])
    two.lend()
    assert lent.lent() == [1]
    one.close()
    two.close()


def test_cores_beyond_max_cores_are_not_lent(lent: CoreLease) -> None:
    lent.settle([(MAX_CORES - 1, MAX_CORES, 70_000)])
    worker = of(lent, MAX_CORES - 1, MAX_CORES, 70_000)
    worker.lend()
    assert lent.lent() == [MAX_CORES - 1]
    worker.close()


def test_the_loop_of_a_worker_lends_while_it_sleeps(lent: CoreLease, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OracleEngine(blocks=8)
    worker = DecodeWorker(engine, WorkerSettings("tcp://127.0.0.1:1", "h", 4, 64), hello_of(engine))
    lent.settle([(3,)])
    worker.steps.cores = of(lent, 3)
    worker.steps.cores.borrowed_s = lambda: 2.5
    seen: list[tuple[bool, list[int]]] = []
    poll = Channels.poll

    def watched(channels: Channels, seconds: float) -> object:
        seen.append((seconds > 0, lent.lent()))
        if len(seen) == 3:
            worker.drain(0)
        return poll(channels, 0)

    monkeypatch.setattr(Channels, "poll", watched)
    monkeypatch.setattr(worker, "more_to_move", lambda: len(seen) == 1)  # once, there is more to do
    worker.run()
    assert seen == [(True, [3]), (False, []), (True, [3])]
    assert lent.lent() == [], "it has it back when it leaves"
    assert worker.report.counters["borrowed_core_seconds"] == 2.5
    worker.steps.cores.close()
    engine.memory.close()


def test_expected_step_time_excludes_borrowed_cores(lent: CoreLease) -> None:
    """With 2 cores of its own and 0.6 s of borrowed time, the step would have taken 0.3 s longer without help; the next
    step is expected to take that long."""
    engine = OracleEngine(blocks=8)
    worker = DecodeWorker(engine, WorkerSettings("tcp://127.0.0.1:1", "h", 4, 64), hello_of(engine))
    worker.steps.cores = of(lent, 2, 3)
    borrowed = iter((1.0, 1.6))
    worker.steps.cores.borrowed_s = lambda: next(borrowed)
    request = Request(new_request_id(), pack_tokens(range(20)), SamplingParams(4, 0))
    worker.planner.add(Sequence(request, 0))
    batch = worker.planner.plan()
    assert batch is not None
    worker.sampled = lambda batch, samples, now: None  # type: ignore[method-assign]
    worker.steps.run(batch)
    assert 0.3 <= worker.step_times.last < 0.4
    worker.steps.cores.borrowed_s = float
    worker.planner.finish(batch.segments[0].sequence)
    worker.close()
    worker.steps.cores.close()
    engine.memory.close()


# -- results with and without help -------------------------------------------------------------------------------------


needs_kernels = pytest.mark.skipif(library is None, reason="no kernels in C")


@pytest.fixture
def helped(lent: CoreLease) -> Iterator[CoreLease]:
    """Make core ``CORE`` lendable, with a helper that waits for it."""
    assert library is not None
    lent.settle([(CORE,)])
    lent.own = [CORE]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert library.borrow(lent.address, (ctypes.c_int32 * 1)(CORE), 1) == 1
    yield lent
    library.give_back()
    torch.set_num_threads(before)


def until_helped(work: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    """Repeat ``work`` until a helper has done a part of it; every result must equal ``expected``."""
    assert library is not None
    before, deadline = library.borrowed_s(), time.monotonic() + scaled(30.0)
    while library.borrowed_s() == before:
        assert time.monotonic() < deadline, "no core helps"
        assert torch.equal(work(), expected)


@needs_kernels
@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", ["whole", "bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "threads", "inputs"), [(300, 1, 96), (300, 2, 96), (17, 1, 96), (390, 1, 2112)])
def test_a_linear_layer_is_the_same_with_help(
    variant: str, dtype: torch.dtype, kept: str, rows: int, threads: int, inputs: int, helped: CoreLease
) -> None:
    """Also with long rows, which are computed in chunks."""
    assert library is not None
    library.use(variant)
    try:
        torch.manual_seed(1)
        torch.set_num_threads(threads)
        weight = torch.randn(1030, inputs)
        weight = weight.bfloat16() if kept == "bfloat16" else weight
        offset = torch.randn(1030).to(dtype)
        linear: NativeLinear | CompactLinear = NativeLinear(weight.to(dtype), offset)
        if kept == "int8":
            linear = CompactLinear(quantize(weight, 8, 64), offset, dtype, exact=False)
        x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, 1030).to(dtype)

        def add() -> torch.Tensor:
            total = residual.clone()
            linear.add_to(total, x)  # in place, so that a part computed twice would show
            return total

        expected = add()
        helped.lend()
        until_helped(add, expected)
    finally:
        library.use(VARIANTS[0])


@needs_kernels
@pytest.mark.parametrize(
    "shapes",
    [[(100, 1), (0, 150), (60, 200), (16, 33)], [(20 + index, 1) for index in range(16)]],
    ids=["a prompt", "streams"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_the_same_with_help(dtype: str, shapes: list[tuple[int, int]], helped: CoreLease) -> None:
    rng = random.Random(5)
    torch.manual_seed(5)
    layer = LayerLayout(2, 32, 32)
    store = KvStore(KvMemory(KvLayout((layer,), dtype, 16), 64))  # type: ignore[arg-type]
    for part in (store.k(0), store.v(0)):
        part.copy_(torch.randn(part.shape))
    spans = random_spans(rng, 64, shapes)
    query = torch.randn(sum(span.length for span in spans), 6, 32).to(store.dtype)
    backend = NativeAttention(store)

    def attend() -> torch.Tensor:
        return backend.attend(backend.plan(spans), 0, query, Params(scaling=0.2)).clone()

    expected = attend()
    helped.lend()
    until_helped(attend, expected)
    store.close()


@needs_kernels
def test_cores_are_borrowed_only_for_large_products(helped: CoreLease) -> None:
    assert library is not None
    linear = NativeLinear(torch.randn(512, 256), None)
    many, few = torch.randn(256, 256), torch.randn(15, 256)
    before = library.borrowed_s()
    for _ in range(50):
        linear.rows(many)
    helped.lend()
    for _ in range(50):
        linear.rows(few)
    assert library.borrowed_s() == before
    until_helped(lambda: linear.rows(many), linear.rows(many))


@needs_kernels
def test_a_core_is_borrowed_by_one_at_a_time(helped: CoreLease) -> None:
    """A core that another process has borrowed, and may have died with, is free again when its owner lends it anew."""
    assert library is not None
    linear, x = NativeLinear(torch.randn(512, 256), None), torch.randn(256, 256)
    expected = linear.rows(x)
    helped.lend()
    ctypes.c_uint8.from_address(helped.address + CORE).value = 2
    before = library.borrowed_s()
    for _ in range(50):
        linear.rows(x)
    assert library.borrowed_s() == before and helped.lent() == []
    helped.lend()
    until_helped(lambda: linear.rows(x), expected)
    assert helped.lent() == [CORE], "it was given back"


@needs_kernels
def test_cores_may_come_and_go_at_any_moment(helped: CoreLease) -> None:
    torch.manual_seed(2)
    assert library is not None
    linear = NativeLinear(torch.randn(640, 64), None)
    x = torch.randn(130, 64)
    expected, ended, rng = linear.rows(x), threading.Event(), random.Random(3)

    def come_and_go() -> None:
        while not ended.wait(rng.choice((0.0, 0.0002, 0.002))):
            helped.lend()
            if rng.random() < 0.5:
                helped.take_back()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        before = library.borrowed_s()
        for _ in range(1500):
            assert torch.equal(linear.rows(x), expected)
        until_helped(lambda: linear.rows(x), expected)
        assert library.borrowed_s() > before
    finally:
        ended.set()
        thread.join()


@needs_kernels
def test_two_threads_that_compute_do_not_disturb_each_other(helped: CoreLease) -> None:
    helped.lend()
    linears = [NativeLinear(torch.randn(400, 64), None) for _ in range(2)]
    x, wrong = torch.randn(200, 64), list[int]()
    expected = [linear.rows(x) for linear in linears]

    def compute(which: int) -> None:
        wrong.extend(which for _ in range(300) if not torch.equal(linears[which].rows(x), expected[which]))

    threads = [threading.Thread(target=compute, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernels
def test_helpers_end_when_they_are_given_back_and_there_is_one_for_each_core_that_is_there(lent: CoreLease) -> None:
    assert library is not None
    before = running_threads()
    cores = (ctypes.c_int32 * 3)(CORE, 1000, CORE)
    assert library.borrow(lent.address, cores, 3) == 2
    helpers = running_threads() - before
    assert len(helpers) == 2
    for each in helpers:
        assert os.sched_getaffinity(each) == {CORE}
    assert library.borrow(lent.address, cores, 1) == 1, "those from before have ended"
    library.give_back()
    until_ended(running_threads() - before)
