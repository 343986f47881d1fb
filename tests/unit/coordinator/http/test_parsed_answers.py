"""Answers with tool calls and reasoning over real sockets: whole bodies, stream chunks, and how such a choice ends."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.core.errors import RequestError
from common.net.messages import Abort
from coordinator.api.choice import Choice
from coordinator.api.openai import parse_chat
from coordinator.api.parsed_choice import ParsedChoice
from coordinator.grammar.compiler import GrammarCompiler
from tests.fakes.checkpoint import fake_checkpoint
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, FakeCluster, letters, open_cluster, until, valid

pytestmark = pytest.mark.processes  # tools have grammars, which a process compiles

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{{ tools | tojson if tools }}{% if add_generation_prompt %}<|assistant|>THINK{% endif %}"
)
PLAIN = TEMPLATE.replace("THINK", "")
REASONS = TEMPLATE.replace("THINK", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}")
OPENS = TEMPLATE.replace("THINK", "<think>\n")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED = {**HELLO, "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bergen, \\"west\\""}}\n</tool_call>'


class Talk:
    """A cluster whose workers write ``text``."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def whole(self, asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the only choice, and the whole body."""
        response, body = await self.cluster.post(CHAT, asked)
        assert response.status == 200, body
        valid("CreateChatCompletionResponse", body)
        return body["choices"][0], body

    async def streamed(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message that a client puts together from the deltas, and the deltas of all tokens."""
        _, events = await self.cluster.stream(CHAT, asked)
        for event in events:
            valid("CreateChatCompletionStreamResponse", event)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert deltas[0]["role"] == "assistant" and "content" in deltas[0]
        assert all("role" not in delta for delta in deltas[1:]) and events[-1]["choices"][0]["delta"] == {}
        return {**put_together(deltas), "finish_reason": events[-1]["choices"][0]["finish_reason"]}, deltas


def put_together(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": None, "calls": []}
    for delta in deltas:
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            assert isinstance(function["arguments"], str)
            if part["index"] == len(message["calls"]):
                assert part["type"] == "function" and part["id"].startswith("call_") and function["name"]
                message["calls"].append({"id": part["id"], "name": function["name"], "arguments": ""})
            else:
                assert part["index"] == len(message["calls"]) - 1, "calls come one after the other"
                assert part.keys() == {"index", "function"} and function.keys() == {"arguments"}
            message["calls"][part["index"]]["arguments"] += function["arguments"]
    return message


async def talk(cluster: FakeCluster, text: str, **options: Any) -> Talk:
    for role in ("prefill", "decode"):
        await cluster.add(role, script=letters(text), **options)  # type: ignore[arg-type]
    return Talk(cluster)


@pytest.fixture
async def tools(model: Path) -> AsyncIterator[FakeCluster]:
    async with open_cluster(model, chat_template=PLAIN) as cluster:
        yield cluster


# -- calls --------------------------------------------------------------------------------------------------------


async def test_a_call_alone(tools: FakeCluster) -> None:
    talker = await talk(tools, CALL)
    choice, body = await talker.whole(ASKED)
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert message["content"] is None and choice["finish_reason"] == "tool_calls"
    assert re.fullmatch("call_[a-zA-Z0-9]{24}", call["id"])
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert "reasoning_content" not in message and "completion_tokens_details" not in body["usage"]
    message, deltas = await talker.streamed(ASKED)
    assert len(deltas) == len(CALL) + 1, "a chunk per token, that of the end too"
    assert message["content"] is None and message["finish_reason"] == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("weather", '{"city": "Oslo"}')]


async def test_text_and_several_calls(tools: FakeCluster) -> None:
    talker = await talk(tools, f"Let me look. {CALL}\n{OTHER}")
    choice, _ = await talker.whole(ASKED)
    assert choice["message"]["content"] == "Let me look."
    cities = [json.loads(call["function"]["arguments"])["city"] for call in choice["message"]["tool_calls"]]
    assert cities == ["Oslo", 'Bergen, "west"']
    message, _ = await talker.streamed(ASKED)
    assert message["content"] == "Let me look."
    assert [json.loads(call["arguments"])["city"] for call in message["calls"]] == cities
    assert len({call["id"] for call in message["calls"]}) == 2


async def test_without_parallel_calls_the_second_ends_the_answer(tools: FakeCluster) -> None:
    talker = await talk(tools, CALL + OTHER + "x" * 200)
    asked = {**ASKED, "parallel_tool_calls": False}
    choice, body = await talker.whole(asked)
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] < len(CALL + OTHER)
    await until(lambda: tools.workers[1].got(Abort), "decode gets the Abort")
    message, _ = await talker.streamed(asked)
    assert len(message["calls"]) == 1 and message["finish_reason"] == "tool_calls"


async def test_several_choices_have_calls_of_their_own(tools: FakeCluster) -> None:
    talker = await talk(tools, CALL)
    _, body = await talker.whole({**ASKED, "n": 3})
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
    assert len(set(ids)) == 3
    _, events = await tools.stream(CHAT, {**ASKED, "n": 3})
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert put_together([choice["delta"] for choice in mine])["calls"][0]["arguments"] == '{"city": "Oslo"}'
        assert mine[-1]["finish_reason"] == "tool_calls"


async def test_an_answer_without_a_call_is_plain(tools: FakeCluster) -> None:
    talker = await talk(tools, "It is <b>warm</b> ")
    choice, _ = await talker.whole(ASKED)
    assert choice["message"] == {"role": "assistant", "content": "It is <b>warm</b> ", "refusal": None}
    assert choice["finish_reason"] == "stop"
    message, _ = await talker.streamed(ASKED)
    assert (message["content"], message["calls"], message["finish_reason"]) == ("It is <b>warm</b> ", [], "stop")


async def test_a_call_that_is_cut_ends_by_length_with_valid_arguments(tools: FakeCluster) -> None:
    talker = await talk(tools, CALL)
    asked = {**ASKED, "max_tokens": CALL.index("lo") + 1}
    choice, _ = await talker.whole(asked)
    assert choice["finish_reason"] == "length"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Osl"}
    message, deltas = await talker.streamed(asked)
    assert json.loads(message["calls"][0]["arguments"]) == {"city": "Osl"} and message["finish_reason"] == "length"
    assert len(deltas) == asked["max_tokens"]


@pytest.mark.parametrize("asked", [HELLO, {**ASKED, "tool_choice": "none"}])
async def test_without_tools_markers_are_text(tools: FakeCluster, asked: dict[str, Any]) -> None:
    talker = await talk(tools, CALL)
    choice, _ = await talker.whole(asked)
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    _, deltas = await talker.streamed(asked)
    assert [delta["content"] for delta in deltas] == [*CALL, ""]


@pytest.mark.parametrize(("choice", "reason"), [("auto", "function_call"), ({"name": "weather"}, "stop")])
async def test_functions_are_answered_in_their_deprecated_form(tools: FakeCluster, choice: Any, reason: str) -> None:
    talker = await talk(tools, CALL + OTHER)
    asked = {**HELLO, "functions": [WEATHER["function"]], "function_call": choice}
    whole, _ = await talker.whole(asked)
    assert whole["finish_reason"] == reason
    assert whole["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    _, deltas = await talker.streamed(asked)
    parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert parts[0]["name"] == "weather" and not any("name" in part for part in parts[1:])
    assert "".join(part["arguments"] for part in parts) == '{"city": "Oslo"}'
    assert not any("tool_calls" in delta for delta in deltas)
    _, events = await tools.stream(CHAT, asked)
    assert events[-1]["choices"][0]["finish_reason"] == reason


async def test_stop_strings_are_found_in_the_content_alone(tools: FakeCluster) -> None:
    talker = await talk(tools, f"So: {CALL} and Oslo is cold")
    asked = {**ASKED, "stop": ["Oslo", "weather"]}
    choice, _ = await talker.whole(asked)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert choice["message"]["content"] == "So:\nand " and choice["finish_reason"] == "tool_calls"
    message, _ = await talker.streamed(asked)
    assert (message["content"], len(message["calls"])) == ("So:\nand ", 1)


async def test_each_token_has_its_logprobs_and_id(tools: FakeCluster) -> None:
    talker = await talk(tools, CALL)
    asked = {**ASKED, "logprobs": True, "return_token_ids": True}
    choice, _ = await talker.whole(asked)
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(CALL) + 1
    _, events = await tools.stream(CHAT, asked)
    assert all(len(event["choices"][0]["logprobs"]["content"]) == 1 for event in events[:-1])
    assert [event["choices"][0]["token_ids"][0] for event in events[:-1]] == choice["token_ids"]


async def test_a_model_of_unknown_tool_format_says_so(model: Path) -> None:
    async with open_cluster(model) as cluster:  # the template of the fake checkpoint writes no calls
        await talk(cluster, CALL)
        response, body = await cluster.post(CHAT, ASKED)
        assert response.headers["x-tandem-tools"] == "unparsed"
        assert body["choices"][0]["message"]["content"] == CALL
        assert "x-tandem-tools" not in (await cluster.post(CHAT, HELLO))[0].headers
        assert "x-tandem-tools" not in (await cluster.post(CHAT, {**ASKED, "tool_choice": "none"}))[0].headers
        response, _ = await cluster.stream(CHAT, ASKED)
        assert response.headers["x-tandem-tools"] == "unparsed"


LINES = {"open": "<do>", "close": "</do>", "content": "kv-lines"}
TO_WEATHER = {"function": {"name": "weather", "arguments": "{content}"}}


async def test_calls_that_no_grammar_constrains_say_so(tmp_path: Path) -> None:
    directory = fake_checkpoint(tmp_path / "m")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    fields = {"tool_calls": {**LINES, "transform": TO_WEATHER}}
    settings["response_template"] = {"start_anchor": "x", "fields": fields}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    async with open_cluster(directory) as cluster:
        talker = await talk(cluster, "<do>city: Oslo</do>")
        response, body = await cluster.post(CHAT, ASKED)
        assert response.headers["x-tandem-tools"] == "unconstrained"
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert (await talker.whole(HELLO))[1]


async def test_keywords_that_are_left_out_are_refused_where_parameters_are_strict(model: Path) -> None:
    async with open_cluster(model, chat_template=PLAIN, strict_params=True) as cluster:
        await talk(cluster, CALL)
        for more, status in (({}, 200), ({"not": {"const": "Rome"}}, 400)):
            schema = {"type": "object", "properties": {"city": {"type": "string", **more}}}
            function = {"name": "weather", "parameters": schema}
            response, body = await cluster.post(CHAT, {**HELLO, "tools": [{"type": "function", "function": function}]})
            assert response.status == status, body
        param = "tools[0].function.parameters.properties.city.not"
        assert (body["error"]["param"], body["error"]["code"]) == (param, "unsupported")


async def test_keywords_that_are_left_out_of_tools_are_named(tools: FakeCluster) -> None:
    await talk(tools, CALL)
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "Rome"}}}}
    asked = {**HELLO, "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}]}
    response, body = await tools.post(CHAT, asked)
    assert response.status == 200, body
    assert response.headers["x-tandem-ignored"] == "tools[0].function.parameters.properties.city.not"
    schema["type"] = "objec"
    response, body = await tools.post(CHAT, asked)
    assert (response.status, body["error"]["param"]) == (400, "tools[0].function.parameters.type")


async def test_tools_whose_schemas_cannot_be_compiled_say_so(
    tools: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> str:
        raise RequestError("takes more than 2 s", code="grammar_too_complex")

    await talk(tools, CALL)
    monkeypatch.setattr(GrammarCompiler, "compile", refuse)
    response, body = await tools.post(CHAT, ASKED)
    assert response.status == 200, body
    assert response.headers["x-tandem-tools"] == "unconstrained"
    response, body = await tools.post(CHAT, {**ASKED, "tool_choice": "required"})
    assert (response.status, body["error"]["code"]) == (400, "grammar_too_complex")


async def test_the_parser_can_be_chosen_or_turned_off(model: Path) -> None:
    async with open_cluster(model, tool_call_parser="hermes") as cluster:
        choice, _ = await (await talk(cluster, CALL)).whole(ASKED)
        assert choice["message"]["tool_calls"]
    async with open_cluster(model, chat_template=OPENS, tool_call_parser="none", reasoning_parser="none") as cluster:
        await talk(cluster, CALL)
        response, body = await cluster.post(CHAT, ASKED)
        assert body["choices"][0]["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert response.headers["x-tandem-tools"] == "unparsed"


# -- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "opened"), [(REASONS, "<think>"), (OPENS, "")])
async def test_reasoning_is_apart_from_content(model: Path, template: str, opened: str) -> None:
    async with open_cluster(model, chat_template=template) as cluster:
        said = f"{opened}\nHm, well.\n</think>\n\nYes."
        talker = await talk(cluster, said)
        choice, body = await talker.whole(HELLO)
        message = choice["message"]
        assert message["content"] == "Yes." and choice["finish_reason"] == "stop"
        assert message["reasoning_content"] == message["reasoning"] == "Hm, well."
        tokens = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert tokens == pytest.approx(said.index("</think>") + len("</think>"), abs=len(opened))
        message, deltas = await talker.streamed({**HELLO})
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm, well.")
        assert message["reasoning"] == "Hm, well." and len(deltas) == len(said) + 1
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, events = await cluster.stream(CHAT, {**HELLO, "stream_options": options})
        counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == tokens


async def test_reasoning_and_a_call(model: Path) -> None:
    async with open_cluster(model, chat_template=OPENS) as cluster:
        talker = await talk(cluster, f"I look it up.</think>\n\n{CALL}")
        choice, _ = await talker.whole(ASKED)
        message = choice["message"]
        assert (message["content"], message["reasoning"]) == (None, "I look it up.")
        assert len(message["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
        message, _ = await talker.streamed(ASKED)
        assert (message["content"], message["reasoning"], len(message["calls"])) == (None, "I look it up.", 1)


async def test_reasoning_may_be_left_out(model: Path) -> None:
    async with open_cluster(model, chat_template=OPENS) as cluster:
        talker = await talk(cluster, "Hm.</think>Yes.")
        asked = {**HELLO, "include_reasoning": False}
        choice, body = await talker.whole(asked)
        assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        message, deltas = await talker.streamed(asked)
        assert message == {"content": "Yes.", "calls": [], "finish_reason": "stop"} and len(deltas) == 16


async def test_reasoning_is_off_where_the_template_closes_it(model: Path) -> None:
    async with open_cluster(model, chat_template=REASONS) as cluster:
        talker = await talk(cluster, "Yes.")
        choice, _ = await talker.whole({**HELLO, "chat_template_kwargs": {"enable_thinking": False}})
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes.", None)


async def test_stop_strings_are_not_looked_for_in_reasoning(model: Path) -> None:
    async with open_cluster(model, chat_template=OPENS) as cluster:
        talker = await talk(cluster, "One or two?</think>One. Two.")
        choice, _ = await talker.whole({**HELLO, "stop": "two"})
        assert choice["message"]["content"] == "One. Two."
        choice, _ = await talker.whole({**HELLO, "stop": " "})
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("One.", "One or two?")


async def test_a_client_cannot_open_reasoning_by_typing_its_marker(model: Path) -> None:
    async with open_cluster(model, chat_template=REASONS.replace("<|end|>", "")) as cluster:
        served = cluster.services.model
        for content in ("x", "<think>"):
            for generation in (True, False):
                asked = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": generation}
                assert not served.chat_text(parse_chat(asked)).thinking
        said = {"role": "assistant", "content": "<think>Hm"}
        asked = {"messages": [*HELLO["messages"], said], "continue_final_message": True}
        assert served.chat_text(parse_chat(asked)).thinking
        said["content"] = "<think>Hm</think>"
        assert not served.chat_text(parse_chat(asked)).thinking


async def test_no_parser_exists_without_need(tools: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []
    init = Choice.__init__
    monkeypatch.setattr(
        Choice, "__init__", lambda self, *args, **named: (made.append(type(self)), init(self, *args, **named))[1]
    )
    talker = await talk(tools, "hi")
    await talker.whole(HELLO)
    await talker.whole(ASKED)
    assert made == [Choice, ParsedChoice]
