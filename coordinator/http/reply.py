"""Replies: the consumers of the tokens of one HTTP request.

A reply serves all records of one HTTP request. :class:`WholeReply` collects the tokens; :class:`StreamReply` writes one
chunk per token directly to the connection, without waking a task per token. Each reply ends exactly once, complete or
with one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.core.errors import RequestError
from common.core.prompt_span import PromptSpan
from common.core.request import FinishReason
from common.net.messages import Logprobs
from coordinator.api.choice import Choice
from coordinator.api.shape import Shape, Usage
from coordinator.requests.record import RequestRecord
from coordinator.requests.spec import Json, Options


class Reply:
    """Base class of both replies. ``count`` is the number of choices of all records together, in OpenAI's order.

    ``make`` builds the choice of an index. It is called when the first tokens of the choice arrive, so that a refused
    request costs little."""

    def __init__(self, options: Options, shape: Shape, count: int, make: Callable[[int], Choice]) -> None:
        self.options, self.shape = options, shape
        self._count, self._make = count, make
        self._choices: dict[int, Choice] = {}
        self._completion_tokens = 0
        self.records: list[RequestRecord] = []
        self.error: RequestError | None = None
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Resolved when the response may begin: at the first token, at the end, or by :meth:`start` after a timeout."""
        self.finished: asyncio.Future[None] = loop.create_future()
        self._first: dict[bytes, int] = {}
        self._left = 0

    @property
    def partly_sent(self) -> bool:
        """Whether the client may have received a part of the response."""
        return False

    def expect(self, records: Sequence[RequestRecord]) -> None:
        """Set the records of this reply, in the order of their choices."""
        self.records = list(records)
        self._left = len(records)
        at = 0
        for record in records:
            self._first[record.id] = at
            at += record.n

    def choice(self, index: int) -> Choice:
        """Return the choice at ``index``, building it on first use."""
        if index not in self._choices:
            self._choices[index] = self._make(index)
        return self._choices[index]

    def usage(self) -> Usage:
        """Return the token counts so far."""
        reasoning = [each.reasoning_tokens for each in self._choices.values() if each.reasoning_tokens is not None]
        return Usage(
            prompt=sum(record.prompt_length for record in self.records),
            completion=self._completion_tokens,
            cached=sum(int(record.timings.get("cached_tokens", 0)) for record in self.records),
            reasoning=sum(reasoning) if reasoning else None,
        )

    def metrics(self) -> Json:
        """Return the extra member ``tandem`` if the client requested it (``return_metrics``), else {}."""
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
        """Process new tokens of ``choice`` of ``record``. Returns whether the choice has ended early, by a stop string,
        so that the workers can stop computing it."""
        mine = self.choice(self._first[record.id] + choice)
        if mine.stopped or self.error is not None:
            return False
        self._feed(mine, ids, logprobs, finish)
        self.start()
        return finish is FinishReason.RUNNING and mine.stopped

    def prompt_logprobs(self, record: RequestRecord, span: PromptSpan) -> None:
        """Process log-probabilities of the prompt of ``record``."""
        report = self.choice(self._first[record.id]).report
        if report is not None and self.error is None:
            report.add(span)

    def start(self) -> None:
        """Let the response begin. Idempotent."""
        if not self.started.done():
            self.started.set_result(None)

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        """Process and count new tokens of ``choice``."""

    def done(self, record: RequestRecord) -> None:
        """Count ``record`` as complete. After the last one the reply ends."""
        self._left -= 1
        if self._left == 0 and self.error is None:
            self._complete()
            self._settle()

    def failed(self, record: RequestRecord, error: RequestError) -> None:
        """End the whole reply with ``error``, unless it has ended already."""
        if self.error is None and not self.finished.done():
            self.error = error
            self._broken(error)
            self._settle()

    def _complete(self) -> None:
        """Called when all choices have ended without an error."""

    def _broken(self, error: RequestError) -> None:
        """Called once, when the first record fails."""

    def _settle(self) -> None:
        self.start()
        if not self.finished.done():
            self.finished.set_result(None)


class WholeReply(Reply):
    """Collects all text, and log-probabilities as JSON, and builds the body at the end."""

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        wanted = self.shape.needs_pieces or self.options.sampling.logprobs is not None
        keep = self.shape.keep if wanted else None
        for piece in choice.feed(ids, logprobs, finish):
            self._completion_tokens += 1
            if keep is not None:
                keep(choice, piece)

    def body(self) -> Json:
        """Return the response body. Call it once, at the end: it consumes the log-probabilities."""
        return {
            **self.shape.whole([self.choice(index) for index in range(self._count)], self.usage()),
            **self.metrics(),
        }


