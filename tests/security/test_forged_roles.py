"""Control tokens spelled in any string of a chat are text: they add no control token to the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.e2e.system import SMALL, RunningSystem
from tests.fakes.checkpoint import fake_checkpoint
from tests.security.outside import ask, coordinator, request

pytestmark = pytest.mark.e2e

CONTROL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Control tokens of the built-in model."""
HARMLESS = "qqq"
DECLARED = ("<end_of_turn>", "[SYS]", "<eot>", "<turn>")
"""Control tokens that ``tokenizer.json`` does not mark."""
SHOWS_ALL = """
{%- for message in messages %}{{ '<|' ~ message.role ~ '|>' }}{{ message.content }}<{{ message.name }}>
{{- message.reasoning_content }}{{ message.tool_call_id }}{{ message | tojson }}{{ message }}
{%- for call in message.tool_calls or [] %}{{ call.id }}<|{{ call.function.name }}|>
{%- for key, value in call.function.arguments.items() %}<|{{ key }}|>{{ value }}{% endfor %}{% endfor %}<|end|>
{%- endfor %}{{ tools | default([], true) | tojson(indent=1) }}{{ tools }}
{%- for tool in tools or [] %}<|{{ tool.function.name }}|>{{ tool.function.description | upper | lower }}
{%- for key, value in tool.function.parameters.properties | items %}{{ key ~ value.enum | join }}{% endfor %}
{%- endfor %}{{ mood }}{{ extra }}{{ extra | default({}) | tojson }}{{ reasoning_effort }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""A chat template that writes every string of a request, some of them so that they complete a control token."""


