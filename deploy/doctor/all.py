"""All checks of ``tandem doctor`` in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from common.config.doctor import DoctorConfig
from common.core.errors import StartError
from common.platform.gpu import Gpu
from deploy.doctor import configuration, machine, system
from deploy.doctor.finding import Check, Finding, bad, run
from deploy.launcher import fleet
from deploy.running_system import Answers, ask, measure_links


def checks(config: DoctorConfig, our_version: str) -> Iterator[Finding]:
    """Yield the findings about this machine, the configuration, and the running system if there is one."""
    gpus, why, refusal = _gpus(config)
    answers, unreachable = _answers(config)
    hosts = {each["host"] for each in answers.workers} if answers is not None else set()
    local: list[tuple[str, Check]] = [
        ("software", machine.software),
        ("processor", machine.processor),
        ("numa", partial(machine.numa, config)),
        ("memory", machine.ram),
        ("shared memory", partial(machine.shared_memory, gpus)),
        ("open files", machine.files),
        ("real time", partial(machine.real_time, config)),
        ("kernels", machine.kernels),
    ]
    if answers is None:  # a running system is itself a load
        local.append(("load", machine.load))
    for subject, check in local:
        yield from run(subject, check)
    if refusal is not None:
        yield bad("gpu", f"{refusal.what}: {refusal.why}", refusal.todo)
    else:
        yield from run("gpu", partial(machine.graphics, gpus, why))
    for subject, check in (
        ("checkpoint", partial(configuration.checkpoint, config, gpus)),
        ("cache", partial(configuration.cache, config)),
        ("addresses", partial(configuration.addresses, config)),
        ("ports", partial(configuration.ports, config)),
        ("keys", partial(configuration.keys, config)),
        ("clock", partial(machine.clock, len(hosts) > 1)),
    ):
        yield from run(subject, check)
    if answers is None:
        assert unreachable is not None
        yield system.unreachable(config.server_url, unreachable, config.url is not None)
        return
    if config.links:
        yield from run("links", partial(_measure, config))
        answers = _answers(config)[0] or answers
    for subject, check in (
        ("system", partial(system.system, config.server_url, answers, our_version)),
        ("workers", partial(system.workers, answers)),
        ("clocks", partial(system.clocks, answers)),
        ("links", partial(system.links, answers)),
    ):
        yield from run(subject, check)


def gpus_of(config: DoctorConfig) -> list[Gpu]:
    """Return the GPUs that workers of this configuration would use, none if they cannot be used."""
    return _gpus(config)[0]


def _gpus(config: DoctorConfig) -> tuple[list[Gpu], str, StartError | None]:
    try:
        gpus, why = fleet.allowed_gpus(config)
    except StartError as error:
        return [], "", error
    return gpus, why, None


def _measure(config: DoctorConfig) -> Iterable[Finding]:
    """Have the running system measure all its links anew."""
    measure_links(*_server(config))
    return ()


def _server(config: DoctorConfig) -> tuple[str, str | None]:
    """Return the URL of the running server, and the key for it."""
    return config.server_url, config.admin_api_key or next(iter(config.api_keys()), None)


def _answers(config: DoctorConfig) -> tuple[Answers | None, StartError | None]:
    try:
        return ask(*_server(config), "--admin-api-key"), None
    except StartError as error:
        return None, error