class StreamReply(Reply):
    """Writes a chunk per token. Chunks are buffered until :meth:`open`, because the headers must be sent first."""

    def __init__(self, options: Options, shape: Shape, count: int, make: Callable[[int], Choice]) -> None:
        super().__init__(options, shape, count, make)
        self._early: list[bytes] = []
        self._write: Callable[[bytes], None] = self._early.append
        self._last = count - 1
        self._running = count
        self._begun = self.opened = False

    @property
    def partly_sent(self) -> bool:
        return self.started.done()

    @property
    def refused(self) -> bool:
        """Whether the request failed before its first chunk, so that the error can still be the HTTP response."""
        return self.error is not None and not self._early

    def open(self, write: Callable[[bytes], None]) -> bytes:
        """Send further chunks to ``write``. Returns the chunks that were buffered so far."""
        self._write, self.opened = write, True
        return b"".join((*self._early, self._begin()))

    def _begin(self) -> bytes:
        """Return the events before the first chunk, once."""
        if self._begun:
            return b""
        self._begun = True
        return self.shape.begin(self.usage())

    def _feed(self, choice: Choice, ids: list[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> None:
        continuous = self.options.continuous_usage
        chunks = [] if self._begun else [self._begin()]
        for piece in choice.feed(ids, logprobs, finish):
            self._completion_tokens += 1
            chunks.append(self.shape.chunk(choice, piece, self.usage() if continuous else None))
        if choice.finish_reason is not None:
            self._running -= 1
            if self._running == 0:  # the last finish chunk carries the metrics: written when all records are done
                self._last = choice.index
            else:
                chunks.append(self.shape.end(choice, self.usage() if continuous else None, {}))
        self._write(b"".join(chunks))

    def _complete(self) -> None:
        usage, metrics = self.usage(), self.metrics()
        wants_usage, continuous = self.options.include_usage, self.options.continuous_usage
        last = self.shape.end(self.choice(self._last), usage if continuous else None, {} if wants_usage else metrics)
        self._write(last + (self.shape.usage(usage, metrics) if wants_usage else b"") + self.shape.done())

    def _broken(self, error: RequestError) -> None:
        if self.opened or self._early:
            self._write(self.shape.failed(error))


def measured(record: RequestRecord) -> Json:
    """Return the member ``tandem`` of a response with ``return_metrics``: milliseconds per stage of ``record``.

    ``queue_ms`` is the part of the time to first token that was neither tokenization nor prefill: waiting in the
    coordinator or on the worker. Transfer values are null if unknown: prefill reports a hand-off when decode has
    accepted it, and a short answer may end before that."""
    timings = record.timings
    first = record.first_token_at if record.first_token_at is not None else record.arrived_at
    ttft = (first - record.arrived_at) * 1000
    tokenize = (record.tokenized_at - record.arrived_at) * 1000
    prefill = min(timings.get("prefill_ms", 0.0), ttft - tokenize)
    later = record.output_length - record.n
    span = (max(record.last_token_at) - first) * 1000
    placement = record.placement
    complete = record.path != "disagg" or "kv_bytes" in timings
    on = placement.prefill or placement.decode if placement else None
    decoder = placement.decode if placement and record.path != "prefill" else None
    return {
        "queue_ms": round(ttft - tokenize - prefill, 3),
        "tokenize_ms": round(tokenize, 3),
        "prefill_ms": round(prefill, 3),
        "transfer_ms": round(timings.get("transfer_ms", 0.0), 3) if complete else None,
        "transfer_exposed_ms": round(timings.get("transfer_exposed_ms", 0.0), 3) if complete else None,
        "kv_bytes": int(timings.get("kv_bytes", 0)) if complete else None,
        "decode_wait_ms": round(timings.get("decode_wait_ms", 0.0), 3),
        "ttft_ms": round(ttft, 3),
        "itl_ms_mean": round(span * record.n / later, 3) if later > 0 else 0.0,
        "path": record.path,
        "prefill": on.hello.name if on else None,
        "decode": decoder.hello.name if decoder else None,
        "why": placement.why if placement else "",
    }
