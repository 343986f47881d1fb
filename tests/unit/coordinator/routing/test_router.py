"""Placement of requests, the ledger of promised blocks, and the limits of the queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.core.ids import new_request_id
from common.kv.layout import KvDtype
from common.kv.prefix import chain_root, extend_chain
from common.net.messages import Cached
from coordinator.cluster.registry import Registry, WorkerHandle
from coordinator.routing.breakers import FAILURES, FIRST_COOL_DOWN_S, Pair, SingleWorker
from coordinator.routing.router import (
    HELD_STEPS,
    HORIZON_TOKENS,
    LOCAL_QUEUE_TOKENS,
    OVERFLOW_STEPS,
    Demand,
    NoWorkers,
    Placement,
    Promise,
    Router,
    Wait,
)
from tests.unit.coordinator.cluster.test_registry import join


def cluster(
    prefills: int = 1, decodes: int = 1, colocated: int = 0, **options: Any
) -> tuple[Router, list[WorkerHandle]]:
    registry = Registry("f")
    workers = [join(registry, f"p{n}", f"p{n}", "prefill") for n in range(prefills)]
    workers += [join(registry, f"d{n}", f"d{n}", "decode") for n in range(decodes)]
    workers += [join(registry, f"c{n}", f"c{n}", "colocated") for n in range(colocated)]
    return Router(registry, **options), workers


def place(router: Router, demand: Demand) -> tuple[Placement, Promise]:
    placement = router.place(demand)
    assert isinstance(placement, Placement), placement
    return placement, router.promise(demand, placement)


def chains(tokens: int, *dtypes: KvDtype) -> dict[KvDtype, list[bytes]]:
    """Return the prefix keys of the tokens 0 to ``tokens`` - 1 for each KV type (default: float32)."""
    return {
        dtype: extend_chain(chain_root("", "f", dtype), [], list(range(tokens))) for dtype in dtypes or ("float32",)
    }


def announce(
    router: Router, worker: WorkerHandle, keys: dict[KvDtype, list[bytes]], dtype: KvDtype = "float32"
) -> None:
    router.registry.cached(worker, Cached(b"".join(keys[dtype]), b""))


def test_a_request_goes_to_a_pair() -> None:
    router, (prefill, decode) = cluster()
    placement = router.place(Demand(100, 10, 1))
    assert isinstance(placement, Placement)
    assert (placement.path, placement.prefill, placement.decode) == ("disagg", prefill, decode)


@pytest.mark.parametrize("output", [0, 1])
def test_what_ends_with_its_prompt_goes_to_a_prefill_worker_alone(output: int) -> None:
    router, (prefill, decode) = cluster()
    router.account(decode).blocks, router.account(decode).sequences = decode.hello.kv_blocks, 1
    assert isinstance(router.place(Demand(100, 2, 1)), Wait), "decode is full"
    for choices in (1, 4):
        demand = Demand(100, output, choices)
        placement, promise = place(router, demand)
        assert (placement.path, placement.prefill, placement.decode) == ("prefill", None, prefill)
        router.release(promise)
    assert router.account(prefill).blocks == router.account(prefill).prefill_tokens == 0


def test_a_single_token_is_computed_on_decode_where_that_is_better() -> None:
    router, (prefill, decode) = cluster()
    router.account(prefill).prefill_tokens = LOCAL_QUEUE_TOKENS
    placement = router.place(Demand(8, 1, 1))
    assert isinstance(placement, Placement) and (placement.path, placement.decode) == ("local", decode)
    router.account(prefill).prefill_tokens = OVERFLOW_STEPS * prefill.hello.max_num_batched_tokens
    placement = router.place(Demand(100, 1, 1))
    assert isinstance(placement, Placement) and (placement.path, placement.decode) == ("local", decode)
    router.account(prefill).prefill_tokens = HELD_STEPS * prefill.hello.max_num_batched_tokens
    router.account(decode).prefill_tokens = 1  # it computes another prompt
    assert isinstance(router.place(Demand(100, 1, 1)), Wait)
    router.local_prefill, router.account(prefill).prefill_tokens = "always", 0
    placement = router.place(Demand(100, 1, 1))
    assert isinstance(placement, Placement) and placement.path == "local"


def test_choices_that_have_diverged_stay_together_for_their_last_token() -> None:
    router, (_, decode) = cluster()
    placement = router.place(Demand(100, 1, 2, diverged=True))
    assert isinstance(placement, Placement) and (placement.path, placement.decode) == ("local", decode)


def test_prefill_goes_where_the_fewest_tokens_stand() -> None:
    router, (first, second, _) = cluster(prefills=2)
    placement, promise = place(router, Demand(500, 10, 1))
    assert placement.prefill is first
    assert place(router, Demand(100, 10, 1))[0].prefill is second
    assert place(router, Demand(100, 10, 1))[0].prefill is second
    router.prefilled(promise)
    assert place(router, Demand(100, 10, 1))[0].prefill is first


def test_a_cached_prefix_is_worth_a_queue() -> None:
    router, (first, second, _) = cluster(prefills=2)
    keys = chains(400)
    announce(router, second, keys)
    place(router, Demand(50, 10, 1))  # queued on the first worker
    router.account(second).prefill_tokens += 200
    placement = router.place(Demand(400, 10, 1, keys))
    assert isinstance(placement, Placement) and placement.prefill is second
    router.account(second).prefill_tokens += 400
    placement = router.place(Demand(400, 10, 1, keys))
    assert isinstance(placement, Placement) and placement.prefill is first


def test_decode_goes_to_the_least_loaded() -> None:
    router, (_, first, second) = cluster(decodes=2)
    assert place(router, Demand(160, 160, 1))[0].decode is first
    assert place(router, Demand(160, 160, 1))[0].decode is second
    assert place(router, Demand(16, 16, 1))[0].decode is first
    assert place(router, Demand(16, 16, 1))[0].decode is second


def test_a_larger_pool_does_not_draw_everything() -> None:
    registry = Registry("f")
    join(registry, "p", "p", "prefill")
    small = join(registry, "small", "small", "decode", kv_blocks=38_000)
    join(registry, "large", "large", "decode", kv_blocks=60_000)
    router = Router(registry)
    placed = [place(router, Demand(100, 400, 1))[0].decode for _ in range(8)]
    assert sum(worker is small for worker in placed) == 4


def test_router_places_in_proportion_to_pool_size() -> None:
    registry = Registry("f")
    join(registry, "p", "p", "prefill")
    small = join(registry, "small", "small", "decode", kv_blocks=40, max_num_seqs=100)
    join(registry, "large", "large", "decode", kv_blocks=160, max_num_seqs=100)
    router = Router(registry)
    placed = [place(router, Demand(32, 32, 1))[0].decode for _ in range(20)]
    assert sum(worker is small for worker in placed) == 4


def test_decode_goes_where_its_prefix_is_unless_that_costs_a_place() -> None:
    router, (_, first, second) = cluster(decodes=2)
    keys = chains(320)
    announce(router, second, keys)
    assert place(router, Demand(321, 16, 1, keys))[0].decode is second
    assert place(router, Demand(16, 16, 1))[0].decode is first
    assert place(router, Demand(321, 16, 1, keys))[0].decode is second
    assert place(router, Demand(321, 16, 1, keys))[0].decode is first, "second is the fuller one now"


def test_router_places_waiting_demand_after_release() -> None:
    router, _ = cluster()
    promises = [place(router, Demand(400, 400, 1))[1] for _ in range(2)]  # 50 of 100 blocks each
    assert isinstance(router.place(Demand(16, 16, 1)), Wait)
    router.release(promises[0])
    router.release(promises[0])
    assert isinstance(router.place(Demand(400, 400, 1)), Placement)
    assert isinstance(router.place(Demand(400, 401 + 16, 1)), Wait)


def test_slots_are_promised_with_a_little_slack() -> None:
    router, _ = cluster()
    for _ in range(10):  # 8 slots, and a quarter more
        place(router, Demand(1, 2, 1))
    assert isinstance(router.place(Demand(1, 2, 1)), Wait)


def test_the_promise_stops_at_the_horizon() -> None:
    assert Demand(16, 10_000, 1).blocks(16) == 1 + HORIZON_TOKENS // 16
    assert Demand(16, 16, 1).blocks(16) == 2
    assert Demand(24, 16, 3).blocks(16) == 1 + 3 * 2, "the full block is shared, the partial one is not"


def test_a_request_alone_is_not_held_back_by_slots() -> None:
    router, _ = cluster()
    assert isinstance(router.place(Demand(16, 16, 16)), Placement), "sixteen choices, eight slots"


def test_a_request_never_goes_where_it_could_not_end() -> None:
    registry = Registry("f")
    join(registry, "small", "small", "colocated", kv_blocks=20)
    large = join(registry, "large", "large", "colocated", kv_blocks=200)
    router, demand = Router(registry, horizon=1600), Demand(16, 640, 1)
    assert router.roomiest(demand) == large.hello
    for _ in range(4):
        assert place(router, demand)[0].decode is large
    assert isinstance(router.place(demand), Wait)


@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 60))
def test_most_output_is_largest_that_fits(tokens: int, choices: int, blocks: int) -> None:
    registry = Registry("f")
    router = Router(registry)
    assert router.most_output(tokens, choices) is None
    size = join(registry, kv_blocks=blocks, max_model_len=10_000).hello.block_size
    most = router.most_output(tokens, choices)
    assert most is not None
    for output, fits in ((most, True), (most + 1, False)):
        if output > 0:
            assert (Demand(tokens, output, choices).blocks(size, output) <= blocks) is fits


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_an_answer_without_a_limit_may_go_to_every_worker_of_about_one_size(choices: int) -> None:
    registry = Registry("f")
    for name, blocks in (("a", 100), ("b", 99), ("tiny", 4)):
        join(registry, name, name, "colocated", kv_blocks=blocks)
    router = Router(registry)
    output = router.most_output(40, choices)
    assert output is not None and output > 400, "what is tiny is no measure"
    demand = Demand(40, output, choices)
    assert {place(router, demand)[0].decode.hello.name for _ in range(2)} == {"a", "b"}


def test_a_request_never_goes_where_it_would_be_cut_short() -> None:
    registry = Registry("f")
    short = join(registry, "short", "short", "colocated", kv_blocks=200, max_model_len=600)
    router, demand = Router(registry), Demand(400, 300, 1)
    assert isinstance(router.place(demand), Wait) and not router.could_serve(demand)
    assert router.could_serve(Demand(400, 200, 1)) and not router.could_serve(Demand(400, 201, 1))
    without_limit = Demand(400, 300, 1, enough=100)
    assert place(router, without_limit)[0].decode is short, "there is no other"
    long = join(registry, "long", "long", "colocated", kv_blocks=200, max_model_len=700)
    for asked in (demand, without_limit):
        assert place(router, asked)[0].decode is long


def test_open_ended_demand_goes_to_worker_with_most_room() -> None:
    registry = Registry("f")
    join(registry, "tiny", "tiny", "colocated", kv_blocks=200, max_model_len=401)
    most = join(registry, "most", "most", "colocated", kv_blocks=200, max_model_len=640)
    router = Router(registry)
    for _ in range(3):
        assert place(router, Demand(400, 600, 1, enough=1))[0].decode is most


@pytest.mark.parametrize("policy", ["local", "wait", "reject"])
def test_a_prefill_worker_that_is_too_small_computes_nothing_of_it(policy: Any) -> None:
    registry = Registry("f")
    join(registry, "small", "small", "prefill", kv_blocks=10)
    decode = join(registry, "d", "d", "decode", kv_blocks=100)
    router, demand = Router(registry, no_prefill=policy), Demand(161, 10, 1)
    assert place(router, Demand(160, 10, 1))[0].path == "disagg"
    if policy == "local":
        placement, _ = place(router, demand)
        assert (placement.path, placement.decode) == ("local", decode) and "too small" in placement.why
    else:
        assert isinstance(router.place(demand), Wait), "and not that there is none: that would end when one joins"
    assert router.could_serve(demand) is (policy == "local")
    large = join(registry, "large", "large", "prefill", kv_blocks=11)
    assert place(router, demand)[0].prefill is large


def test_roles_that_are_missing() -> None:
    router, _ = cluster(prefills=0, decodes=0)
    assert router.place(Demand(1, 2, 1)) == NoWorkers("decode")
    assert router.missing_role() == "decode"
    router, _ = cluster(prefills=1, decodes=0)
    assert router.place(Demand(1, 2, 1)) == NoWorkers("decode")
    router, _ = cluster(prefills=0)
    placement = router.place(Demand(1, 2, 1))
    assert isinstance(placement, Placement) and placement.path == "local" and router.missing_role() is None
    router, _ = cluster(prefills=0, no_prefill="reject")
    assert router.place(Demand(1, 2, 1)) == NoWorkers("prefill") and router.missing_role() == "prefill"
    router, _ = cluster(prefills=0, no_prefill="wait")
    assert isinstance(router.place(Demand(1, 2, 1)), Wait)


def test_colocated_workers_alone_and_beside_pools() -> None:
    router, (worker,) = cluster(0, 0, 1)
    placement, _ = place(router, Demand(100, 10, 1))
    assert (placement.path, placement.prefill, placement.decode) == ("colocated", None, worker)
    router, (_, _, colocated) = cluster(1, 1, 1)
    assert place(router, Demand(800, 700, 1))[0].path == "disagg"
    placement, _ = place(router, Demand(800, 700, 1))
    assert placement.path == "colocated" and placement.decode is colocated


def test_a_worker_with_another_kv_dtype_is_found_by_its_own_keys() -> None:
    """KV that decode received is found by prefill's type, and decode cannot use it for a prefill of its own."""
    router, (first, second, decode) = cluster(prefills=2)
    second.hello = msgspec.structs.replace(second.hello, dtype="bfloat16")
    keys = chains(320, "float32", "bfloat16")
    announce(router, second, keys, "bfloat16")
    announce(router, decode, keys, "bfloat16")
    demand = Demand(330, 10, 1, keys)
    assert (demand.cached_on(first), demand.cached_on(second)) == (0, 320)
    assert (demand.cached_on(decode), demand.cached_on(decode, "bfloat16")) == (0, 320)
    placement, promise = place(router, demand)
    assert (placement.path, placement.prefill) == ("disagg", second)
    assert promise.prefill_tokens == 10
    announce(router, decode, keys)
    assert place(router, demand)[0].path == "local"


