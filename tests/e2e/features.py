"""The features of the API that must not differ between topologies, as data, and the page that lists them.

``python -m tests.e2e.features`` writes docs/reference/features.md. ``test_features.py`` sends the request of each row
to one system per topology. This module imports neither torch nor a client, so that a fast test can compare the page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "features.md"
COMMAND = "python -m tests.e2e.features"
TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "colocated": ("--colocated", "1"),
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
}
"""Flags of ``tandem up`` by topology."""
WHOLE_ONLY = frozenset({"colocated", "2P2D"})
"""Topologies that only ``make test-all`` starts."""

KV_BLOCKS, MODEL_LEN, PREFILL_CHUNK = 66, 768, 128
"""KV pool of each worker in blocks of 16 tokens; longest request; tokens of a prefill step."""
DIES_AT = {5454: 40, 5455: 12, 5456: 6}
"""Seed of a request to the number of its output tokens after which the worker that computes it is killed."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One row.

    ``fields``: the body of the request, to /v1/completions if it has a ``prompt``, else to /v1/chat/completions.
    ``expects``: what every choice must be like, besides being equal to that of the reference (read by
    ``test_features.check_expected``). ``counter``: a metric that must grow. ``asked_before``: the same request has been
    answered before. ``together``: on each decode worker two requests run at once, which outgrow its KV pool. ``whole``:
    only ``make test-all`` asks for it."""

    name: str
    says: str
    fields: Fields
    expects: Fields = field(default_factory=dict)
    counter: str = ""
    asked_before: bool = False
    together: bool = False
    whole: bool = False

    @property
    def alone(self) -> bool:
        """Whether no other request may run beside it."""
        return bool(self.counter) or self.asked_before


def _chat(text: str, **fields: Any) -> Fields:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, **fields}


def _completion(prompt: str, **fields: Any) -> Fields:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12, "logprobs": 2, **fields}


def _tool(name: str, **properties: Fields) -> Fields:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


OSLO, WEATHER = "Tell me about Oslo.", "What is the weather in Oslo?"
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 3},
        "sky": {"enum": ["clear", "rainy"]},
    },
    "required": ["city", "days", "sky"],
    "additionalProperties": False,
}
STORY = {
    "type": "object",
    "properties": {"story": {"type": "string", "minLength": 300, "maxLength": 320}},
    "required": ["story"],
    "additionalProperties": False,
}
TOOLS = [_tool("get_weather", city={"type": "string"}), _tool("say", word={"enum": ["hi", "bye"]})]
SAMPLED: Fields = {"temperature": 1.5, "top_p": 0.95, "top_k": 50}
EOS = 7
"""The token with which the built-in model ends a turn."""
LONG = " ".join(f"Item {number} is in box {number * 7 % 90}." for number in range(48))


def _schema(schema: Fields) -> Fields:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


FEATURES: tuple[Feature, ...] = (
    Feature("greedy", "`temperature: 0`", _chat(OSLO)),
    Feature(
        "seeded",
        "`seed` with `temperature`, `top_p` and `top_k`",
        _chat(OSLO, **SAMPLED, seed=11, ignore_eos=True),
        {"unlike": "greedy"},
    ),
    Feature(
        "n",
        "`n: 3`, with `min_p`; the choices share the prompt's KV",
        _chat(OSLO, **SAMPLED, seed=3, n=3, min_p=0.01),
        {"choices": 3},
    ),
    Feature(
        "stop",
        "a `stop` string that several tokens write; none of it is shown",
        _chat(OSLO, stop=["was trained"]),
        {"finish_reason": "stop", "regex": "I have no age. I "},
    ),
    Feature(
        "stop_token_ids",
        "`stop_token_ids`",
        _chat(OSLO, stop_token_ids=[1211]),
        {"finish_reason": "stop", "unlike": "greedy"},
    ),
    Feature(
        "bias",
        "`logit_bias` against the most likely first token",
        _chat(OSLO, logit_bias={"48": -100}),
        {"unlike": "greedy"},
    ),
    Feature(
        "allowed_token_ids",
        "`allowed_token_ids`: 60 tokens of the vocabulary",
        _chat(OSLO, **SAMPLED, seed=10, allowed_token_ids=list(range(900, 960)), ignore_eos=True),
        {"unlike": "greedy", "tokens": 24},
    ),
    Feature(
        "bad_words",
        "`bad_words`: a word of several tokens in the greedy answer",
        _chat(OSLO, bad_words=["was trained", "no age"]),
        {"unlike": "greedy", "regex": "(?s)(?!.*(was trained|no age)).*"},
    ),
    Feature(
        "penalties",
        "`frequency_penalty`, `presence_penalty` and `repetition_penalty`",
        _chat(OSLO, max_tokens=40, ignore_eos=True, frequency_penalty=1, presence_penalty=0.5, repetition_penalty=1.2),
        {"unlike": "greedy"},
    ),
    Feature(
        "json_schema",
        "`response_format` with a strict schema",
        _chat(OSLO, **SAMPLED, seed=5, max_tokens=120, response_format=_schema(CITY)),
        {"finish_reason": "stop", "schema": CITY},
    ),
    Feature(
        "regex",
        "`structured_outputs.regex`",
        _chat(OSLO, **SAMPLED, seed=6, structured_outputs={"regex": "[0-9]{3}-[a-f]{4,8}"}),
        {"finish_reason": "stop", "regex": "[0-9]{3}-[a-f]{4,8}"},
    ),
    Feature(
        "tools: auto",
        "`tool_choice: auto`; the arguments fit the tool's schema",
        _chat(WEATHER, tools=TOOLS, max_tokens=60),
        {"finish_reason": "tool_calls", "calls": ["get_weather"]},
    ),
    Feature(
        "tools: required",
        "`tool_choice: required`",
        _chat(
            "Hello", **SAMPLED, seed=7, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=90
        ),
        {"finish_reason": "tool_calls", "calls": ["get_weather", "say"]},
    ),
    Feature(
        "tools: named",
        "`tool_choice` with a function's name",
        _chat("Hello", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "say"}}, max_tokens=60),
        {"finish_reason": "stop", "calls": ["say"]},
    ),
    Feature(
        "reasoning",
        "reasoning that the chat template opens and `max_reasoning_tokens` ends, then the content",
        _chat(OSLO, chat_template_kwargs={"enable_thinking": True}, max_reasoning_tokens=12),
        {"reasoning": True, "regex": "(?s).+"},
    ),
    Feature(
        "reasoning, then JSON",
        "the same before a constrained content",
        _chat(
            OSLO,
            **{**SAMPLED, "seed": 8, "max_tokens": 120, "max_reasoning_tokens": 12},
            chat_template_kwargs={"enable_thinking": True},
            response_format=_schema(CITY),
        ),
        {"finish_reason": "stop", "reasoning": True, "schema": CITY},
    ),
    Feature(
        "min_tokens",
        "`min_tokens`, where the end of the turn is by far the most likely token",
        _chat(OSLO, min_tokens=8, logit_bias={str(EOS): 100}),
        {"finish_reason": "stop", "tokens": 9},
    ),
    Feature("logprobs", "`top_logprobs: 20`", _chat(OSLO, max_tokens=12, top_logprobs=20), {"tops": 20}),
    Feature("prompt_logprobs", "`prompt_logprobs: 2`", _chat(OSLO, prompt_logprobs=2), {"prompt_logprobs": True}),
    Feature("echo", "`echo` with `logprobs`", _completion("The capital of Norway is", echo=True), {"echo": True}),
    Feature(
        "no output",
        "`max_tokens: 0`: log-probabilities of a text",
        _completion("The capital of Norway is Oslo.", echo=True, max_tokens=0),
        {"echo": True, "finish_reason": "length", "tokens": 0},
    ),
    Feature(
        "long prompt",
        f"a prompt of more than 4 prefill steps of {PREFILL_CHUNK} tokens each",
        _completion(LONG, ignore_eos=True),
        {"prompt_tokens": 4 * PREFILL_CHUNK},
    ),
    Feature(
        "prefix hit",
        "a prompt whose KV is in the prefix cache",
        _completion(LONG[:400], ignore_eos=True, cache_salt="hit"),
        {"cached": 64},
        asked_before=True,
    ),
    Feature(
        "preempted",
        "requests that outgrow the KV pool together: a sequence is parked and computed again",
        _chat(OSLO, **{**SAMPLED, "seed": 9, "max_tokens": 560, "ignore_eos": True}),
        {"finish_reason": "length", "tokens": 560},
        counter="vllm:num_preemptions_total",
        together=True,
    ),
    Feature(
        "migrated",
        "the worker is killed after 40 output tokens, in the middle of a JSON string",
        _chat(OSLO, **{**SAMPLED, "seed": 5454, "max_tokens": 400, "response_format": _schema(STORY)}),
        {"finish_reason": "stop", "schema": STORY, "in_string_after": 40},
        counter="tandem_migrations_total",
    ),
    Feature(
        "migrated: tool call",
        "the worker is killed after 12 output tokens, in the middle of a call",
        _chat(WEATHER, seed=5455, tools=TOOLS, max_tokens=60),
        {"finish_reason": "tool_calls", "calls": ["get_weather"]},
        counter="tandem_migrations_total",
        whole=True,
    ),
    Feature(
        "migrated: reasoning",
        "the worker is killed after 6 output tokens, in the middle of the reasoning",
        _chat(
            OSLO,
            **{**SAMPLED, "seed": 5456, "n": 2, "max_tokens": 120, "max_reasoning_tokens": 12},
            chat_template_kwargs={"enable_thinking": True},
            response_format=_schema(CITY),
        ),
        {"finish_reason": "stop", "choices": 2, "reasoning": True, "schema": CITY},
        counter="tandem_migrations_total",
        whole=True,
    ),
)


def _command(feature: Feature, topology: str) -> str:
    return "`make test-all`" if feature.whole or topology in WHOLE_ONLY else "`make test`"


def page() -> str:
    """Return the text of the page."""
    head = ("feature", "request", *TOPOLOGIES)
    rows = [(each.name, each.says, *(_command(each, topology) for topology in TOPOLOGIES)) for each in FEATURES]
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return _TEXT.format(command=COMMAND, table="\n".join(lines), blocks=KV_BLOCKS, tokens=KV_BLOCKS * 16)


_TEXT = """# Features in every topology

