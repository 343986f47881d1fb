"""Runs the nodes of a Ray cluster on this machine, as told on standard input: ``add CPUS``, ``kill N``.

RAY_PYTHON -m tests.e2e.ray_nodes        run by an interpreter that has Ray; prints the address of the cluster
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20


def main() -> None:
    """Run the cluster until standard input ends. Each command is answered with one line."""
    first = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster, nodes = Cluster(initialize_head=True, head_node_args=first), []
    print(f"address {cluster.address}", flush=True)
    try:
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            if command == "add":
                nodes.append(cluster.add_node(num_cpus=int(argument), object_store_memory=STORE_BYTES))
            else:
                cluster.remove_node(nodes[int(argument)], allow_graceful=False)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