def test_local_prefill_always_and_never() -> None:
    router, _ = cluster(local_prefill="always")
    assert place(router, Demand(1000, 10, 1))[0].path == "local"
    router, (_, decode) = cluster(local_prefill="never")
    keys = chains(320)
    announce(router, decode, keys)
    assert place(router, Demand(330, 10, 1, keys))[0].path == "disagg"


def test_choices_that_have_diverged_stay_on_one_worker() -> None:
    router, (_, decode) = cluster(local_prefill="never")
    placement = router.place(Demand(100, 10, 3, diverged=True))
    assert isinstance(placement, Placement)
    assert (placement.path, placement.prefill, placement.decode) == ("local", None, decode)


def test_local_prefill_auto_needs_a_reason() -> None:
    router, (_, decode) = cluster()
    assert place(router, Demand(8, 10, 1))[0].path == "disagg", "a short prompt alone is none"
    keys = chains(320)
    announce(router, decode, keys)
    placement, _ = place(router, Demand(330, 10, 1, keys))
    assert placement.path == "local" and "cached" in placement.why
    assert place(router, Demand(600, 10, 1, keys))[0].path == "disagg"


def test_a_tiny_prompt_does_not_stand_behind_a_long_one_when_decode_is_idle() -> None:
    router, (_, busy, _) = cluster(decodes=2)
    placement, _ = place(router, Demand(LOCAL_QUEUE_TOKENS, 10, 1))
    assert placement.decode is busy
    assert place(router, Demand(8, 10, 1))[0].path == "local"
    assert place(router, Demand(8, 10, 1))[0].path == "disagg", "now it is not idle any more"


