"""The types of answers of the endpoints that generate no text, as :mod:`deploy.cli.answer_types` has the others."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from deploy.cli.answer_types import Answer


class Front(Answer):
    """What is served here."""

    server: str
    version: str
    model: str
    endpoints: list[str]


class Model(Answer):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """All served models."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(Answer):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class Status(Answer):
    """That the server runs, or is ready."""

    status: Literal["ok", "ready"]


class Version(Answer):
    """Tandem's version."""

    version: str


class KvBlocks(Answer):
    """The states of a worker's KV blocks, which add up to ``total``."""

    total: int
    free: int
    cached: int
    held: int


class Worker(Answer):
    """A worker: what it is, what it does, and its memory."""

    id: str
    role: Literal["prefill", "decode", "colocated"]
    state: str
    pid: int
    host: str
    model: str
    kv_blocks: KvBlocks
    block_size: int
    running: int
    waiting: int
    waiting_tokens: int
    turn_ms: int | None
    heard_ms: int
    clock_ms: int | None
    incarnation: str
    links: list[dict[str, Any]]
    transports: list[str]
    avoids: list[str]
    device: str
    dtype: str
    gpus: list[dict[str, Any]]
    counters: dict[str, float]


class AbsentWorker(Answer):
    """A worker that should be there."""

    id: str
    why: str
    for_s: float
    restart_in_s: float | None


class PoolSizes(Answer):
    """Numbers of workers."""

    prefill: int
    decode: int
    colocated: int


class Workers(Answer):
    """All workers. ``expected`` is the configured size of each pool, 0 where none is."""

    workers: list[Worker]
    absent: list[AbsentWorker]
    model: str
    expected: PoolSizes


class BetweenTokens(Answer):
    """The intervals between two tokens of a choice in milliseconds: their mean, 99th percentile and maximum."""

    mean: float
    p99: float
    max: float


class ListedRequest(Answer):
    """A request. Times are in milliseconds since its arrival, null while they are not known; ``arrived`` is in seconds
    since the epoch. ``id`` is that of its answer, ``request_id`` the ``x-request-id``. ``finish`` has the reason of
    each choice, null while it runs. ``retries`` and ``migrations`` count new attempts before and after the first
    token."""

    id: str
    request_id: str
    trace_id: str | None
    endpoint: str
    arrived: float
    state: Literal["queued", "placed", "prefilling", "shipping", "decoding", "done", "aborted", "failed"]
    path: Literal["disagg", "local", "colocated", "prefill"] | None
    stream: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    finish: list[str | None]
    error: str | None
    retries: int
    migrations: int
    ttft_ms: float | None
    total_ms: float | None
    itl_ms: BetweenTokens | None


class RequestSpan(Answer):
    """A part of a request's time; ``end_ms`` is null while it lasts. ``parent`` is the index of the span that it is
    part of. What ``detail`` has depends on ``name``."""

    name: Literal[
        "tokenize", "queue", "place", "prefill", "prefill_chunk", "transfer", "decode", "stall", "retry", "migration"
    ]
    start_ms: float
    end_ms: float | None
    attempt: int
    worker: str | None
    parent: int | None
    detail: dict[str, Any]


class TracedRequest(ListedRequest):
    """A request with the spans in which its time was spent, in order of their starts. ``now_ms`` is the time of the
    answer, while the request runs."""

    spans: list[RequestSpan]
    now_ms: float | UnsetType = UNSET


class Requests(Answer):
    """The last requests, the latest first."""

    requests: list[ListedRequest]


class Drained(Answer):
    """A drain that has begun."""

    worker: str
    timeout: float


class Scaled(Answer):
    """The sizes of the pools."""

    prefill: int
    decode: int


class MeasuredLink(Answer):
    """The rate of a large trial hand-off in megabytes per second, and the milliseconds of a small one."""

    from_: str = msgspec.field(name="from")
    to: str
    transport: str
    mb_s: float | None
    ms: float | None


class MeasuredLinks(Answer):
    """All links that are measured."""

    links: list[MeasuredLink]
