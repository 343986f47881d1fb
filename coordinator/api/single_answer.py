"""The fields that the Responses API and the Messages API share, whose answer is a single choice.

Besides the fields of these APIs, both take the sampling fields of chat completions (``seed``, ``min_p`` ...), which
clients send as extra fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from coordinator.api.fields import Fields, refuse
from coordinator.api.openai import parse_cache_salt, parse_sampling, parse_tokens_as_ids
from coordinator.api.scopes import Api
from coordinator.api.unsupported import refuse_unsupported
from coordinator.requests.spec import Constraint, Options


def parse_options(
    fields: Fields,
    max_tokens: int | None,
    stop: tuple[str, ...],
    constraint: Constraint | None,
    logprobs: int | None = None,
) -> Options:
    """Return the options of a request for one choice. ``logprobs``: most likely tokens per output token whose
    log-probabilities the answer has, None for no log-probabilities. The caller adds the names of ignored fields. Raises
    RequestError."""
    if (fields.integer("n", 1, 1 << 16) or 1) > 1:
        refuse(
            "'n' above 1 is not supported: an answer has one choice here. Use /v1/chat/completions.", "n", "unsupported"
        )
    return Options(
        model=fields.string("model", limit=1024),
        n=1,
        sampling=parse_sampling(fields, logprobs, max_tokens),
        stop=stop,
        include_stop=False,
        skip_special_tokens=True,
        stream=fields.boolean("stream", False),
        include_usage=True,
        continuous_usage=False,
        return_token_ids=False,
        return_metrics=fields.boolean("return_metrics", False),
        cache_salt=parse_cache_salt(fields),
        priority=fields.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        constraint=constraint,
        tokens_as_ids=parse_tokens_as_ids(fields),
    )


Value = TypeVar("Value")


def agreed(fields: Fields, own: str, given: Value | None, name: str, other: Value | None) -> Value | None:
    """Return the value of a field that has two names: ``given`` under ``own``, ``other`` under the name ``name`` of
    another API; None for an absent one. Raises RequestError if both are given and differ."""
    if given is not None and other is not None and given != other:
        refuse(f"{fields.at(name)!r} contradicts {own!r}, which means the same here.", fields.at(name))
    return other if given is None else given


def refuse_present(fields: Fields, api: Api, refused: Iterable[tuple[str, str]]) -> None:
    """Raise RequestError for the first field of ``refused``, pairs of a name and the text that says why, that is
    present and neither false nor empty, and for what ``api`` cannot obey."""
    refuse_unsupported(fields, api)
    for name, text in refused:
        if fields.raw(name) not in (None, False, "", [], {}):
            refuse(text, name, "unsupported")