LONG = Demand(OVERFLOW_STEPS * 512, 10, 1)
"""A request with as many tokens as must be queued before a prompt for a decode worker to compute it."""


def roomy(decodes: int = 1, **options: Any) -> tuple[Router, list[WorkerHandle]]:
    registry, room = Registry("f"), {"kv_blocks": 4000, "max_model_len": 64_000}
    workers = [join(registry, "p", "p", "prefill", **room)]
    workers += [join(registry, f"d{n}", f"d{n}", "decode", **room) for n in range(decodes)]
    return Router(registry, **options), workers


def test_a_prompt_does_not_stand_behind_many_where_a_decode_worker_has_none() -> None:
    router, (prefill, first, second) = roomy(decodes=2)
    place(router, LONG)
    placement, promise = place(router, Demand(600, 10, 1))
    assert placement.path == "local" and "4096 tokens are queued for prefill" in placement.why
    other = second if placement.decode is first else first
    assert place(router, Demand(600, 10, 1))[0].decode is other, "that has none"
    assert place(router, Demand(600, 10, 1))[0].prefill is prefill, "each has one"
    router.prefilled(promise)
    again = place(router, Demand(600, 10, 1))[0]
    assert (again.path, again.decode) == ("local", placement.decode)


def test_few_tokens_before_a_prompt_do_not_send_it_to_streams() -> None:
    router, (prefill, _) = roomy()
    place(router, Demand(OVERFLOW_STEPS * 512 - 1, 10, 1))
    assert place(router, Demand(600, 10, 1))[0].prefill is prefill


