"""The client's end of a request: what happens with tokens when they arrive.

A reply collects the records of one HTTP request. :class:`WholeReply` gathers, :class:`StreamReply` writes one chunk per
token straight into the connection (no task is woken for a token). Both end in exactly one way: complete, or one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.core.errors import RequestError
from common.core.request import FinishReason
from common.net.messages import Logprobs
from coordinator.api.response_encoder import Choice, Shape, Usage, encode
from coordinator.requests.record import RequestRecord
from coordinator.requests.spec import Json, Options

DONE = b"data: [DONE]\n\n"


def error_body(error: RequestError) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


class Reply:
    """Base of both replies, of ``count`` choices of all ``records``, in OpenAI's order.

    ``make`` makes a choice from its index when its first tokens come: a request that is refused costs little."""

    def __init__(self, options: Options, shape: Shape, count: int, make: Callable[[int], Choice]) -> None:
        self.options, self.shape = options, shape
        self._count, self._make = count, make
        self._choices: dict[int, Choice] = {}
        self._completion_tokens = 0
        self.records: list[RequestRecord] = []
        self.error: RequestError | None = None
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Resolved with the first token, with the end, or when headers should not wait any longer (:meth:`start`)."""
        self.finished: asyncio.Future[None] = loop.create_future()
        self._first: dict[bytes, int] = {}
        self._left = 0

    @property
    def told(self) -> bool:
        """Whether the client has seen anything of the answer."""
        return False

    def expect(self, records: Sequence[RequestRecord]) -> None:
        """The records whose tokens will come, in the order of their choices."""
        self.records = list(records)
        self._left = len(records)
        at = 0
        for record in records:
            self._first[record.id] = at
            at += record.n

    def choice(self, index: int) -> Choice:
        """The choice at ``index``, made if it is new."""
        if index not in self._choices:
            self._choices[index] = self._make(index)
        return self._choices[index]

    def usage(self) -> Usage:
        """What was used so far."""
        return Usage(
            prompt=sum(record.prompt_length for record in self.records),
            completion=self._completion_tokens,
            cached=sum(int(record.timings.get("cached_tokens", 0)) for record in self.records),
        )

    def metrics(self) -> Json:
        """The extra member ``tandem`` if it was asked for."""
        return {"tandem": measured(self.records[0])} if self.options.return_metrics else {}

    # -- from the dispatcher ------------------------------------------------------------------------------------------

    def tokens(
        self,
        record: RequestRecord,
        choice: int,
        ids: list[int],
        logprobs: Sequence[Logprobs | None],
        finish: FinishReason,
    ) -> bool:
        mine = self.choice(self._first[record.id] + choice)
        if mine.stopped or self.error is not None:
            return False
        self._feed(mine, ids, logprobs, finish)
        self.start()
        return finish is FinishReason.RUNNING and mine.stopped

    def start(self) -> None:
        """Whoever waits for the beginning of the answer need not wait longer. Idempotent."""
        if not self.started.done():
            self.started.set_result(None)

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        """Takes and counts new tokens of ``choice``."""

    def done(self, record: RequestRecord) -> None:
        self._left -= 1
        if self._left == 0 and self.error is None:
            self._complete()
            self._settle()

    def failed(self, record: RequestRecord, error: RequestError) -> None:
        if self.error is None and not self.finished.done():
            self.error = error
            self._broken(error)
            self._settle()

    def _complete(self) -> None:
        """Every choice has ended well."""

    def _broken(self, error: RequestError) -> None:
        """The request has failed."""

    def _settle(self) -> None:
        self.start()
        if not self.finished.done():
            self.finished.set_result(None)


class WholeReply(Reply):
    """Gathers everything, log-probabilities as JSON; the body is made at the end."""

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        keep = self.shape.keep_logprobs if self.options.sampling.logprobs is not None else None
        for piece in choice.feed(ids, logprobs, finish):
            self._completion_tokens += 1
            if keep is not None:
                keep(choice, piece)

    def body(self) -> Json:
        return {
            **self.shape.whole([self.choice(index) for index in range(self._count)], self.usage()),
            **self.metrics(),
        }


