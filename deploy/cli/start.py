"""Functions of the commands that start processes: checks, logging, the built-in model, and torch's threads.

Role packages are imported inside the functions, after the checks, so that a refused start fails at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TypeVar, cast

from common.config.bench.kernels import BenchKernelsConfig
from common.config.bench.roofline import BenchRooflineConfig
from common.config.coordinator import CoordinatorConfig
from common.config.keygen import KeygenConfig
from common.config.up import UpConfig
from common.config.worker import WorkerConfig
from common.platform import service_manager
from common.platform.device import calm_threads
from common.platform.log import setup_logging

R = TypeVar("R", CoordinatorConfig, WorkerConfig)


def up(config: UpConfig) -> int:
    """Run a coordinator and workers, on this machine or in a Ray cluster, until stopped. Returns the exit code."""
    config.check_binds()
    if config.ray:
        from deploy.ray.up import run as run_in_ray

        return run_in_ray(config)
    from deploy.launcher.supervisor import run

    return run(config)


def coordinator(config: CoordinatorConfig) -> int:
    """Run a coordinator until stopped. Returns the exit code."""
    setup_logging(config.log_level, config.log_format, "coordinator")
    config = _openable(config)
    from coordinator.app import run

    return run(config, lambda url, control: service_manager.ready(f"serving at {url}, workers at {control}"))


def worker(config: WorkerConfig) -> int:
    """Run a prefill or decode worker until stopped. Returns the exit code."""
    setup_logging(config.log_level, config.log_format, config.name or config.role)
    config = _openable(config)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no cleanup needed yet, and torch would print a traceback
    from deploy.worker import run

    return run(config)


def _openable(config: R) -> R:
    """Return ``config`` with the built-in model if it names none. Raises StartError if the process cannot serve the
    model, or may not bind to its address."""
    from common.checkpoint.files import open_checkpoint
    from deploy.launcher import builtin

    config.check_binds()
    if isinstance(config, CoordinatorConfig):
        config.check_telemetry()
    named, notice = builtin.with_model(config, os.environ)
    if notice:
        print(f"no model is given, {notice}", file=sys.stderr)
    checkpoint = open_checkpoint(named.model, named.revision, named.trust_remote_code)
    if isinstance(named, WorkerConfig):
        from deploy.launcher.preflight import check_worker

        check_worker(checkpoint, named)
    return named


def roofline(config: BenchRooflineConfig) -> int:
    """Measure the memory bandwidth and compute limits of this machine. Returns the exit code."""
    calm_threads()
    from bench.commands.roofline import run

    return run(config)


def kernels(config: BenchKernelsConfig) -> int:
    """Measure attention and linear kernels. Returns the exit code."""
    calm_threads()
    from bench.commands.kernels import run

    return run(config)


def keygen(config: KeygenConfig) -> int:
    """Write a key file, for a whole cluster or for one role of an existing one. Returns the exit code."""
    from common.net import keys

    if config.cluster_key_file:
        keys.narrow(
            Path(config.cluster_key_file), cast(keys.Party, config.role), config.path, overwrite=config.overwrite
        )
        print(f"wrote {config.path}: the keys that {config.role} processes need, and no others")
    else:
        keys.make(config.path, overwrite=config.overwrite)
        print(f"wrote {config.path}: anyone who can read it can join the cluster; copy it over a secure channel only")
    return 0