def test_a_long_prompt_waits_for_prefill_which_is_sooner_through_with_it() -> None:
    router, (prefill, decode) = roomy()
    place(router, LONG)
    assert place(router, Demand(LONG.tokens // 2 + 1, 10, 1))[0].prefill is prefill
    router, (prefill, decode) = roomy()
    keys = chains(320)
    announce(router, decode, keys)
    place(router, LONG)
    assert place(router, Demand(LONG.tokens // 2 + 320, 10, 1, keys))[0].path == "local", (
        "what is cached counts as done"
    )


def test_streams_in_all_slots_leave_no_room_for_a_prompt() -> None:
    router, (prefill, decode) = roomy()
    for _ in range(decode.hello.max_num_seqs):
        _, promise = place(router, Demand(1, 2, 1))
        router.prefilled(promise)
        router.prefilled(promise)
    assert router.account(decode).streams == decode.hello.max_num_seqs
    place(router, LONG)
    assert place(router, Demand(600, 10, 1))[0].prefill is prefill
    router.release(promise)
    router.release(promise)
    assert router.account(decode).streams == decode.hello.max_num_seqs - 1
    assert place(router, Demand(600, 10, 1))[0].path == "local"


def test_router_holds_prompt_behind_long_prefill_backlog() -> None:
    router, (prefill, _) = roomy()
    _, promise = place(router, Demand(HELD_STEPS * 512, 10, 1))
    assert place(router, Demand(600, 10, 1))[0].path == "local"
    assert isinstance(router.place(Demand(600, 10, 1)), Wait)
    router.prefilled(promise)
    assert place(router, Demand(600, 10, 1))[0].prefill is prefill


def test_router_does_not_hold_urgent_prompt() -> None:
    router, (prefill, _) = roomy()
    place(router, Demand(HELD_STEPS * 512, 10, 1))
    place(router, Demand(600, 10, 1))
    assert isinstance(router.place(Demand(600, 10, 1)), Wait)
    assert place(router, Demand(600, 10, 1, urgent=True))[0].prefill is prefill


def test_a_decode_worker_that_has_failed_a_request_does_not_get_its_prompt() -> None:
    router, (prefill, first, second) = roomy(decodes=2)
    place(router, LONG)
    router.account(second).prefill_tokens = 100
    placement = place(router, Demand(600, 10, 1, excluded_workers=frozenset({first.id})))[0]
    assert (placement.prefill, placement.decode) == (prefill, second)


def test_local_prefill_never_means_that_prompts_pile_up() -> None:
    router, (prefill, _) = roomy(local_prefill="never")
    for _ in range(6):
        assert place(router, LONG)[0].prefill is prefill


def test_the_ledger_of_a_lost_worker_goes_with_it() -> None:
    router, (_, decode) = cluster()
    _, promise = place(router, Demand(100, 10, 1))
    router.registry.gone(decode)
    router.forget(decode)
    join(router.registry, "d0", "d9")
    router.release(promise)
    assert all(account.blocks >= 0 for account in router.accounts.values())


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 4), st.booleans()), max_size=40))
def test_the_ledger_never_promises_too_much_and_returns_to_zero(
    requests: list[tuple[int, int, int, bool]],
) -> None:
    router, workers = cluster(2, 2, 1)
    promises: list[Promise] = []
    for tokens, output, choices, releases in requests:
        demand = Demand(tokens, output, choices)
        if isinstance(placement := router.place(demand), Placement):
            alone = router.account(placement.decode).sequences == 0
            promises.append(router.promise(demand, placement))
            account, pool = router.account(placement.decode), placement.decode.hello.kv_blocks
            assert alone or account.blocks <= pool
        if releases and promises:
            router.release(promises.pop(0))
    for promise in promises:
        router.release(promise)
    for worker in workers:
        account = router.account(worker)
        assert (account.blocks, account.sequences, account.prefill_tokens) == (0, 0, 0)


