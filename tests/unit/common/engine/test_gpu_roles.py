"""Prefill and decode workers whose engines run as on a GPU: every token is right given everything before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.attention.registry import Wanted
from common.checkpoint.files import open_checkpoint
from common.core.ids import new_request_id, pack_tokens
from common.core.request import Request, SamplingParams
from common.engine.loading import load_engine
from tests.fakes.stand_in_gpu import share_pools, stand_in
from tests.reference import Reference, greedy
from tests.unit.workers import Bench

SAMPLINGS = [
    greedy(20),
    SamplingParams(20, 7, temperature=0.9, top_p=0.9, top_k=30, ignore_eos=True),
    SamplingParams(20, 8, temperature=1.3, frequency_penalty=0.7, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(20, 9, temperature=0.0, presence_penalty=1.5, logit_bias={7: 9.0}, min_tokens=20, ignore_eos=True),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    share_pools(monkeypatch)
    bench = Bench()
    yield bench
    bench.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("choices", "decode_blocks"), [(1, 64), (3, 64), (1, 10)])
def test_hand_offs_forks_and_preemptions(
    choices: int, decode_blocks: int, bench: Bench, checkpoint: Callable[[str], Path]
) -> None:
    """With few blocks, decode parks sequences and computes them again: their counts are uploaded anew."""
    path = checkpoint("llama")
    for role, blocks in (("prefill", 64), ("decode", decode_blocks)):
        engine = load_engine(
            open_checkpoint(str(path)), machine=stand_in(), attention=Wanted("torch"), num_kv_blocks=blocks,
            max_model_len=128, max_batched_tokens=24, max_num_seqs=16, batch_hint=4,
        )  # fmt: skip
        bench.add(role, engine, max_num_batched_tokens=24)  # type: ignore[arg-type]
    requests = []
    for index, sampling in enumerate(SAMPLINGS):
        prompt = [8 + (31 * at * at + index) % 500 for at in range(17 + 4 * index)]
        requests.append(Request(new_request_id(), pack_tokens(prompt), sampling, n=choices))
        bench.place(requests[-1], "prefill-0", "decode-1")
    bench.until(lambda: bench.done(*requests))
    assert not bench.failed
    planner = bench.workers["decode-1"].planner
    assert (planner.preemptions > 0) == (decode_blocks == 10)
    reference = Reference(path, 128)
    for request in requests:
        for choice in range(choices):
            stream = bench.streams[request.id, 1, choice]
            assert len(stream) == 20 or stream[-1] in request.sampling.ending_token_ids
            reference.check(request.prompt_tokens(), stream, request.sampling, choice=choice)
