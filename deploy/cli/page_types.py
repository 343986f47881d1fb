"""The types of answers of the endpoints that generate no text, as :mod:`deploy.cli.answer_types` has the others."""

from __future__ import annotations

from typing import Any, Literal

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


class Workers(Answer):
    """All workers."""

    workers: list[Worker]
    absent: list[AbsentWorker]


class Drained(Answer):
    """A drain that has begun."""

    worker: str
    timeout: float


class Scaled(Answer):
    """The sizes of the pools."""

    prefill: int
    decode: int