def fail(router: Router, prefill: WorkerHandle, decode: WorkerHandle) -> None:
    for _ in range(FAILURES):
        router.breakers.failed(Pair(prefill.id, decode.id), new_request_id(), 0.0)


def test_a_pair_whose_hand_offs_keep_failing_is_passed_over() -> None:
    router, (first, second, decode) = cluster(prefills=2)
    fail(router, first, decode)
    placement = router.place(Demand(100, 10, 1))
    assert isinstance(placement, Placement) and placement.prefill is second


def test_a_worker_that_fails_everything_is_left_out_however_much_room_it_has() -> None:
    router, (_, sick, sound) = cluster(decodes=2)
    for _ in range(FAILURES):
        router.breakers.failed(SingleWorker(sick.id), new_request_id(), 0.0)
    for _ in range(40):
        verdict = router.place(Demand(100, 10, 1))
        if isinstance(verdict, Wait):
            break
        assert isinstance(verdict, Placement) and verdict.decode is sound
        router.promise(Demand(100, 10, 1), verdict)
    else:
        pytest.fail("the sound one is never full")
    router.breakers.tick(FIRST_COOL_DOWN_S)
    placement = router.place(Demand(100, 10, 1))
    assert isinstance(placement, Placement) and placement.decode is sick, "one request tries it"
    router.breakers.placed(SingleWorker(sick.id), new_request_id())
    assert isinstance(router.place(Demand(100, 10, 1)), Wait)


