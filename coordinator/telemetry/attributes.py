"""Names and values of the semantic conventions for generative AI. Imports nothing of OpenTelemetry.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/.
"""

from __future__ import annotations

from common.core.request import SamplingParams

PROVIDER = "tandem"
"""``gen_ai.provider.name``."""
GENERATING = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""The endpoints that generate text, with their ``gen_ai.operation.name``."""


def operation(endpoint: str) -> str:
    """Return ``gen_ai.operation.name`` of an endpoint."""
    return GENERATING.get(endpoint, "chat")


def request_attributes(sampling: SamplingParams, choices: int) -> dict[str, float]:
    """Return the attributes of the parameters of a request, as they took effect; without those that change nothing."""
    attributes: dict[str, float] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
    }
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if choices > 1:
        attributes["gen_ai.request.choice.count"] = choices
    return attributes
