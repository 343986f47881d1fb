"""Fields of other servers' APIs that would change an answer, and that this server cannot obey.

Owns one rule: what cannot be obeyed is refused with the code ``unsupported`` and never ignored. A field is accepted
with its neutral value, which asks for nothing. Fields that only concern the work and not the answer (``store``,
``metadata``, ``service_tier``, ``prediction``) are reported in the header ``x-tandem-ignored``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from coordinator.api.fields import Fields, refuse
from coordinator.api.scopes import PATHS, SCOPES, Api
from coordinator.requests.spec import ChatBody, CompletionBody, Options

Body = TypeVar("Body", ChatBody, CompletionBody)

_TRANSFER = "{name!r} cannot be set by clients: the server decides where KV blocks are sent."
_SAMPLER = "{name!r} is not supported: this server has no such sampler."
_BEAMS = "{name!r} belongs to beam search, which is not supported; use 'n' for several choices."
_MEDIA = "{name!r} is not supported: this server serves text models."
_CODE = "{name!r} is not supported: it would be code of a client on the workers."
_GRAMMAR = "{name!r} is not supported: use 'structured_outputs' or 'response_format'."
_TEMPLATE = "{name!r} cannot be set by clients: the server's chat template is used (--chat-template)."
_INTERNAL = "{name!r} is not supported: this server returns no internal states."
_LENGTH = "{name!r} is not supported: use 'max_tokens'."
_BUDGET = "{name!r} is not supported: use 'max_reasoning_tokens'."
_NO_ADAPTERS = "{name!r} is not supported: this server has no adapters."

UNSUPPORTED: dict[str, str] = {
    # where KV blocks are sent
    "kv_transfer_params": _TRANSFER,
    "disagg_params": _TRANSFER,
    "bootstrap_host": _TRANSFER,
    "bootstrap_port": _TRANSFER,
    "bootstrap_room": _TRANSFER,
    # OpenAI's
    "suffix": "Insertion ('suffix') is not supported: the models served here complete text at its end.",
    "audio": "Audio output is not supported: this server serves text models.",
    "web_search_options": "Web search is not supported: this server opens no outbound connection.",
    "verbosity": "'verbosity' is not supported: ask for it in the prompt.",
    # other ways to search and to sample
    "use_beam_search": "Beam search is not supported; use 'n' for several choices.",
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logits_processors": _CODE,
    "custom_logit_processor": _CODE,
    "custom_params": "'custom_params' is not supported: it belongs to logits processors.",
    "vllm_xargs": "'vllm_xargs' is not supported: it belongs to plugins of vLLM.",
    "extra_args": "'extra_args' is not supported: it belongs to plugins of vLLM.",
    "extra_body": "'extra_body' is not supported: it is a parameter of a client. Send its members beside 'model'.",
    "options": "'options' is not supported: send sampling fields beside 'model'.",
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "num_predict"), _LENGTH),
    **dict.fromkeys(("max_thinking_tokens", "reasoning_budget", "thinking_budget_tokens"), _BUDGET),
    **dict.fromkeys(("n_probs", "top_n_tokens"), "{name!r} is not supported: use 'top_logprobs' or 'logprobs'."),
    "repeat_penalty": "'repeat_penalty' is not supported: use 'repetition_penalty'.",
    "logprob_token_ids": "'logprob_token_ids' is not supported: use 'top_logprobs' or 'logprobs'.",
    "repetition_detection": "'repetition_detection' is not supported: use a penalty.",
    **dict.fromkeys(
        (
            "typical_p",
            "top_a",
            "tfs",
            "tfs_z",
            "mirostat",
            "mirostat_mode",
            "dry_multiplier",
            "xtc_probability",
            "dynatemp_range",
            "min_new_tokens",
            "no_repeat_ngram_size",
            "epsilon_cutoff",
            "eta_cutoff",
            "watermark",
            "top_n_sigma",
            "smoothing_factor",
            "samplers",
            "sampler_order",
            "penalty_alpha",
        ),
        _SAMPLER,
    ),
    # other spellings of a constraint
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "grammar": _GRAMMAR,
    "structural_tag": _GRAMMAR,
    "format": _GRAMMAR,
    "response_schema": _GRAMMAR,
    "structured_output": _GRAMMAR,
    "guided_decoding_backend": "'guided_decoding_backend' is not supported: there is one, llguidance.",
    "stop_regex": "'stop_regex' is not supported: use 'stop', or 'structured_outputs' with 'regex'.",
    "no_stop_trim": "'no_stop_trim' is not supported: use 'include_stop_str_in_output'.",
    # prompts
    "chat_template": _TEMPLATE,
    "input_ids": "'input_ids' is not supported: send token ids as 'prompt' to /v1/completions.",
    "prompt_embeds": "'prompt_embeds' is not supported: send text or token ids.",
    "image_data": _MEDIA,
    "video_data": _MEDIA,
    "audio_data": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "media_io_kwargs": _MEDIA,
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "session_params": "'session_params' is not supported: each request has its whole prompt; prefixes are cached.",
    # the form of the answer
    "return_hidden_states": _INTERNAL,
    "return_routed_experts": _INTERNAL,
    "return_cached_tokens_details": _INTERNAL,
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "repeat_penalty": (1,),
    "verbosity": ("medium",),
}
"""Values that ask for nothing, besides null, false, and 0 and empty ones."""
_NEEDED: dict[str, str] = {
    "separate_reasoning": "Reasoning is always apart from the content; 'include_reasoning': false leaves it out.",
    "stream_reasoning": "Reasoning is always streamed; 'include_reasoning': false leaves it out.",
    "spaces_between_special_tokens": "The text of special tokens is always as the tokenizer has it.",
    "detokenize": "Answers always have text; 'return_token_ids' adds token ids.",
}
"""Fields that are only accepted as true, which is what this server does."""


_STRICT = frozenset(("kv_transfer_params", "disagg_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"))
"""Fields that are refused whatever their value is, unless it is null."""


def naming_ignored(body: Body, fields: Fields, *others: str) -> Body:
    """Return ``body`` with the names of the fields that were ignored: ``others``, and those that no getter has read. It
    takes the whole body because nothing may be read from ``fields`` afterwards."""
    return replace(body, options=replace(body.options, ignored=(*fields.ignored(), *others)))


def refuse_ignored(options: Options) -> None:
    """Raise RequestError if a field of the request was ignored (``--strict-params``)."""
    for name in options.ignored:
        refuse(f"{name[:256]!r} is not supported: it would have no effect.", name[:256], "unsupported")


def refuse_unsupported(fields: Fields, api: Api) -> None:
    """Raise RequestError for a field that the endpoints of ``api`` cannot obey."""
    for name in fields.values:
        scope = SCOPES.get(name)
        if scope is not None and api not in scope.obeyed:
            if scope.asks(fields.raw(name)):
                refuse(f"{name!r} is not supported by {PATHS[api]}: {scope.advice(api)}.", name, "unsupported")
        elif name in UNSUPPORTED:
            value = fields.raw(name)
            asks = value or isinstance(value, dict) or (name in _STRICT and value is not None)
            if asks and (value is True or value not in _NEUTRAL.get(name, ())):
                refuse(UNSUPPORTED[name].format(name=name), name, "unsupported")
        elif name in _NEEDED and not fields.boolean(name, True):
            refuse(f"{name!r} cannot be false. {_NEEDED[name]}", name, "unsupported")
    modalities = fields.array("modalities", 8)
    if modalities is not None and modalities != ["text"]:
        refuse("Only the modality 'text' is supported.", "modalities", "unsupported")
