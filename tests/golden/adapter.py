"""The interface of the frozen parts to the modules under test, so that a rename changes only this file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from tests.golden.troubles import trouble

# -- simulated histories ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(sent: Callable[[float, str, str, list[bytes]], None], ended: Callable[..., None]) -> Iterator[None]:
    """Report what is simulated in the block.

    ``sent`` is called with each message (time, sender, receiver, parts without the leading digest), ``ended`` with the
    end of each request (time, number, how it ended, output of each choice)."""
    from common.net.wire import DIGEST_BYTES
    from tests.simulation.network import SimulatedConnection
    from tests.simulation.system import SimulatedClient

    carry, end = SimulatedConnection.carry, SimulatedClient._end

    def carried(self: Any, sender: Any, receiver: Any, parts: list[bytes]) -> None:
        now, names = self.network.clock.now + sender.process.spent, (sender.process.name, receiver.process.name)
        sent(now, *names, parts if len(parts) > 1 else [parts[0][DIGEST_BYTES:]])
        carry(self, sender, receiver, parts)

    def has_ended(self: Any, how: str) -> None:
        ended(self.system.clock.now, self.number, how, self.output)
        end(self, how)

    with (
        mock.patch.object(SimulatedConnection, "carry", carried),
        mock.patch.object(SimulatedClient, "_end", has_ended),
    ):
        yield


def play(seed: int) -> None:
    """Play the history of ``seed``. Raises if an invariant is violated."""
    from tests.simulation.play import run

    run(seed)


def tags() -> list[str]:
    """Return the tags of all messages."""
    return list(wire()["messages"])


def mutations() -> list[str]:
    """Return the names of the known bugs."""
    from tests.simulation.mutations import MUTATIONS

    return list(MUTATIONS)


def kinds() -> int:
    """Return the number of kinds of histories, which take turns."""
    from tests.simulation.play import KINDS

    return len(KINDS)


def catches(name: str, seed: int) -> bool:
    """Return whether the history of ``seed`` with the bug ``name`` fails with one of the bug's symptoms."""
    from tests.simulation.mutations import MUTATIONS, brought_back

    with brought_back(name):
        try:
            play(seed)
        except Exception as error:  # broken code may raise anything
            complaint = str(error) or repr(error)
            return any(symptom in complaint for each in MUTATIONS[name] for symptom in each.symptoms)
    return False


# -- a coordinator over HTTP ------------------------------------------------------------------------------------------


class ServedSystem(NamedTuple):
    """A coordinator with fake workers. ``asked`` waits for so many requests to reach workers, and returns those that
    arrived since the last call."""

    port: int
    asked: Callable[[int], Awaitable[list[dict[str, Any]]]]
    labels: Callable[[], dict[str, list[tuple[str, ...]]]]
    """The declared label names by metric, also of metrics without samples."""
    metrics: Callable[[], Awaitable[str]]
    """The metrics page, once no request is left and all workers have sent a heartbeat."""


