"""Runs the nodes of a Ray cluster on this machine, as commands on standard input say. Commands and answers are lines of
JSON; a command is the name and the arguments of a method of :class:`Nodes`.

RAY_PYTHON -m tests.e2e.ray_nodes CPUS [ADDED]      run by an interpreter that has Ray

It prints the address of the cluster and the folder of its logs. CPUS are those of the head, ADDED those of each node
that Ray's autoscaler may add.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

STORE_BYTES = 100 << 20


class Nodes:
    """The cluster. Node 0 is its head."""

    def __init__(self, folder: Path, cpus: int, added: int | None = None) -> None:
        head: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        if added is not None:
            os.environ.update(RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1")  # for Ray's own test provider
            head |= autoscaled(folder, added)
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self.cluster.head_node]
        self._autoscaler = psutil.Process(self.cluster.head_node.all_processes["monitor"][0].process.pid)

    def add(self, **arguments: Any) -> int:
        """Add a node; return the process id of its raylet."""
        self._nodes.append(self.cluster.add_node(object_store_memory=STORE_BYTES, **arguments))
        return int(self._nodes[-1].all_processes["raylet"][0].process.pid)

    def kill(self, number: int) -> None:
        """Kill all processes of a node."""
        self.cluster.remove_node(self._nodes[number], allow_graceful=False)

    def end(self) -> None:
        """End the cluster, with the nodes that its autoscaler has started and would leave behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._autoscaler.children(recursive=True):
                process.kill()
        self.cluster.shutdown()

    def nodes(self) -> int:
        """Return the number of nodes."""
        return sum(node["Alive"] for node in self.cluster.global_state.node_table())

    def actors(self) -> int:
        """Return the number of actors."""
        table = self.cluster.global_state.actor_table(None, None, None)
        return sum(actor["State"] != "DEAD" for actor in table.values())

    def groups(self) -> int:
        """Return the number of placement groups."""
        table = self.cluster.global_state.placement_group_table()
        return sum(group["state"] != "REMOVED" for group in table.values())

    def kept(self) -> str:
        """Return all that the head keeps about actors and placement groups."""
        state = self.cluster.global_state
        return repr((state.actor_table(None, None, None), state.placement_group_table()))


def autoscaled(folder: Path, cpus: int) -> dict[str, Any]:
    """Return arguments for a head whose autoscaler adds up to two nodes with ``cpus`` CPUs."""
    import ray
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    types = {
        "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
        "added": {"resources": {"CPU": cpus}, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    provider = {
        "type": "fake_multinode", "gcs_address": address, "use_node_id_as_ip": True, "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }  # fmt: skip
    config = {
        "cluster_name": "test", "max_workers": 2, "upscaling_speed": 10, "idle_timeout_minutes": 60, "auth": {},
        "provider": provider, "available_node_types": types,
        "head_node_type": "ray.head.default", "cluster_synced_files": [], "file_mounts": {}, "rsync_exclude": [],
        "file_mounts_sync_continuously": False, "rsync_filter": [], "initialization_commands": [], "setup_commands": [],
        "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }  # fmt: skip
    (folder / "autoscaler.json").write_text(json.dumps(config))
    named = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
    return {"gcs_server_port": port, "autoscaling_config": str(folder / "autoscaler.json"), "env_vars": named}


def main() -> None:
    """Run the cluster until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder), *map(int, sys.argv[1:]))
        try:
            print(json.dumps([nodes.cluster.address, nodes.cluster.head_node.get_logs_dir_path()]), flush=True)
            for line in sys.stdin:
                method, arguments, named = json.loads(line)
                print(json.dumps(getattr(nodes, method)(*arguments, **named)), flush=True)
        finally:
            nodes.end()


if __name__ == "__main__":
    main()
