"""A stand-in for a Kubernetes cluster that obeys manifests with real processes on this machine.

It runs the Deployments among rendered manifests: each pod is a ``tandem`` process with a loopback address of its own,
with the arguments, environment and files that its manifest gives it. Probes decide when a pod is started, alive and
ready; rolling updates keep to ``maxSurge`` and ``maxUnavailable``, evictions to PodDisruptionBudgets; a pod that
terminates gets its ``preStop`` hook, SIGTERM and its grace. Services are TCP proxies to the ready pods and learn of
changes LAG_S late, as nodes do. What a well-behaved pod never does (a restart, a kill after the grace, an error at the
end) is noted in ``violations``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import leaked_keys
from tests.e2e.system import COMMAND, ROOT, TandemProcess
from tests.orchestration.kustomize import Manifest
from tests.orchestration.pods import PodFiles, PodTemplate, arguments, inside, templates
from tests.pace import scaled

LAG_S = 0.5
"""How late Services learn of a pod that has become ready, or is no longer."""
TICK_S = 0.05
_numbers = random.SystemRandom()


@dataclass(eq=False)
class Pod:
    """One pod of a Deployment."""

    name: str
    ip: str
    template: PodTemplate
    generation: int
    log: Path
    start: Callable[[Pod], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    started = alive = ready = terminating = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return self.terminating and self.process is None

    def port(self, name: str | int) -> int:
        """Return the number of a port of the container."""
        if isinstance(name, int):
            return name
        return next(int(each["containerPort"]) for each in self.template.container["ports"] if each["name"] == name)


class Service:
    """A Service's port: a TCP proxy that sends each connection to one of the pods that ``endpoints`` returns."""

    def __init__(self, manifest: Manifest, endpoints: Callable[[dict[str, str]], list[Pod]]) -> None:
        (self._port,) = manifest["spec"]["ports"]
        self._selector, self._endpoints = manifest["spec"]["selector"], endpoints
        self.name = f"{manifest['metadata']['name']}:{self._port['port']}"
        self.address = ""
        self.refused = 0
        """Connections that came while no pod was there."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._join(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pods = self._endpoints(self._selector)
        if not pods:
            self.refused += 1
            return
        pod = _numbers.choice(pods)
        try:
            there = await asyncio.open_connection(pod.ip, pod.port(self._port["targetPort"]))
        except OSError:
            return
        try:
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))
        finally:
            there[1].transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the sender closes its side, then close that of the receiver."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class Cluster:
    """The Deployments, Services and budgets among ``manifests``, run in the event loop. ``hurry`` divides the periods
    of probes."""

    def __init__(self, manifests: list[Manifest], secrets: list[Manifest], directory: Path, hurry: float = 1.0) -> None:
        self._files, self._directory, self._hurry = (
            PodFiles(directory / "volumes", [*manifests, *secrets]),
            directory,
            hurry,
        )
        kinds: dict[str, list[Manifest]] = {}
        for each in manifests:
            kinds.setdefault(each["kind"], []).append(each)
        self.deployments = {each.owner["metadata"]["name"]: each for each in templates(kinds["Deployment"])}
        self.generations = dict.fromkeys(self.deployments, 1)
        self.services = [Service(each, self.endpoints) for each in kinds["Service"]]
        self._budgets = kinds["PodDisruptionBudget"]
        self.pods: list[Pod] = []
        self.violations: list[str] = []
        self._serving: list[Pod] = []
        """The ready pods as Services know them, those that terminate among them."""
        self._net = f"127.{_numbers.randrange(1, 255)}.{_numbers.randrange(256)}"
        self._made = 0
        self._background: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Cluster]:
        """Run within the block, from when all pods are ready; stop all pods at its end."""
        for service in self.services:
            await service.listen()
        controller = asyncio.create_task(self._control())
        try:
            await self.settled()
            yield self
            controller.cancel()
            for pod in self.pods:
                self._terminate(pod)
            await self._until(lambda: all(pod.gone for pod in self.pods), "all pods end")
        except BaseException:
            print(self.logs())
            raise
        finally:
            controller.cancel()
            for pod in self.pods:
                for task in pod.tasks:
                    task.cancel()
                if pod.process is not None:
                    pod.process.kill()
                    pod.process.wait()
                    pod.process = None
                leaked_keys.search(pod.log)
            for service in self.services:
                await service.close()
            await asyncio.gather(
                controller, *self._background, *(t for p in self.pods for t in p.tasks), return_exceptions=True
            )

    def logs(self) -> str:
        return "\n".join(f"--- {pod.name}\n{pod.log.read_text(errors='replace')[-3000:]}" for pod in self.pods)

    def service(self, name: str) -> Service:
        return next(each for each in self.services if each.name.partition(":")[0] == name)

    def of(self, deployment: str) -> list[Pod]:
        """Return the pods of a Deployment that do not terminate."""
        template = self.deployments[deployment]
        return [pod for pod in self.pods if pod.template is template and not pod.terminating]

    def endpoints(self, selector: dict[str, str]) -> list[Pod]:
        """Return the pods to which a Service sends connections: ready ones, else those that terminate and still answer
        their readiness probe."""
        found = [pod for pod in self._serving if selector.items() <= pod.template.labels.items() and not pod.gone]
        return [pod for pod in found if not pod.terminating] or found

    # -- what an operator does ----------------------------------------------------------------------------------------

    def restart(self, deployment: str) -> None:
        """Begin a rolling update, as ``kubectl rollout restart`` does."""
        self.generations[deployment] += 1

    async def settled(self, within_s: float = 240.0) -> None:
        """Wait until every Deployment has all of its pods, of the newest generation and ready, and no other."""

        def done() -> bool:
            for name, template in self.deployments.items():
                pods = self.of(name)
                if len(pods) != template.owner["spec"]["replicas"] or not all(
                    pod.ready and pod.generation == self.generations[name] for pod in pods
                ):
                    return False
            return all(pod.gone for pod in self.pods if pod.terminating)

        await self._until(done, "the pods are as they should be", within_s)

    def evict(self, deployment: str) -> None:
        """Remove a pod, as draining its node does. AssertionError if the budget does not allow it."""
        template, pods = self.deployments[deployment], self.of(deployment)
        (budget,) = (
            each["spec"]
            for each in self._budgets
            if each["spec"]["selector"]["matchLabels"].items() <= template.labels.items()
        )
        wanted = template.owner["spec"]["replicas"]
        allowed = sum(pod.ready for pod in pods) - (wanted - budget["maxUnavailable"])
        assert allowed > 0, "the budget does not allow it"
        self._terminate(pods[0])

    # -- the controllers ----------------------------------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            for name in self.deployments:
                self._reconcile(name)
            self._notice()
            await asyncio.sleep(TICK_S)

    def _reconcile(self, name: str) -> None:
        """Take one step of a rolling update, or replace what is missing."""
        template, generation, pods = self.deployments[name], self.generations[name], self.of(name)
        wanted, strategy = template.owner["spec"]["replicas"], template.owner["spec"]["strategy"]
        assert strategy["type"] == "RollingUpdate", strategy
        surge = _number(strategy["rollingUpdate"]["maxSurge"], wanted, math.ceil)
        missing = _number(strategy["rollingUpdate"]["maxUnavailable"], wanted, math.floor)
        new = [pod for pod in pods if pod.generation == generation]
        old = [pod for pod in pods if pod.generation != generation]
        for _ in range(min(wanted - len(new), wanted + surge - len(pods))):
            self._create(name, template, generation)
        spare = sum(pod.ready for pod in pods) - (wanted - missing)
        for pod in sorted(old, key=lambda each: each.ready):
            if pod.ready:
                spare -= 1
                if spare < 0:
                    break
            self._terminate(pod)

    def _create(self, name: str, template: PodTemplate, generation: int) -> None:
        self._made += 1
        pod_name = f"{name}-{generation}-{self._made}"
        log = self._directory / f"{pod_name}.log"
        ip = f"{self._net}.{self._made}"
        mounts = self._files.mounts(template, pod_name)
        environment = self._files.environment(template, {"status.podIP": ip, "metadata.name": pod_name})
        words = arguments(template, environment, mounts)
        for service in self.services:
            words = [word.replace(service.name, service.address) for word in words]
        words = [word.replace("0.0.0.0", ip) for word in words]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        own = {name: inside(value, mounts) for name, value in environment.items()}
        own |= {"TANDEM_CACHE": os.environ.get("TANDEM_CACHE", ""), "HF_HUB_OFFLINE": "1"}

        def start(pod: Pod) -> subprocess.Popen[bytes]:
            leaked_keys.watch(pod.log)
            popen = TandemProcess.spawner.popen() if TandemProcess.spawner else subprocess.Popen
            with pod.log.open("ab") as out:
                return popen(
                    [*COMMAND, *words],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=ROOT,
                    env=inherited | own,
                )

        pod = Pod(pod_name, ip, template, generation, log, start)
        pod.process = start(pod)
        pod.tasks.append(asyncio.create_task(self._probe(pod)))
        self.pods.append(pod)

    def _notice(self) -> None:
        """Restart containers that have ended, and tell Services of pods that have become ready or are no longer."""
        for pod in self.pods:
            if not pod.terminating and pod.process is not None and pod.process.poll() is not None:
                self._restart(pod, f"ended with {pod.process.returncode}")
        ready = [pod for pod in self.pods if pod.ready]
        asyncio.get_running_loop().call_later(LAG_S, self._learn, ready)

    def _learn(self, ready: list[Pod]) -> None:
        self._serving = ready

    def _restart(self, pod: Pod, why: str) -> None:
        self.violations.append(f"{pod.name} {why}")
        if pod.process is not None:
            pod.process.kill()
            pod.process.wait()
        pod.started = pod.ready = False
        pod.process = pod.start(pod)

    # -- the kubelet --------------------------------------------------------------------------------------------------

    async def _probe(self, pod: Pod) -> None:
        container = pod.template.container
        begun = {kind: time.monotonic() for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
        failures = dict.fromkeys(begun, 0)
        due = dict(begun)
        while pod.process is not None:
            for kind in begun:
                probe = container[kind]
                if (kind == "startupProbe") == pod.started or time.monotonic() < due[kind]:
                    continue
                due[kind] = time.monotonic() + probe["periodSeconds"] / self._hurry
                passed = await self._passes(pod, probe)
                failures[kind] = 0 if passed else failures[kind] + 1
                over = failures[kind] >= probe.get("failureThreshold", 3)
                if kind == "startupProbe":
                    pod.started = passed
                elif kind == "readinessProbe":
                    pod.ready = passed or (pod.ready and not over)
                if over and kind != "readinessProbe" and not pod.terminating:
                    self._restart(pod, f"fails its {kind}")
                    failures = dict.fromkeys(failures, 0)
            await asyncio.sleep(TICK_S)

    async def _passes(self, pod: Pod, probe: Manifest) -> bool:
        get = probe["httpGet"]
        try:
            async with asyncio.timeout(scaled(probe.get("timeoutSeconds", 1))):
                reader, writer = await asyncio.open_connection(pod.ip, pod.port(get["port"]))
                with contextlib.closing(writer):
                    writer.write(f"GET {get['path']} HTTP/1.1\r\nHost: {pod.ip}\r\nConnection: close\r\n\r\n".encode())
                    line = await reader.readline()
                return 200 <= int(line.split()[1]) < 400
        except (OSError, TimeoutError, IndexError, ValueError):
            return False

    def _terminate(self, pod: Pod) -> None:
        if not pod.terminating:
            pod.terminating = True
            pod.tasks.append(asyncio.create_task(self._end(pod)))

    async def _end(self, pod: Pod) -> None:
        """Run the preStop hook, send SIGTERM, and kill the process when its grace is over."""
        assert pod.process is not None
        until = time.monotonic() + pod.template.spec["terminationGracePeriodSeconds"]
        hook = pod.template.container.get("lifecycle", {}).get("preStop", {})
        if hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        pod.process.send_signal(signal.SIGTERM)
        while pod.process.poll() is None:
            if time.monotonic() > until:
                self.violations.append(f"{pod.name} was killed after its grace")
                pod.process.kill()
            await asyncio.sleep(TICK_S)
        if pod.process.returncode != 0:
            self.violations.append(f"{pod.name} ended with {pod.process.returncode}")
        pod.ready, pod.process = False, None

    async def _until(self, done: Callable[[], bool], what: str, within_s: float = 240.0) -> None:
        deadline = time.monotonic() + scaled(within_s)
        while not done():
            states = [(pod.name, pod.started, pod.ready, pod.terminating) for pod in self.pods if not pod.gone]
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}; {states}; {self.violations}"
            await asyncio.sleep(TICK_S)


def _number(value: int | str, of: int, rounded: Callable[[float], int]) -> int:
    """Return a number of pods that may be given as a percentage."""
    return value if isinstance(value, int) else rounded(of * int(value.removesuffix("%")) / 100)


def changed(
    manifests: list[Manifest], replicas: dict[str, int], config: dict[str, Any], **flags: str
) -> list[Manifest]:
    """Return ``manifests`` with other numbers of replicas, more options in the ConfigMap, and other values of flags
    that are given already."""
    for each in manifests:
        if each["kind"] == "ConfigMap":
            each["data"]["tandem.yaml"] += "".join(f"{name}: {value}\n" for name, value in config.items())
        if each["kind"] == "Deployment":
            each["spec"]["replicas"] = replicas.get(each["metadata"]["name"], each["spec"]["replicas"])
            container = each["spec"]["template"]["spec"]["containers"][0]
            for name, value in flags.items():
                flag = f"--{name.replace('_', '-')}="
                container["args"] = [flag + value if word.startswith(flag) else word for word in container["args"]]
    return manifests