@contextlib.asynccontextmanager
async def serve(model: Path, roles: Sequence[Any], options: dict[str, Any]) -> AsyncIterator[ServedSystem]:
    """Serve over HTTP with fake workers of these roles.

    ``options`` are those of the coordinator, and: "fails", the code with which workers reject every request;
    "retriable", whether that failure may be retried; "slow", seconds between tokens; "draining", whether the server is
    shutting down; "full", whether the queue is full; "template", the chat template ("": none); "workers", options of
    fake workers by role; "trouble", a fault (:mod:`tests.golden.troubles`)."""
    from common.net.messages import Generate, Prefill, RequestFailed
    from tests.fakes.checkpoint import EOS
    from tests.fakes.worker import formula
    from tests.unit.coordinator.fake_cluster import open_cluster, until

    options = dict(options)
    code, slow, draining = options.pop("fails", ""), options.pop("slow", 0.0), options.pop("draining", False)
    retriable, template = options.pop("retriable", False), options.pop("template", None)
    full, more, wrong = options.pop("full", False), options.pop("workers", {}), options.pop("trouble", "")
    refuse = RequestFailed(bytes(16), 0, code, "5 tokens fit", retriable) if code else None  # type: ignore[arg-type]
    if template is not None:
        model = _with_template(model, template)

    def opened(record: Any) -> bool:
        return getattr(record.client, "opened", True)

    async with open_cluster(model, **options) as cluster, _longest_jitter():
        records = cluster.dispatcher.records

        def script(request: Any, choice: int, position: int) -> int:
            """Delay the second token until the first has been written; otherwise the number of tokens in a stream's
            first chunk is a matter of timing."""
            patience = time.monotonic() + 10.0
            while position and not all(map(opened, list(records.values()))) and time.monotonic() < patience:
                time.sleep(0.0005)  # in the worker's own thread
            return formula(request, choice, position) if position < 8 else EOS

        def after_prefill(timings: Callable[[], Any]) -> Callable[[], Any]:
            """Delay the timings of decode until prefill's first token has arrived; otherwise their order, which shows
            in headers and metrics, is a matter of timing."""

            def waits() -> Any:
                patience = time.monotonic() + 10.0
                while not all(each.output_length for each in list(records.values())) and time.monotonic() < patience:
                    time.sleep(0.0005)  # in the worker's own thread
                return timings()

            return waits

        for role in roles:
            worker: Any = await cluster.add(role, script=script, step_s=slow, refuse=refuse, **more.get(role, {}))
            if role == "decode":
                worker._timings = after_prefill(worker._timings)
        await until(lambda: all(each.beat for each in cluster.dispatcher.registry), "every worker was heard")
        cluster.dispatcher.draining = draining
        admission = cluster.dispatcher.admission
        waiting = admission.max_requests if full else 0
        admission.requests += waiting
        enter, now = admission.enter, time.monotonic()
        if full:  # the estimated wait depends on the time of the call, so fix that time
            admission.enter = lambda count, tokens, _, **rest: enter(count, tokens, now, **rest)  # type: ignore[method-assign]
        seen = 0

        def begun() -> list[Any]:
            return [each for worker in cluster.workers for kind in (Generate, Prefill) for each in worker.got(kind)]

        async def asked(count: int) -> list[dict[str, Any]]:
            nonlocal seen
            await until(lambda: len(begun()) >= seen + count, f"workers get {count} requests")
            found = begun()[seen:]
            seen += len(found)
            return [_asked(each.request) for each in found]

        def labels() -> dict[str, list[tuple[str, ...]]]:
            collectors = cluster.services.metrics.registry._collector_to_names.items()
            named = [(names, declared) for each, names in collectors if (declared := getattr(each, "_labelnames", ()))]
            return {name: [declared] for names, declared in named for name in names}

        async def metrics() -> str:
            workers = cluster.dispatcher.registry
            await until(lambda: not records and all(each.beat for each in workers), "all is quiet")
            cluster.services.metrics._pages_left = 1.0  # else it may be the page of an earlier request
            return cluster.services.metrics.page().decode()

        async with trouble(wrong, cluster):
            yield ServedSystem(int(cluster.url.rpartition(":")[2]), asked, labels, metrics)
        admission.requests -= waiting


@contextlib.asynccontextmanager
async def _longest_jitter() -> AsyncIterator[None]:
    """Make retry times the longest that their jitter may draw: they are constant then, and show the jitter's share."""
    from coordinator.http import middleware

    with mock.patch.object(middleware, "_RANDOM") as random:
        random.uniform = lambda low, high: high
        yield


@contextlib.contextmanager
def watched_refusals() -> Iterator[set[tuple[str, int, str]]]:
    """Collect (file, line, called name) of every stack frame that leads to a RequestError made in the block."""
    from common.core.errors import RequestError

    found: set[tuple[str, int, str]] = set()
    made = RequestError.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        called, frame = RequestError.__name__, sys._getframe(1)
        while frame is not None:
            found.add((frame.f_code.co_filename, frame.f_lineno, called))
            called, frame = frame.f_code.co_name, frame.f_back  # type: ignore[assignment]

    with mock.patch.object(RequestError, "__init__", init):
        yield found


def _asked(request: Any) -> dict[str, Any]:
    """Return the fields of a request, taken by their position on the wire, since their names may change."""
    _, prompt, sampling, choices, _, salt, priority, *_ = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    most, seed, *rest = sampling
    rest = [_tokens(each) if isinstance(each, bytes) else each for each in rest]
    of = [choices, salt, priority]
    return {"prompt": _tokens(prompt), "max_tokens": most, "seed": seed, "sampling": rest, "of": of}


