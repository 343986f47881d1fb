"""The errors of admission, placement and workers, with the text, status and code that clients receive."""

from __future__ import annotations

from common.core.errors import RequestError
from common.net.messages import Hello, RequestFailed
from coordinator.routing.router import Demand

RETRY_JITTER = 0.2
"""Retry times are jittered by up to this share in both directions, so that clients that were refused together do not
retry together. :mod:`coordinator.http.middleware` draws the jitter when it writes the headers."""


def shutting_down() -> RequestError:
    """Return the error for a request that arrives while the server drains."""
    return RequestError(
        "The server is shutting down.", status=503, type="server_error", code="server_shutting_down", retry_after_s=1.0
    )


def no_workers(role: str, starting: bool = False) -> RequestError:
    """Return the error for a request that no worker of ``role`` can take. ``starting``: whether the first workers are
    still starting."""
    todo = "workers are still starting"
    if not starting:
        todo = "tandem up restarts a lost worker by itself; another one is started with: "
        todo += f"tandem {role} MODEL --coordinator HOST:PORT, and the cluster keys if the others have any"
    return RequestError(
        f"No {role} worker is ready: {todo}.",
        status=503,
        type="server_error",
        code=f"no_{role}_workers",
        retry_after_s=1.0,
    )


def overloaded(waiting: str, retry_after_s: float) -> RequestError:
    """Return the error for a request that admission refuses; ``waiting`` is the reason in words."""
    return RequestError(
        f"The server is overloaded: {waiting}. Try again later.",
        status=429,
        type="server_is_overloaded",
        code="server_is_overloaded",
        retry_after_s=retry_after_s,
    )


def internal() -> RequestError:
    """Return the error for a bug in the server. It gives no details to the client."""
    return RequestError("The server failed on this request.", status=500, type="server_error", code="internal_error")


def quarantined() -> RequestError:
    """Return the error for a request that is taken to be the cause of repeated worker crashes."""
    text = "Two workers died while they served this request; it is not retried."
    return RequestError(text, status=500, type="server_error", code="request_quarantined")


def given_up() -> RequestError:
    """Return the error for a request whose retries and migrations are spent."""
    text = "The workers that served this request were lost or failed it, and its retries are spent."
    return RequestError(text, status=500, type="server_error", code="worker_lost")


def too_large(demand: Demand, roomiest: Hello, prompt_tokens: int) -> RequestError:
    """Return the error for a request that no worker can hold; ``roomiest`` is the Hello of the worker with the most
    room for it."""
    output = demand.tokens + demand.least - prompt_tokens
    wanted = demand.tokens + demand.least
    if wanted > roomiest.max_model_len:
        text = f"This request needs {wanted} tokens ({prompt_tokens} of prompt, {output} of output)"
        text += f", but no worker holds more than {roomiest.max_model_len}."
    else:
        blocks = demand.blocks(roomiest.block_size, demand.least)
        text = f"This request needs {blocks} KV blocks ({prompt_tokens} prompt tokens, {demand.choices} x {output}"
        text += f" output tokens), but the largest worker has {roomiest.kv_blocks}."
    return RequestError(text, param="max_tokens", code="context_length_exceeded")


def prompt_too_long(tokens: int, longest: int) -> RequestError:
    """Return the error for a prompt of ``tokens`` tokens that only a prefill worker may compute; ``longest`` is the
    longest prompt, in tokens, that any of them computes."""
    text = f"The prompt has {tokens} tokens, but no prefill worker can compute more than {longest}."
    return RequestError(text, param="prompt", code="context_length_exceeded")


def too_long(message: str, param: str) -> RequestError:
    """Return the error for a text, prompt or output in the field ``param`` that cannot fit the context."""
    return RequestError(message, param=param, code="context_length_exceeded")


def outside_vocabulary(param: str, token: int, size: int) -> RequestError:
    """Return the error for the id ``token`` in the field ``param``, where the vocabulary has ``size`` tokens."""
    text = f"Token id {token} in {param!r} is outside the vocabulary of {size}."
    return RequestError(text, param=param, code="invalid_value")


def outgrown(tokens: int) -> RequestError:
    """Return the error for a retried request that none of the remaining workers can hold; ``tokens`` counts prompt and
    output."""
    text = f"The workers that could hold this request of {tokens} tokens are gone, and the others are too small."
    return RequestError(text, status=500, type="server_error", code="worker_lost")


def worker_error(message: RequestFailed) -> RequestError:
    """Return the error for a failure that a worker reported as not retriable."""
    match message.code:
        case "too_long":
            return RequestError(f"The request is too long: {message.detail}.", code="context_length_exceeded")
        case "grammar_too_complex" | "grammar_failed":
            return RequestError(f"{message.detail[:1].upper()}{message.detail[1:]}.", code=message.code)
        case "deadline":
            return RequestError(
                "The request's deadline passed on a worker.", status=504, type="timeout_error", code="request_timeout"
            )
        case _:
            return RequestError(
                "The engine failed on this request.", status=500, type="server_error", code=message.code
            )
