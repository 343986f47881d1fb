"""The messages between the coordinator and the process that screens grammars.

Each is msgpack behind its length as 4 bytes, little-endian, in a socket between parent and child."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec

from coordinator.output.formats import ReasoningFormat, ToolFormat
from coordinator.requests.spec import ConstraintKind

LENGTH_BYTES = 4
MAX_TASK = 2 << 20
"""Maximum bytes of a task. A grammar has at most 256 KiB, but descriptions in its schemas are not counted there."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A constraint without its place in the request: see :class:`~coordinator.requests.spec.Constraint`."""

    kind: ConstraintKind
    value: Any = None
    strict: bool = False
    whitespace: str | None = None
    closed: bool = False


class Tool(msgspec.Struct, frozen=True, array_like=True):
    """A tool that may be called. ``index``: its place in the request's ``tools``."""

    name: str
    parameters: Any
    index: int = 0
    strict: bool = False


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What the grammar of one output depends on.

    ``tools``: those that may be called, empty for none. ``forced``: the output must call a tool. ``parallel``: it may
    call several. ``thinking``: the prompt ends inside reasoning. ``max_reasoning_tokens``: bound of the reasoning, None
    for no bound."""

    answer: Answer | None = None
    tools: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    thinking: bool = False
    max_reasoning_tokens: int | None = None


class EncodedTask(NamedTuple):
    """A task as it is sent, and the digest by which verdicts are kept."""

    data: bytes
    digest: bytes


def encode(task: Task) -> EncodedTask:
    """Encode ``task``. Takes milliseconds if it has a large schema."""
    data = msgspec.msgpack.encode(task)
    return EncodedTask(data, hashlib.blake2b(data, digest_size=16).digest())


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a task: the text of a grammar, or an error with the fields of
    :class:`~coordinator.grammar.errors.GrammarError`. ``subject``: what an error's path belongs to, "answer" or the
    index of a tool. ``left_out``: (index of a tool that is not strict, path) of what of its schema is not obeyed."""

    grammar: str = ""
    error: str = ""
    path: str = ""
    code: str = ""
    subject: int | None = None
    left_out: tuple[tuple[int, str], ...] = ()


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """The first message to the child. ``seconds`` of processor time, ``wait_s`` of time and ``memory`` (bytes beyond
    those of the child itself) are the limits of one task."""

    directory: str
    vocab_size: int
    end_ids: tuple[int, ...]
    seconds: float
    wait_s: float
    memory: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A numbered task."""

    number: int
    task: msgspec.Raw


class Done(msgspec.Struct, frozen=True, array_like=True):
    """The verdict of a numbered task. Number 0: the child is ready, or cannot work for this model if the verdict is an
    error."""

    number: int
    verdict: Verdict = Verdict()


def frame(message: msgspec.Struct) -> bytes:
    """Return ``message`` as it is sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def take(received: bytearray) -> bytes | None:
    """Remove the first whole message from ``received`` and return it, None if there is none."""
    if len(received) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
    if len(received) < end:
        return None
    body = bytes(received[LENGTH_BYTES:end])
    del received[:end]
    return body
