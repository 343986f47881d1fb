"""The fields that the Responses API and the Messages API share, whose answer is a single choice.

Besides the fields of these APIs, both take the sampling fields of chat completions (``seed``, ``min_p`` ...), which
clients send as extra fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.api.fields import Fields, refuse
from coordinator.api.openai import parse_cache_salt, parse_sampling, parse_tokens_as_ids
from coordinator.api.structured import GUIDED
from coordinator.api.unsupported import refuse_unsupported
from coordinator.requests.spec import Constraint, Options

_CONSTRAINTS = ("response_format", "structured_outputs", *GUIDED, "prompt_logprobs", "echo", "truncate_prompt_tokens")
"""Fields of other endpoints that change the answer."""


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


def refuse_present(fields: Fields, refused: Iterable[tuple[str, str]]) -> None:
    """Raise RequestError for the first field of ``refused``, pairs of a name and the text that says why, that is
    present and neither false nor empty, and for what no endpoint can obey."""
    refuse_unsupported(fields)
    for name in _CONSTRAINTS:
        if fields.has(name):
            refuse(f"{name!r} is not supported here: use /v1/chat/completions.", name, "unsupported")
    for name, text in refused:
        if fields.raw(name) not in (None, False, "", [], {}):
            refuse(text, name, "unsupported")
