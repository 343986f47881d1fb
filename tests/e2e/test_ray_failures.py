"""``tandem up --ray`` when something fails: actors, the head, the process itself, or the start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.ray_cluster import MARKS, WAIT_S, Cluster, cluster, gone, refused, started, until, up

pytestmark = MARKS


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with room for two systems; only its head has room for their coordinators."""
    with cluster(tmp_path, 2) as running:
        running.do("add", num_cpus=6)
        yield running


def kill_actor_of(process: psutil.Process) -> None:
    actor = process.parent()
    assert actor is not None and "ProcessActor" in actor.name() + " ".join(actor.cmdline())
    actor.kill()


def coordinators(nodes: Cluster) -> list[psutil.Process]:
    """Return the coordinators of all systems in a cluster."""
    below = psutil.Process(nodes.process.pid).children(recursive=True)
    return [each for each in below if "coordinator" in each.cmdline()]


def test_lost_actors_are_replaced_and_a_killed_system_leaves_nothing_to_a_second(
    nodes: Cluster, tmp_path: Path
) -> None:
    with up(nodes.address, tmp_path / "first.log") as first:
        lost = first.pids()["decode-0"]
        kill_actor_of(psutil.Process(lost))
        until(lambda: first.said("decode-0 is back"), "another actor runs the worker")
        assert first.said(r"exited \(the actor of decode-0 is gone: The actor .{1,200}\); restarting")
        until(gone([lost]), "the process ends with its actor")
        (coordinator,) = coordinators(nodes)
        kill_actor_of(coordinator)
        until(lambda: first.said("coordinator is back"), "another actor runs the coordinator")
        until(lambda: len(first.pids()) == 2, "both workers have joined it")
        assert first.answers()
        with up(nodes.address, tmp_path / "second.log") as second:
            assert second.answers() and first.answers()
            assert (nodes.do("actors"), nodes.do("groups")) == (6, 4)
            third = refused(nodes.address, "--ray-timeout", "2")
            assert "no room for coordinator" in third
            assert "this machine's node, on which it must run, has not had CPU 1 free for 2 s" in third
            left = [*first.pids().values(), *(each.pid for each in coordinators(nodes))]
            mine = [*second.pids().values(), *(each.pid for each in coordinators(nodes))]
            first.process.kill()
            until(lambda: (nodes.do("actors"), nodes.do("groups")) == (3, 2), "actors and groups of the first are gone")
            until(gone(set(left) - set(mine)), "its workers have ended")
            until(lambda: len(coordinators(nodes)) == 1, "its coordinator has ended")
            assert second.answers()
            second.interrupt()
        until(lambda: nodes.do("actors") == nodes.do("groups") == 0, "those of the second are gone too")


def test_ctrl_c_during_the_start_leaves_nothing(nodes: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with started(nodes.address, log) as process:
        until(lambda: "importing" in log.read_text(), "a worker is starting")
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert "stopping at once" in log.read_text()
    until(lambda: nodes.do("actors") == nodes.do("groups") == 0, "actors and groups are gone")


def test_the_loss_of_the_head_ends_it(nodes: Cluster, tmp_path: Path) -> None:
    with up(nodes.address, tmp_path / "up.log") as system:
        pids = system.pids()
        nodes.do("kill", 0)
        assert system.process.wait(WAIT_S) == 1
        text = system.text()
        assert "error: Ray's node of this machine" in text or "error: the head of the Ray cluster" in text
        assert "is lost" in text and "Traceback" not in text
        until(gone(pids.values()), "workers on the other node have ended")


def test_what_cannot_start_says_why(nodes: Cluster) -> None:
    nothing = refused("127.0.0.1:1")
    assert "Connection refused" in nothing and "ray start --head on one machine" in nothing
    assert "cannot use a Ray cluster at host.invalid:6379" in refused("host.invalid:6379")
    other = refused(nodes.address, before="import ray; ray.__version__ = '2.9.9'")
    assert "Version mismatch" in other and "2.9.9" in other and "install the same versions of Ray" in other
    nowhere = refused(nodes.address, "--ray-labels", "decode:zone=c", "--ray-timeout", "2")
    assert "no nodes have had CPU 1 for prefill-0 and CPU 1, zone=c for decode-0 free for 2 s" in nowhere
    assert "correct --ray-labels" in refused(nodes.address, "--ray-labels", "zone=!in(c")
    nowhere = refused(nodes.address, "--ray-resources", "decode:disk=1", "--ray-timeout", "2")
    assert "CPU 1, disk 1 for decode-0 free" in nowhere
    until(lambda: nodes.do("actors") == nodes.do("groups") == 0, "nothing is left of them")