def test_a_worker_that_fails_everything_is_better_than_none() -> None:
    router, (prefill, decode) = cluster()
    for worker in (prefill, decode):
        for _ in range(FAILURES):
            router.breakers.failed(SingleWorker(worker.id), new_request_id(), 0.0)
    assert isinstance(router.place(Demand(100, 10, 1)), Placement)


def test_suspects_are_placed_apart() -> None:
    router, (first, second, one, other) = cluster(prefills=2, decodes=2)
    placement = router.place(Demand(100, 10, 1, apart_from=frozenset({first.id, one.id})))
    assert isinstance(placement, Placement)
    assert (placement.prefill, placement.decode) == (second, other)
    assert isinstance(router.place(Demand(100, 10, 1, apart_from=frozenset({one.id, other.id}))), Wait)


def test_rather_another_decode_worker_than_a_failing_pair() -> None:
    router, (prefill, first, second) = cluster(decodes=2)
    fail(router, prefill, first)
    placement = router.place(Demand(100, 10, 1))
    assert isinstance(placement, Placement)
    assert (placement.path, placement.prefill, placement.decode) == ("disagg", prefill, second)


@pytest.mark.parametrize(("policy", "path"), [("local", "local"), ("wait", "disagg"), ("reject", "disagg")])
def test_a_pair_that_failed_this_request_is_better_than_none(policy: str, path: str) -> None:
    router, (prefill, decode) = cluster(no_prefill=policy)
    placement = router.place(Demand(100, 10, 1, excluded_pairs=frozenset({Pair(prefill.id, decode.id)})))
    assert isinstance(placement, Placement) and placement.path == path


@pytest.mark.parametrize(("policy", "path"), [("local", "local"), ("wait", None), ("reject", None)])
def test_with_no_pair_left_the_policy_decides(policy: str, path: str | None) -> None:
    router, (prefill, decode) = cluster(no_prefill=policy)
    fail(router, prefill, decode)
    verdict = router.place(Demand(100, 10, 1))
    assert isinstance(verdict, Placement if path else Wait), "a worker that is there is not missing"
    assert "keep failing" in verdict.why
    router.breakers.tick(FIRST_COOL_DOWN_S)
    placement = router.place(Demand(100, 10, 1))
    assert isinstance(placement, Placement) and placement.path == "disagg", "it is tried again by itself"


@pytest.mark.parametrize(("policy", "path"), [("local", "local"), ("wait", "disagg"), ("reject", "disagg")])
def test_after_two_pairs_have_failed_a_request_decode_prefills_if_it_may(policy: str, path: str) -> None:
    """The last of a few attempts is not spent on a third pair if the request can be served without a hand-off."""
    router, (first, second, *decodes) = cluster(prefills=2, decodes=2, no_prefill=policy)
    failed = Pair(first.id, decodes[0].id)
    once = router.place(Demand(100, 10, 1, excluded_pairs=frozenset({failed})))
    assert isinstance(once, Placement) and once.path == "disagg"
    twice = router.place(Demand(100, 10, 1, excluded_pairs=frozenset({failed, Pair(second.id, decodes[1].id)})))
    assert isinstance(twice, Placement) and twice.path == path