<!-- Written by `{command}`; do not edit. -->

An answer does not depend on whether one worker computes it or several. `tests/e2e/test_features.py` sends the request
of each row to running systems that serve the built-in model in float32, and compares the answers with those of an
undisturbed colocated worker. A cell names the command that checks it.

{table}

- **Compared:** token ids of prompt and output, text, reasoning, tool calls and finish reason of every choice are equal;
  log-probabilities of chosen and alternative tokens differ by at most 1e-4. Whole answers and streams are compared.
- **Checked as well:** the feature acted. The JSON fits its schema, the worker was killed while a string was open, the
  prefix was in the cache, a sequence was parked.
- **The systems:** each worker has a KV pool of {blocks} blocks ({tokens} tokens). The reference has a larger one: there
  nothing is parked, and no worker dies. `make test` asks the reference for its rows, too. No prompt is computed on a
  decode worker (`--local-prefill never`), so every KV cache travels. In 2P2D the requests of a killed worker continue
  on the other decode worker. Where it was the only one, they wait until it is restarted.
- **Not in the table:** GPUs, and tensor parallelism. In lower precisions than float32, tokens may differ where two are
  almost equally likely.
"""


def open_string(text: str) -> bool:
    """Return whether ``text``, the beginning of a JSON text, ends inside a string."""
    return re.sub(r"\\.", "", text).count('"') % 2 == 1


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
