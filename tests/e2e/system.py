"""A whole system as an operator starts it, and a client as a user writes one.

:class:`RunningSystem` runs ``tandem up`` (or any other ``tandem`` command) in processes of its own, waits until it is
ready, keeps its log, stops it, and checks that no process is left. :class:`ApiClient` speaks HTTP and returns what
tests check: token ids, log-probabilities, finish reasons, usage, headers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import psutil

from common.core.ids import pack_tokens
from common.core.request import SamplingParams
from tests import leaked_keys
from tests.e2e.spawner import Spawner
from tests.models import EOS
from tests.pace import scaled

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "deploy.cli")
"""The ``tandem`` command without its arguments; run in ROOT."""
READY_S = scaled(90.0)
STOP_S = scaled(30.0)
MODEL_LEN = 2048
SMALL = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "600", "--max-model-len", str(MODEL_LEN))
"""Flags of a system that starts quickly and has room for the tests' requests."""
_URL = re.compile(r"http://(?:127\.0\.0\.1|0\.0\.0\.0):\d+")


def tandem(*words: str | Path, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a ``tandem`` command that ends by itself and return its result; ``before`` is a wrapping command."""
    command = [*before, *COMMAND, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False, cwd=ROOT)


def _has_ended(process: psutil.Process) -> bool:
    """Return whether ``process`` has ended; it may still be a zombie that a parent other than this process must
    reap."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


@dataclass
class TandemProcess:
    """One ``tandem`` command and its descendants, logging into a file."""

    log: Path
    popen: subprocess.Popen[bytes]
    family: dict[int, psutil.Process] = field(default_factory=dict)
    spawner: ClassVar[Spawner | None] = None
    """The session's spawner, if workers are to share their imports; else each is started as an operator starts it."""

    @classmethod
    def start(cls, log: Path, *words: str | Path) -> TandemProcess:
        leaked_keys.watch(log)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        start = cls.spawner.popen() if cls.spawner else subprocess.Popen
        with log.open("ab") as out:
            popen = start(
                [*COMMAND, *map(str, words)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment | {"HF_HUB_OFFLINE": "1"},
            )
        return cls(log, popen)

    @property
    def text(self) -> str:
        """Everything logged so far."""
        return self.log.read_text(errors="replace")

    async def until_logged(self, pattern: str, seconds: float = 30.0) -> None:
        """Wait until a match of ``pattern`` has been logged: notes on workers may come after their first answers."""
        deadline = time.monotonic() + scaled(seconds)
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} within {seconds} s:\n{self.text}"
            await asyncio.sleep(0.02)

    def look_around(self) -> None:
        """Remember every descendant that exists now."""
        try:
            mine = psutil.Process(self.popen.pid)
            for process in (mine, *mine.children(recursive=True)):
                self.family.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass

    def check_alive(self) -> None:
        assert self.popen.poll() is None, f"exited with {self.popen.returncode}:\n{self.text}"

    def stop(self) -> None:
        """Send SIGTERM and wait; AssertionError if the command does not end, fails, or leaves a process behind."""
        self.look_around()
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            code = self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still there {STOP_S} s after SIGTERM:\n{self.text}") from None
        left = [each for each in psutil.wait_procs(self.others(), timeout=scaled(5))[1] if not _has_ended(each)]
        self.kill()
        assert not left, f"processes left behind: {left}\n{self.text}"
        assert code == 0, f"exit code {code}:\n{self.text}"

    def others(self) -> list[psutil.Process]:
        return [process for process in self.family.values() if process.pid != self.popen.pid]

    def kill(self) -> None:
        """Kill all processes at once."""
        self.look_around()
        for process in self.family.values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.popen.wait()
        leaked_keys.search(self.log)


@dataclass
class RunningSystem:
    """A running system; ``url`` is the base URL of its HTTP API."""

    process: TandemProcess
    url: str
    name: str = "model"

    @classmethod
    @contextmanager
    def up(cls, directory: Path, model: Path, *flags: str, small: Sequence[str] = SMALL) -> Iterator[RunningSystem]:
        """``tandem up MODEL FLAGS`` on free ports, for the duration of the block."""
        words = ["up", model, "--port", "0", "--control-port", "0", "--served-model-name", cls.name, *small, *flags]
        with cls.running(directory / "up.log", *words) as system:
            yield system

    @classmethod
    @contextmanager
    def running(cls, log: Path, *words: str | Path, until_ready: bool = True) -> Iterator[RunningSystem]:
        """Run any command that serves HTTP on a port that it logs; a coordinator is ready once workers have joined."""
        process = TandemProcess.start(log, *words)
        try:
            system = cls(process, cls._find_url(process))
            if until_ready:
                system.wait_ready()
            yield system
        except BaseException:
            process.kill()
            raise
        process.stop()

    @staticmethod
    def _find_url(process: TandemProcess) -> str:
        deadline = time.monotonic() + READY_S
        while not (found := _URL.search(process.text)):
            process.check_alive()
            assert time.monotonic() < deadline, f"no address within {READY_S} s:\n{process.text}"
            time.sleep(0.05)
        return found.group()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            self.process.check_alive()
            assert time.monotonic() < deadline, f"not ready within {READY_S} s:\n{self.process.text}"
            time.sleep(0.1)
        self.process.look_around()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=scaled(5)) as response:
                return bool(response.status == 200)
        except urllib.error.HTTPError as error:  # 503
            error.close()
            return False
        except OSError:  # nobody listens yet
            return False

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ApiClient]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            yield ApiClient(session, self)


