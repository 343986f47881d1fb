"""``tandem up --ray``: the supervisor of :mod:`deploy.launcher.supervisor` with its processes in a Ray cluster.

The coordinator runs on this machine's node, whose files it reads; workers run where their placement groups are. This
process restarts what ends, as on one machine, each time in a new actor. All actors end with this process.
"""

from __future__ import annotations

import os
from dataclasses import replace

from common.config.up import UpConfig
from common.net.hosts import bracketed, is_loopback
from common.net.messages import Role
from deploy.launcher import supervisor
from deploy.ray import placement
from deploy.ray.hosts import RayHosts
from deploy.ray.session import connected


def run(config: UpConfig) -> int:
    """Serve until stopped and return the exit code. Raises StartError if the system cannot start."""
    placement.check(config)
    with connected(config.ray or "auto") as session:
        host = config.control_host
        config = replace(
            config,
            control_host=bracketed(session.address) if is_loopback(host) else host,
            lend_cores=False,  # Ray shares the cores of a node
            model=os.path.abspath(config.model) if os.path.exists(config.model) else config.model,
        )
        cluster = session.resources()
        on_gpus = placement.on_gpus(config, cluster)
        prefill, decode, colocated = config.pools(2)
        counts: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", decode), ("colocated", colocated))
        names = [(f"{role}-{index}", role) for role, count in counts for index in range(count)]
        hosts = RayHosts(config, session, on_gpus)
        fact = f"in a Ray cluster with {cluster.get('CPU', 0):g} CPUs and {cluster.get('GPU', 0):g} GPUs"
        return supervisor.serve(config, hosts.plan(names), [fact], hosts)