class StreamReply(Reply):
    """Writes chunks as tokens come. Until :meth:`open` they are kept: headers are sent with the first of them."""

    def __init__(self, options: Options, shape: Shape, count: int, make: Callable[[int], Choice]) -> None:
        super().__init__(options, shape, count, make)
        self._early: list[bytes] = []
        self._write: Callable[[bytes], None] = self._early.append
        self._last = count - 1
        self._running = count
        self.opened = False

    @property
    def told(self) -> bool:
        return self.started.done()

    @property
    def refused(self) -> bool:
        """Failed before anything was said: the error can still be the response."""
        return self.error is not None and not self._early

    def open(self, write: Callable[[bytes], None]) -> bytes:
        """From now on chunks go to ``write``; returns those that have come so far."""
        self._write, self.opened = write, True
        return b"".join(self._early)

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        continuous = self.options.continuous_usage
        chunks = []
        for piece in choice.feed(ids, logprobs, finish):
            self._completion_tokens += 1
            chunks.append(self.shape.chunk(choice, piece, self.usage() if continuous else None))
        if choice.finish_reason is not None:
            self._running -= 1
            if self._running == 0:  # its finish chunk carries the metrics, which are complete when the request is done
                self._last = choice.index
            else:
                chunks.append(self.shape.end(choice, self.usage() if continuous else None, {}))
        self._write(b"".join(chunks))

    def _complete(self) -> None:
        usage, metrics = self.usage(), self.metrics()
        wants_usage, continuous = self.options.include_usage, self.options.continuous_usage
        last = self.shape.end(self.choice(self._last), usage if continuous else None, {} if wants_usage else metrics)
        self._write(last + (self.shape.usage(usage, metrics) if wants_usage else b"") + DONE)

    def _broken(self, error: RequestError) -> None:
        if self.opened or self._early:
            self._write(b"data: " + encode(error_body(error)) + b"\n\n" + DONE)


def measured(record: RequestRecord) -> Json:
    """``tandem`` of a response with ``return_metrics``: ms by stage. What of the time to first token was neither
    tokenising nor computing the prompt was waiting, here or on the worker. Null is what is not known:
    prefill tells of a hand-off when decode has taken it, which a short answer may not wait for."""
    timings = record.timings
    first = record.first_token_at if record.first_token_at is not None else record.arrived_at
    ttft = (first - record.arrived_at) * 1000
    tokenize = (record.tokenized_at - record.arrived_at) * 1000
    prefill = min(timings.get("prefill_ms", 0.0), ttft - tokenize)
    later = record.output_length - record.n
    span = (max(record.last_token_at) - first) * 1000
    placement = record.placement
    told = record.path != "disagg" or "kv_bytes" in timings
    on = placement.prefill or placement.decode if placement else None
    decoder = placement.decode if placement and record.path != "prefill" else None
    return {
        "queue_ms": round(ttft - tokenize - prefill, 3),
        "tokenize_ms": round(tokenize, 3),
        "prefill_ms": round(prefill, 3),
        "transfer_ms": round(timings.get("transfer_ms", 0.0), 3) if told else None,
        "transfer_exposed_ms": round(timings.get("transfer_exposed_ms", 0.0), 3) if told else None,
        "kv_bytes": int(timings.get("kv_bytes", 0)) if told else None,
        "decode_wait_ms": round(timings.get("decode_wait_ms", 0.0), 3),
        "ttft_ms": round(ttft, 3),
        "itl_ms_mean": round(span * record.n / later, 3) if later > 0 else 0.0,
        "path": record.path,
        "prefill": on.hello.name if on else None,
        "decode": decoder.hello.name if decoder else None,
        "why": placement.why if placement else "",
    }