@dataclass
class ServedChoice:
    """One choice of an answer. ``top`` holds the log-probabilities of the most likely tokens per position, in falling
    order."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)
    chunks: int = 0


@dataclass
class ServedAnswer:
    """An answer. ``prompt`` holds the ids of the prompt that each choice continues."""

    status: int
    headers: dict[str, str]
    choices: list[ServedChoice]
    prompt: list[int]
    usage: dict[str, Any]
    metrics: dict[str, Any]
    body: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def path(self) -> str:
        return self.headers["x-tandem-path"]

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class ApiClient:
    """A user of one system."""

    def __init__(self, session: aiohttp.ClientSession, system: RunningSystem) -> None:
        self.session, self.system = session, system

    # -- generating ---------------------------------------------------------------------------------------------------

    async def post(self, path: str, **fields: Any) -> aiohttp.ClientResponse:
        """Send one request as it is; the caller reads the response."""
        return await self.session.post(path, json={"model": self.system.name, **fields})

    async def complete(self, prompt: Sequence[int] | str, **fields: Any) -> ServedAnswer:
        """POST /v1/completions, not streaming; AssertionError unless 200."""
        return await self._whole("/v1/completions", prompt=prompt, **fields)

    async def chat(self, text: str, **fields: Any) -> ServedAnswer:
        """POST /v1/chat/completions with one user message, not streaming."""
        return await self._whole("/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)

    async def stream(
        self, prompt: Sequence[int] | str, *, begun: asyncio.Future[Mapping[str, str]] | None = None, **fields: Any
    ) -> ServedAnswer:
        """POST /v1/completions, streaming; return all chunks as one answer. ``begun`` receives the response headers."""
        fields = {"stream_options": {"include_usage": True}, **fields}
        response = await self.post("/v1/completions", prompt=prompt, stream=True, return_token_ids=True, **fields)
        async with response:
            assert response.status == 200, await response.text()
            if begun is not None:
                begun.set_result(response.headers)
            answer = ServedAnswer(200, dict(response.headers), [], [], {}, {}, {})
            async for event in events(response):
                assert "error" not in event, event
                answer.usage = event.get("usage") or answer.usage
                answer.metrics = event.get("tandem") or answer.metrics
                for part in event["choices"]:
                    while len(answer.choices) <= part["index"]:
                        answer.choices.append(ServedChoice())
                    _add_chunk(answer, answer.choices[part["index"]], part)
            return answer

    async def _whole(self, path: str, **fields: Any) -> ServedAnswer:
        response = await self.post(path, return_token_ids=True, **fields)
        async with response:
            body = await response.json()
            assert response.status == 200, body
            choices = [_choice(part) for part in body["choices"]]
            prompt = body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]
            headers = dict(response.headers)
            return ServedAnswer(200, headers, choices, prompt, body["usage"], body.get("tandem", {}), body)

    # -- looking ------------------------------------------------------------------------------------------------------

    async def ready(self) -> int:
        """Return the status of GET /ready, 0 if nothing listens."""
        try:
            async with self.session.get("/ready") as response:
                return response.status
        except aiohttp.ClientConnectionError:
            return 0

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return the workers in GET /admin/workers, by id."""
        async with self.session.get("/admin/workers") as response:
            assert response.status == 200, await response.text()
            return {worker["id"]: worker for worker in (await response.json())["workers"]}

    async def until_idle(self, within_s: float, *, since_now: bool = False) -> None:
        """Wait until no worker holds a block or has work; AssertionError with the state after ``within_s``. With
        ``since_now``, only heartbeats received after this call count."""
        within_s = scaled(within_s)
        began = asked = time.monotonic()
        deadline = began + within_s

        def idle(worker: dict[str, Any]) -> bool:
            reported = not since_now or worker["heard_ms"] / 1000 < asked - began
            return reported and _idle(worker)

        while busy := [worker for worker in (await self.workers()).values() if not idle(worker)]:
            assert time.monotonic() < deadline, f"not idle within {within_s} s: {busy}\n{self.system.process.text}"
            await asyncio.sleep(0.05)
            asked = time.monotonic()


