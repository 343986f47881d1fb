"""What the server refuses on purpose, by check: the status and code that it must answer, and why.

A check that is listed here must fail, and its last answer must be this one.
"""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """``code`` is ``error.code``, None in Anthropic's error bodies, which have none."""

    status: int
    code: str | None
    reason: str


_TEXT_MODEL = "the models served here read and write text only"
_NO_TOOLS = "the server calls no tools itself; the client's functions are called"
_NOT_EMBEDDING = "the server only generates text"
_STATELESS = "the server stores no responses: the client sends the whole conversation"

REFUSED: dict[str, Refusal] = {
    "openai.check_images": Refusal(400, "unsupported", _TEXT_MODEL),
    "openai.check_audio": Refusal(400, "unsupported", _TEXT_MODEL),
    "openai.check_suffix": Refusal(400, "unsupported", "the models served here complete text at its end"),
    "openai.check_custom_tool": Refusal(400, "unsupported", "functions with a JSON schema are the only kind of tools"),
    "openai.check_embeddings": Refusal(404, "not_found", _NOT_EMBEDDING),
    "openai.check_responses_previous": Refusal(400, "unsupported", _STATELESS),
    "openai.check_responses_builtin_tool": Refusal(400, "unsupported", _NO_TOOLS),
    "anthropic.check_images": Refusal(400, None, _TEXT_MODEL),
    "anthropic.check_server_tools": Refusal(400, None, _NO_TOOLS),
    "anthropic.check_batches": Refusal(404, None, "requests are answered at once; there are no batch jobs"),
    "langchain.check_embeddings": Refusal(404, "not_found", _NOT_EMBEDDING),
    "litellm.check_embedding": Refusal(404, "not_found", _NOT_EMBEDDING),
    "ai_sdk.check_feature[image-openai]": Refusal(400, "unsupported", _TEXT_MODEL),
    "ai_sdk.check_feature[image-openai-chat]": Refusal(400, "unsupported", _TEXT_MODEL),
    "ai_sdk.check_feature[image-compatible]": Refusal(400, "unsupported", _TEXT_MODEL),
    "ai_sdk.check_feature[image-anthropic]": Refusal(400, None, _TEXT_MODEL),
    "ai_sdk.check_embed[openai]": Refusal(404, "not_found", _NOT_EMBEDDING),
    "ai_sdk.check_embed[compatible]": Refusal(404, "not_found", _NOT_EMBEDDING),
}
