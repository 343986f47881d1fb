"""What workers reserve in a Ray cluster, and the options that say so."""

from __future__ import annotations

import pytest

from common.config.ray import LABELS, RAY, RESOURCES
from common.config.up import UpConfig
from common.core.errors import StartError
from common.net.messages import Role
from deploy.cli import main as cli
from deploy.ray import placement
from deploy.ray.placement import Bundle, Group


def names(prefill: int, decode: int) -> list[tuple[str, Role]]:
    return [(f"prefill-{n}", "prefill") for n in range(prefill)] + [(f"decode-{n}", "decode") for n in range(decode)]


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ((1, 1), [("prefill-0", "decode-0")]),
        ((2, 1), [("prefill-0", "decode-0"), ("prefill-1",)]),
        ((1, 3), [("prefill-0", "decode-0"), ("decode-1",), ("decode-2",)]),
        ((0, 2), [("decode-0",), ("decode-1",)]),
        ((0, 0), []),
    ],
)
def test_a_prefill_and_a_decode_worker_share_a_group(pools: tuple[int, int], expected: list[tuple[str, ...]]) -> None:
    found = placement.groups(UpConfig(model="m", ray="auto"), names(*pools), on_gpus=False)
    assert [group.labels for group in found] == expected


def test_colocated_workers_have_groups_of_their_own() -> None:
    config = UpConfig(model="m", ray="auto", colocated=2)
    found = placement.groups(config, [("colocated-0", "colocated"), ("colocated-1", "colocated")], on_gpus=False)
    assert [group.labels for group in found] == [("colocated-0",), ("colocated-1",)]


def test_bundles_count_ranks_and_take_the_resources_and_labels_of_their_role() -> None:
    config = UpConfig(
        model="m",
        ray="auto",
        ray_cpus=3,
        decode_tensor_parallel_size=2,
        ray_resources=RESOURCES.parse("disk=0.5\nprefill:h100=1\ndecode:disk=2"),
        ray_labels=LABELS.parse("zone=a\ndecode:ray.io/accelerator-type=in(L4,T4)"),
    )
    prefill, decode = (placement.bundle(config, role, on_gpus=True) for role in ("prefill", "decode"))
    assert prefill.amounts() == {"CPU": 3, "GPU": 1, "disk": 0.5, "h100": 1}
    assert prefill.labels == {"zone": "a"}
    assert decode.amounts() == {"CPU": 6, "GPU": 2, "disk": 2}
    assert decode.labels == {"zone": "a", "ray.io/accelerator-type": "in(L4,T4)"}
    assert "GPU" not in placement.bundle(config, "decode", on_gpus=False).amounts()
    assert placement.needed(decode) == "CPU 6, GPU 2, disk 2, zone=a, ray.io/accelerator-type=in(L4,T4)"


def test_the_coordinator_reserves_a_cpu_of_its_node_if_there_is_any() -> None:
    (bundle,) = placement.coordinator_group("coordinator", "id-a", {"CPU": 4, "node:10.0.0.1": 1}).bundles
    assert (bundle.amounts(), bundle.labels) == ({"CPU": 1}, {"ray.io/node-id": "id-a"})
    without = {"node:__internal_head__": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9}
    (bundle,) = placement.coordinator_group("coordinator", "id-a", without).bundles
    assert bundle.amounts() == {"node:10.0.0.1": 0.001}, "Ray refuses an empty bundle"


def test_a_lack_of_room_is_told_with_what_would_help() -> None:
    pair = Group(("prefill-0", "decode-0"), (Bundle(1, 0, {}, {}), Bundle(2, 0, {"disk": 1.0}, {"zone": "a"})))
    error = placement.no_room(pair, 5.0)
    assert error.what == "the Ray cluster has no room for prefill-0 and decode-0"
    assert error.why == "no nodes have had CPU 1 for prefill-0 and CPU 2, disk 1, zone=a for decode-0 free for 5 s"
    assert "add nodes" in error.todo
    error = placement.no_room(placement.coordinator_group("coordinator", "id-a", {"CPU": 1}), 5.0)
    assert error.why == "this machine's node, on which it must run, has not had CPU 1 free for 5 s"
    assert "add nodes" not in error.todo


@pytest.mark.parametrize("text", ["CPU=1", "GPU=1", "disk", "disk=", "disk=0", "disk=-1", "cook:disk=1", ""])
def test_resources_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        RESOURCES.parse(text)


def test_the_address_may_be_left_out_and_is_never_a_model() -> None:
    given, _ = cli.build_parser()[0].parse_known_args(["up", "m", "--ray"])
    assert (given.model, given.ray) == ("m", "auto")
    given, _ = cli.build_parser()[0].parse_known_args(["up", "m", "--ray", "10.0.0.1:6379", "--ray-cpus", "2"])
    assert given.ray == "10.0.0.1:6379"
    for text in ("owner/name", "ray://10.0.0.1:10001", "local"):
        with pytest.raises(ValueError):
            RAY.parse(text)


def test_workers_use_gpus_if_the_cluster_has_any() -> None:
    config = UpConfig(model="m", ray="auto")
    assert placement.on_gpus(config, {"CPU": 4, "GPU": 1}) and not placement.on_gpus(config, {"CPU": 4})
    assert placement.on_gpus(UpConfig(model="m", ray="auto", device="cuda"), {"CPU": 4}), "an autoscaler may add some"
    assert not placement.on_gpus(UpConfig(model="m", ray="auto", device="cpu"), {"GPU": 1})
    with pytest.raises(StartError, match="cuda:1 excludes --ray"):
        placement.on_gpus(UpConfig(model="m", ray="auto", device="cuda:1"), {"GPU": 2})


def test_core_numbers_exclude_ray() -> None:
    with pytest.raises(StartError, match="--cpus excludes --ray"):
        placement.check(UpConfig(model="m", ray="auto", cpus="0-1"))


def test_only_with_ray_other_machines_need_no_key_file() -> None:
    UpConfig(model="m", ray="auto", control_host="10.0.0.1").check_binds()
    with pytest.raises(StartError, match="needs --cluster-key-file"):
        UpConfig(model="m", control_host="10.0.0.1").check_binds()
    with pytest.raises(StartError, match=r"0\.0\.0\.0 is not an address"):
        UpConfig(model="m", ray="auto", control_host="0.0.0.0").check_binds()