def _idle(worker: dict[str, Any]) -> bool:
    blocks = worker["kv_blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["held"] == blocks["total"], blocks
    return not (blocks["held"] or worker["running"] or worker["waiting"])


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of a server-sent event stream, and check that it ends with [DONE]."""
    done = False
    async for line in response.content:
        if line.startswith(b"data: "):
            assert not done, "something after [DONE]"
            if line.strip() == b"data: [DONE]":
                done = True
            else:
                yield json.loads(line[6:])
    assert done, "the stream ended without [DONE]"


def _choice(part: dict[str, Any]) -> ServedChoice:
    choice = ServedChoice(part["token_ids"], part.get("text", ""), part["finish_reason"])
    if "message" in part:
        choice.text = part["message"]["content"]
    _add_logprobs(choice, part["logprobs"])
    return choice


def _add_chunk(answer: ServedAnswer, choice: ServedChoice, part: dict[str, Any]) -> None:
    answer.prompt = part.get("prompt_token_ids") or answer.prompt
    assert choice.finish_reason is None, "a chunk after the finish reason"
    choice.token_ids += part.get("token_ids", [])
    choice.text += part["text"]
    choice.finish_reason = part["finish_reason"]
    choice.chunks += bool(part.get("token_ids"))
    _add_logprobs(choice, part["logprobs"])


def _add_logprobs(choice: ServedChoice, logprobs: dict[str, Any] | None) -> None:
    """Read both of OpenAI's formats: chat's list, and the columns of completions, where top tokens may share a text."""
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            choice.logprobs.append(entry["logprob"])
            choice.top.append([top["logprob"] for top in entry["top_logprobs"]])
    else:
        choice.logprobs += logprobs["token_logprobs"]


_OTHER_FIELDS = {"n", "cache_salt", "stop", "stream", "echo", "priority", "return_token_ids", "return_metrics"}
"""Fields of requests here that are not the sampler's."""
SEED_MASK = (1 << 64) - 1  # the API accepts negative seeds and takes them modulo 2**64


def sampling_of(fields: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters that a request with these JSON fields asks for."""
    known = set(SamplingParams.__struct_fields__)
    assert fields.keys() <= known | _OTHER_FIELDS, "a field that the reference would not see"
    converted = {"seed", "logit_bias", "stop_token_ids", "logprobs", "allowed_token_ids"}
    chosen = {name: value for name, value in fields.items() if name in known - converted}
    bias = {int(token): float(value) for token, value in fields.get("logit_bias", {}).items()}
    stops = tuple(fields.get("stop_token_ids", ()))
    chosen["seed"] = fields.get("seed", 0) & SEED_MASK
    chosen["allowed_token_ids"] = pack_tokens(fields.get("allowed_token_ids", ()))
    return SamplingParams(**chosen, logit_bias=bias, stop_token_ids=stops, eos_token_ids=(EOS,))