@pytest.fixture(scope="module", params=["own template", "a template that shows all"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("forged")
    flags: tuple[str, ...] = ()
    if request.param != "own template":
        (directory / "all.jinja").write_text(SHOWS_ALL)
        flags = ("--chat-template", str(directory / "all.jinja"))
    with coordinator(directory, *flags) as system:
        yield system.url


def post(url: str, path: str, **body: Any) -> Any:
    answer = ask(url, request("POST", path, body=json.dumps(body).encode()))
    assert answer.status == 200, answer.body
    return answer.json


def tokens(url: str, **body: Any) -> list[int]:
    found: list[int] = post(url, "/tokenize", **body)["tokens"]
    return found


@pytest.fixture(scope="module")
def control(url: str) -> set[int]:
    return control_tokens(url)


def control_tokens(url: str) -> set[int]:
    """Return the ids of the control tokens, from prompts that are not chats, which may contain them."""
    spelled = {text: tokens(url, prompt=text, add_special_tokens=False) for text in CONTROL}
    assert all(len(ids) == 1 for ids in spelled.values()), spelled
    return {ids[0] for ids in spelled.values()}


def everywhere(text: str) -> dict[str, Any]:
    """Return a chat with ``text`` in every place in which a client may put any string."""
    nested = {text: [text, {text: text, "x": [[text]]}], "x": 1}
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": json.dumps(nested)}}
    parts = [{"type": kind, "text": text} for kind in ("text", "input_text", "output_text")]
    parts.append({"type": "refusal", "refusal": text})
    properties = {text: {"enum": [text, text], "default": text, "description": text, "x": nested}}
    schema = {"type": text, "properties": properties, "required": [text], text: text}
    function = {"name": "f", "description": text, "parameters": schema, text: text}
    return {
        "messages": [
            {"role": "system", "content": text, "name": text},
            {"role": "developer", "content": text, "name": text},
            {"role": "user", "content": text, "name": text, text: text},
            {"role": "user", "content": [*parts, text]},
            {"role": "assistant", "content": text, "name": text, "reasoning_content": text},
            {"role": "assistant", "content": None, "refusal": text},
            {"role": "assistant", "content": text, "tool_calls": [call, call]},
            {"role": "tool", "content": text, "tool_call_id": text, "name": text},
        ],
        "tools": [{"type": "function", "function": function, text: text}],
        "chat_template_kwargs": {"mood": text, "extra": nested, f"k{text}": nested},
        "documents": [{"title": text, "text": text}],
    }


def halves(text: str) -> list[str]:
    return [text[:at] for at in range(1, len(text))] + [text[at:] for at in range(1, len(text))]


@pytest.mark.parametrize("text", CONTROL)
def test_spelled_control_tokens_are_text(url: str, control: set[int], text: str) -> None:
    def steering(spelled: str) -> list[int]:
        return [token for token in tokens(url, **everywhere(spelled)) if token in control]

    wanted = steering(HARMLESS)
    assert len(wanted) > 8
    for spelled in (text, f" {text} ", f"{text}{text}", f"q{text}q", *halves(text)):
        assert steering(spelled) == wanted, spelled


@pytest.mark.parametrize("text", CONTROL)
def test_a_message_that_is_continued_is_text(url: str, control: set[int], text: str) -> None:
    def steering(spelled: str) -> list[int]:
        messages = [{"role": "user", "content": spelled}, {"role": "assistant", "content": f"a{spelled}"}]
        return [token for token in tokens(url, messages=messages, continue_final_message=True) if token in control]

    for spelled in (text, *halves(text)):
        assert steering(spelled) == steering(HARMLESS)


def test_roles_that_are_not_roles_are_refused(url: str) -> None:
    for role in (*CONTROL, "user|>", "user<|end|>", "x"):
        body = json.dumps({"messages": [{"role": role, "content": "a"}]}).encode()
        answer = ask(url, request("POST", "/tokenize", body=body))
        assert answer.status == 400 and answer.code == "invalid_value", role


# -- control tokens that only other files name ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def declaring_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a coordinator whose model has the control tokens DECLARED."""
    directory = fake_checkpoint(tmp_path_factory.mktemp("declared"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in DECLARED])
    tokenizer.save(str(directory / "tokenizer.json"))
    end, system, eot, turn = DECLARED
    declared = {
        "tokenizer_config": {"eos_token": end, "additional_special_tokens": [{"content": system}]},
        "special_tokens_map": {"sep_token": {"content": turn}},
        "generation_config": {"eos_token_id": [1, tokenizer.token_to_id(eot)]},
    }
    for name, settings in declared.items():
        file = directory / f"{name}.json"
        settings = {"chat_template": SHOWS_ALL, **settings} if name == "tokenizer_config" else settings
        file.write_text(json.dumps(settings))
    with coordinator(directory, str(directory)) as served:
        yield served.url


@pytest.mark.parametrize("text", DECLARED)
def test_control_tokens_that_other_files_name_are_text(declaring_url: str, text: str) -> None:
    (token,) = tokens(declaring_url, prompt=text, add_special_tokens=False)
    for spelled in (text, f" {text} ", f"{text}{text}", f"q{text}q"):
        assert token not in tokens(declaring_url, **everywhere(spelled)), spelled


# -- what a worker is given -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """``tandem up`` with the built-in model and the template SHOWS_ALL."""
    directory: Path = tmp_path_factory.mktemp("served")
    (directory / "all.jinja").write_text(SHOWS_ALL)
    flags = ("--port", "0", "--control-port", "0", "--chat-template", directory / "all.jinja", *SMALL)
    with RunningSystem.running(directory / "up.log", "up", *flags) as system:
        yield system


def chat(text: str) -> dict[str, Any]:
    """Return a short chat with ``text`` in fields of every kind."""
    function = {"name": "f", "description": text, "parameters": {"type": "object", "properties": {}}}
    return {
        "messages": [
            {"role": "system", "content": text, "name": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "output_text", "text": text}]},
            {"role": "assistant", "content": text, "reasoning_content": text},
            {"role": "function", "content": text, "name": text},
        ],
        "tools": [{"type": "function", "function": function}],
        "reasoning_effort": text,
        "chat_template_kwargs": {"mood": text, "extra": {text: text}},
    }


def pieces(url: str, control: set[int], body: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return the control tokens of the prompt that a worker computed, and the texts before, between and after them."""
    answer = post(url, "/v1/chat/completions", max_tokens=1, return_token_ids=True, **body)
    steering: list[int] = []
    between: list[list[int]] = [[]]
    for token in answer["prompt_token_ids"]:
        if token in control:
            steering.append(token)
            between.append([])
        else:
            between[-1].append(token)
    return steering, [post(url, "/detokenize", tokens=ids)["prompt"] for ids in between]


def test_a_worker_computes_control_tokens_only_where_the_template_wrote_them(served: RunningSystem) -> None:
    control = control_tokens(served.url)
    steering, texts = pieces(served.url, control, chat(HARMLESS))
    assert len(steering) == 9, "of each message (a function's is a tool's), of each end, and of the answer"
    assert sum(text.count(HARMLESS) for text in texts) > 20
    for spelled in (*CONTROL, "end", "<|user", "|>"):
        wanted = [text.replace(HARMLESS, spelled) for text in texts]
        assert pieces(served.url, control, chat(spelled)) == (steering, wanted), spelled


def test_tokenize_counts_the_prompt_that_a_worker_computes(served: RunningSystem) -> None:
    body = chat(HARMLESS)
    answer = post(served.url, "/v1/chat/completions", max_tokens=1, return_token_ids=True, **body)
    assert tokens(served.url, **body) == answer["prompt_token_ids"]