def _tokens(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


def fake_model(directory: Path) -> Path:
    from tests.fakes.checkpoint import fake_checkpoint

    return fake_checkpoint(directory, temperature=0.7, top_k=20)


def _with_template(model: Path, template: str) -> Path:
    copy = model.with_name(f"template-{len(template)}")
    shutil.copytree(model, copy, dirs_exist_ok=True)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (copy / "tokenizer_config.json").write_text(
        json.dumps(settings | ({"chat_template": template} if template else {}))
    )
    return copy


def version() -> str:
    from coordinator.api.service import product_version

    return product_version()


# -- bytes between processes ------------------------------------------------------------------------------------------


def wire() -> dict[str, Any]:
    from tests.property.test_wire import golden

    return golden()


# -- the command line -------------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """Return the flags of each command with their values; not the help, whose layout differs by Python version."""
    from deploy.cli.main import build_parser

    return {name: [_flag(each) for each in parser._actions] for name, parser in build_parser()[1].items()}


def _flag(action: Any) -> str:
    named = " ".join(action.option_strings) or action.dest
    takes = action.metavar or action.choices or ("" if action.nargs == 0 else "VALUE")
    return " ".join(str(each) for each in (named, takes, action.nargs) if each not in ("", None, 0))


def tandem(words: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """Run ``tandem WORDS`` with no other TANDEM_* variables than these; return exit code, stdout and stderr."""
    from deploy.cli.main import main

    clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with mock.patch.dict(os.environ, clean | variables, clear=True), streams[0], streams[1]:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


# -- tokens of models -------------------------------------------------------------------------------------------------


class Generator:
    """Generates answers of one tiny model with the real engine, in float32 and one request at a time."""

    def __init__(self, kind: str, directory: Path) -> None:
        import torch

        from common.checkpoint.files import open_checkpoint
        from common.engine.loading import load_engine
        from tests.models import make_model

        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        checkpoint = open_checkpoint(str(make_model(kind, directory)))
        self._engine = load_engine(
            checkpoint, num_kv_blocks=16, dtype="float32", max_batched_tokens=64, max_num_seqs=4, batch_hint=1,
            max_model_len=128,
        )  # fmt: skip

    def close(self) -> None:
        import torch

        self._engine.close()
        torch.set_num_threads(self._threads)

    def tokens(self, prompt: list[int], seed: int, fields: dict[str, Any], count: int) -> list[int]:
        from common.core.sequence import Batch, Segment

        sequence = _sequence(prompt, seed, fields, count)
        for _ in range(count):
            segment = Segment(sequence, sequence.computed, sequence.missing)
            result = self._engine.step(Batch((segment,), (_TABLE,)))
            assert not result.errors, result.errors
            sequence.computed = len(sequence.tokens)
            sequence.append(result.tokens[0][0])
        return list(sequence.output)

    def certain(self, prompt: list[int], seed: int, fields: dict[str, Any], tokens: list[int], errors: Any) -> bool:
        """Return whether each of ``tokens`` is sampled with any of ``errors`` added to its logits.

        ``errors``: [trials, vocabulary], in standard deviations of the logits."""
        import torch

        from common.core.sequence import Batch, Segment
        from common.engine.batch import rows_to_sample
        from common.engine.sampler import sample

        sequence = _sequence(prompt, seed, fields, len(tokens))
        for token in tokens:
            batch = Batch((Segment(sequence, sequence.computed, sequence.missing),), (_TABLE,))
            logits = self._engine.logits(batch).float()
            rows = rows_to_sample(batch, [0], logits.shape[1])
            with torch.inference_mode():
                for error in errors:
                    if sample(logits + logits.std() * torch.as_tensor(error), rows)[0] != [token]:
                        return False
            sequence.computed = len(sequence.tokens)
            sequence.append(token)
        return True


_TABLE: Any = list(range(4))


def sampling_fields() -> int:
    """Return the number of sampling parameters in a message."""
    from common.core.request import SamplingParams

    return len(SamplingParams.__struct_fields__)


def step_sizes() -> tuple[str, ...]:
    """Return the names of the counters of steps by size in heartbeats."""
    from common.net.messages import STEPS_OF

    return STEPS_OF


def _sequence(prompt: list[int], seed: int, fields: dict[str, Any], count: int) -> Any:
    from common.core.ids import new_request_id, pack_tokens
    from common.core.request import Request, SamplingParams
    from common.core.sequence import Sequence

    sampling = SamplingParams(max_tokens=count, seed=seed, ignore_eos=True, **fields)
    return Sequence(Request(new_request_id(), pack_tokens(prompt), sampling), 0)


# -- changes that must be noticed -------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A change of the product, and where it must show: the part, the entry, and text of the complaint."""

    part: str
    key: str
    shown: str
    made: Callable[[], contextlib.AbstractContextManager[Any]]


def _other_code() -> Any:
    from coordinator.http import middleware

    original = middleware.error_body

    def body(error: Any) -> Any:
        error.code = "no_workers" if error.code == "no_decode_workers" else error.code
        return original(error)

    return mock.patch.object(middleware, "error_body", body)


def _no_header() -> Any:
    from coordinator.http import middleware

    original = middleware.json_response
    return mock.patch.object(
        middleware, "json_response", lambda body, **options: original(body, status=options["status"])
    )


def _other_metric() -> Any:
    from coordinator import pool_metrics

    original = pool_metrics.CounterMetricFamily
    renamed = {"tandem_bad_messages": "tandem_bad_message"}

    def other(name: str, *rest: Any, **more: Any) -> Any:
        return original(renamed.get(name, name), *rest, **more)

    return mock.patch.object(pool_metrics, "CounterMetricFamily", other)


def _other_default() -> Any:
    import dataclasses

    from common.config.up import UpConfig

    field = next(each for each in dataclasses.fields(UpConfig) if each.name == "block_size")
    return mock.patch.object(field, "default", 32)


def _other_token() -> Any:
    from common.engine import runner

    original = runner.sample

    def changed(logits: Any, rows: Any) -> Any:
        tokens, logprobs = original(logits, rows)
        return [token ^ 1 for token in tokens], logprobs

    return mock.patch.object(runner, "sample", changed)


def _other_bytes() -> Any:
    from kvtransfer.frames import FrameHeader

    original = FrameHeader.pack
    return mock.patch.object(FrameHeader, "pack", lambda self: original(self)[::-1])


def _other_field() -> Any:
    from coordinator.cluster.gateway import Gateway

    original = Gateway.send

    def send(self: Any, worker: Any, message: Any) -> bool:
        if type(message).__name__ == "Lease":
            message = msgspec.structs.replace(message, sent=message.sent + 1)
        return original(self, worker, message)

    return mock.patch.object(Gateway, "send", send)


def _other_order() -> Any:
    from coordinator.cluster.gateway import Gateway

    original = Gateway.send
    held: list[tuple[Any, Any]] = []

    def send(self: Any, worker: Any, message: Any) -> bool:
        """Swap the first two messages."""
        held.append((worker, message))
        if len(held) == 2:
            for each in reversed(held):
                original(self, *each)
        return original(self, worker, message) if len(held) > 2 else True

    return mock.patch.object(Gateway, "send", send)


def _other_chunks() -> Any:
    from coordinator.http.sse import EventStream

    original = EventStream.send

    def send(self: Any, data: bytes) -> None:
        for at in range(len(data)):
            original(self, data[at : at + 1])

    return mock.patch.object(EventStream, "send", send)


def _joined_chunks() -> Any:
    from coordinator.http.sse import EventStream

    original = EventStream.send
    held: list[bytes] = []

    def send(self: Any, data: bytes) -> None:
        """Join the second and third piece into one chunk."""
        held.append(data)
        if len(held) != 2:
            original(self, b"".join(held[1:]) if len(held) == 3 else data)

    return mock.patch.object(EventStream, "send", send)


def _other_retry() -> Any:
    from coordinator.http import middleware

    original = middleware._retry_headers
    return mock.patch.object(middleware, "_retry_headers", lambda seconds: original(1.01 * seconds))


def _other_reason() -> Any:
    from coordinator.http import middleware

    original = middleware.web.Response
    return mock.patch.object(middleware.web, "Response", lambda **options: original(reason="Fine", **options))


def _other_outcome() -> Any:
    from coordinator.metrics import Metrics

    original = Metrics.ended
    renamed = {"aborted": "cancelled"}
    return mock.patch.object(
        Metrics, "ended", lambda self, record, outcome: original(self, record, renamed.get(outcome, outcome))
    )


CHANGES = {
    "an error code": Change("transcripts", "empty /v1/completions stream=False", "no_workers", _other_code),
    "a header": Change("transcripts", "keys: GET /v1/models with none", "is another", _no_header),
    "chunks of a byte": Change("transcripts", "pair /v1/completions streamed {}", "broken events", _other_chunks),
    "chunks of two tokens": Change("transcripts", "pair /v1/completions streamed {}", "whole events", _joined_chunks),
    "the server's name": Change(
        "transcripts",
        "GET /health",
        "server: other",
        lambda: mock.patch("coordinator.http.application.SERVER", "other"),
    ),
    "a retry time": Change(
        "transcripts", "draining /v1/chat/completions stream=False", "retry-after-ms: ", _other_retry
    ),
    "a reason phrase": Change("transcripts", "GET /health", "HTTP/1.1 200 Fine", _other_reason),
    "an outcome": Change("transcripts", "label values: leaving", "outcome=cancelled", _other_outcome),
    "a metric's name": Change("metrics", "tandem_bad_messages_total", "1 are gone", _other_metric),
    "a flag's default": Change("commands", "up: alone", "+out: block_size 32 default", _other_default),
    "a sampled token": Change("tokens", "llama: 5 tokens, seeded", "+tokens", _other_token),
    "bytes beside messages": Change("wire", "beside messages: frame header", "@@", _other_bytes),
    "a field of a message": Change("histories", "0", " lease ", _other_field),
    "the order of two messages": Change("histories", "0", "is another", _other_order),
}
"""Changes of one thing each, which the golden tests must detect."""
