"""The corpus of the built-in model: deterministic, split without overlap, with checkers that tell right from wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.builtin_model import corpus
from bench.builtin_model.corpus.arithmetic import addition, subtraction
from bench.builtin_model.corpus.items import Item
from bench.eval import checks
from bench.eval.checks import Answer, check
from bench.eval.evaluate import GOLDEN, read_golden
from common.builtin import path

ROUNDS = 300


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(path() / "tokenizer.json"))


def reference(item: Item) -> Answer:
    message = item.messages[-1]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Answer(message["content"], tuple((call["name"], call["arguments"]) for call in calls))


def damaged(answer: Answer, rng: Random) -> Iterator[Answer]:
    """Yield wrong answers of the kinds that broken servers and broken weights give."""
    yield Answer("")
    yield Answer("qua the of of the 17, of")
    if answer.calls:
        name, arguments = answer.calls[0]
        yield Answer("", ((f"{name}x", arguments),))
        yield Answer("", ((name, {**arguments, "extra": 1}),))
        yield Answer("", answer.calls * 2)
        yield Answer(f'<tool_call>{{"name": "{name}", "arguments": {{</tool_call>')
        return
    text = answer.text
    words = text.split()
    yield Answer(f"{text} {text} {text}" if len(words) > 3 else f"{text}{text[-1]} 1 x")
    if len(words) > 4:
        shuffled = words[:]
        while shuffled == words:
            rng.shuffle(shuffled)
        yield Answer(" ".join(shuffled))
        yield Answer(" ".join(words[: len(words) // 2]).rstrip(".!?"))


def test_the_same_seed_makes_the_same_conversations() -> None:
    first, second = ([corpus.conversation(Random(seed)) for seed in range(50)] for _ in range(2))
    assert first == second
    assert first[0] != corpus.conversation(Random(51))


def test_no_held_out_item_is_trained_on() -> None:
    """Items are compared by key and, for single questions, by wording, which is what the model sees."""
    rng = Random(3)
    for skill in corpus.SKILLS:
        trained = [corpus.trained(skill, rng) for _ in range(ROUNDS)]
        kept = [corpus.held_out(skill, rng) for _ in range(ROUNDS // 10)]
        assert not any(item.held_out for item in trained)
        assert not {item.key for item in trained} & {item.key for item in kept}


def test_conversations_are_made_of_training_items_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Item] = []
    original = corpus.trained

    def watched(skill: str, rng: Random) -> Item:
        drawn.append(original(skill, rng))
        return drawn[-1]

    monkeypatch.setattr(corpus, "trained", watched)
    examples = [corpus.conversation(Random(seed)) for seed in range(ROUNDS)]
    said = {json.dumps(message) for item in drawn for message in item.messages}
    for example in examples:
        assert all(message["role"] == "system" or json.dumps(message) in said for message in example.messages)


def test_golden_questions_are_never_trained_on() -> None:
    golden = {
        item.messages[-2]["content"] for item in corpus.golden() if item.skill in ("world", "tandem", "arithmetic")
    }
    rng = Random(4)
    for _ in range(2000):
        for message in corpus.conversation(rng).messages:
            assert message["content"] not in golden


@pytest.mark.parametrize("skill", list(corpus.SKILLS))
def test_every_reference_answer_is_right(skill: str) -> None:
    rng = Random(5)
    for _ in range(ROUNDS):
        item = corpus.SKILLS[skill](rng)
        verdict = check(item.check, reference(item))
        assert verdict.right and verdict.valid, (item.messages, verdict)


def test_golden_file_matches_corpus() -> None:
    records, _ = read_golden(GOLDEN)
    assert records == [json.loads(json.dumps(corpus.record(item))) for item in corpus.golden()]
    counts = Counter(record["skill"] for record in records)
    assert len(records) >= 300
    assert {"smalltalk", "world", "tandem", "arithmetic", "sort", "copy", "json", "tools", "stories"} == set(counts)


def test_damaged_answers_fail() -> None:
    rng = Random(6)
    for item in corpus.golden():
        assert check(item.check, reference(item)).right
        for answer in damaged(reference(item), rng):
            if answer != reference(item):
                assert not check(item.check, answer).right, (item.check, answer)


def test_answers_to_other_questions_fail() -> None:
    """Small talk included: a fluent sentence that does not fit is wrong."""
    items = [item for item in corpus.golden() if item.skill != "stories"]
    for item in items:
        for other in items:
            if reference(other).text != reference(item).text or other.check != item.check:
                same_fact = any(accept == other.check.get("accept") for accept in [item.check.get("accept")])
                if not same_fact and other.skill not in ("arithmetic",) and item.skill not in ("arithmetic", "tools"):
                    assert not check(item.check, reference(other)).right, (item.check, reference(other))


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"kind": "number", "value": 632}, "347 + 285 = 6325."),
        ({"kind": "number", "value": 632}, "347 + 285 = -632."),
        ({"kind": "number", "value": -62}, "285 - 347 = 62."),
        ({"kind": "number", "value": 3}, "That is 3.5"),
        ({"kind": "facts", "accept": ["cat meows"], "reject": [r"\bbarks\b"]}, "A cat meows and barks."),
        ({"kind": "facts", "accept": ["cat meows"]}, "A cat meows meows."),
        ({"kind": "exact", "accept": ["a, b"]}, "a b"),
        ({"kind": "json", "schema": {"type": "object"}, "value": {"age": 1}}, '{"age": true}'),
        ({"kind": "json", "schema": {"type": "object"}, "value": {}}, "Here: {}"),
        ({"kind": "story", "must": ["fox"]}, "A fox ran. A fox ran. A fox ran. A fox ran."),
        ({"kind": "story", "must": ["fox"]}, "A dog ran. It was fast. It was glad. It slept."),
    ],
)
def test_near_misses_fail(spec: dict[str, Any], wrong: str) -> None:
    assert not check(spec, Answer(wrong)).right


def test_a_schema_is_held_to() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "t": {"type": "array", "items": {"type": "string"}},
            "e": {"enum": ["a"]},
        },
        "required": ["n"],
        "additionalProperties": False,
    }
    assert checks.fits({"n": 1, "t": ["x"], "e": "a"}, schema)
    for wrong in ({"n": "1"}, {"n": True}, {}, {"n": 1, "z": 1}, {"n": 1, "t": [1]}, {"n": 1, "e": "b"}, [1]):
        assert not checks.fits(wrong, schema)


def test_the_working_is_right() -> None:
    assert addition(347, 285) == "7+5=12, 4+8+1=13, 3+2+1=6"
    assert subtraction(632, 285) == "2-5+10=7, 3-8-1+10=4, 6-2-1=3"
    assert addition(5, 0) == "5+0=5"


# -- tokenizer and template -------------------------------------------------------------------------------------------


def test_the_tokenizer_round_trips_any_text(tokenizer: Tokenizer) -> None:
    rng = Random(7)
    texts = ["Grüße, 世界! 🙂\n\ttab", "a  b   c", "", "1234567890 -12.5", '{"a": [1, 2]}', *map(chr, range(32, 127))]
    texts += [item.messages[-1]["content"] for item in (corpus.SKILLS["stories"](rng) for _ in range(20))]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_and_roles_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("90817", add_special_tokens=False).ids) == 5
    for text in [*(f"<|{name}|>" for name in "bos eos pad system user assistant tool end".split()), *CALL_MARKS]:
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 1
    assert 2000 <= tokenizer.get_vocab_size() <= 4096
    assert tokenizer.decode(tokenizer.encode("<tool_call>x").ids, skip_special_tokens=True) == "<tool_call>x"


CALL_MARKS = ("<tool_call>", "</tool_call>")
CALL = {"type": "function", "id": "1", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "description": "A clock", "parameters": {"type": "object"}},
}
LISTED = '{"name": "get_time", "description": "A clock", "parameters": {"type": "object"}}'


@pytest.fixture(scope="module")
def render() -> Any:
    from coordinator.text.chat_template import ChatTemplate

    source = Path(path() / "chat_template.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {"bos_token": "<|bos|>", "eos_token": "<|end|>"})

    def run(messages: list[dict[str, Any]], **options: Any) -> str:
        return template.render(messages, **options)

    return run


def test_the_template_renders_every_role(render: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Time"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"time": "12:00"}', "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 12:00 in Oslo."},
        {"role": "user", "content": "Thanks"},
    ]
    assert render(messages, tools=[TOOL]) == (
        f"<|bos|><|system|>Be kind.\nTools:\n{LISTED}<|end|><|user|>Time?<|end|>"
        '<|assistant|><tool_call>{"name": "get_time", "arguments": {"city": "Oslo"}}</tool_call><|end|>'
        '<|tool|>{"time": "12:00"}<|end|><|assistant|>It is 12:00 in Oslo.<|end|><|user|>Thanks<|end|><|assistant|>'
    )


def test_the_template_lists_tools_without_a_system_turn(render: Any) -> None:
    text = render([{"role": "user", "content": "Hi"}], tools=[TOOL])
    assert text == f"<|bos|><|system|>Tools:\n{LISTED}<|end|><|user|>Hi<|end|><|assistant|>"


def test_arguments_may_be_text_as_clients_send_them(render: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}
    as_text = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}])
    as_object = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert as_text == as_object


def test_a_final_message_can_be_continued(render: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! How"}]
    text = render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|bos|><|user|>Hi<|end|><|assistant|>Hello! How"
    closed = render(messages, add_generation_prompt=False)
    assert closed.endswith("Hello! How<|end|>")


def test_an_unknown_role_is_refused(render: Any) -> None:
    with pytest.raises(Exception, match="must be system"):
        render([{"role": "wizard", "content": "Hi"}])


def test_training_and_serving_render_alike(render: Any, tokenizer: Tokenizer) -> None:
    from bench.builtin_model.training.tokenizer import Encoder

    encoder, rng = Encoder(tokenizer), Random(8)
    for item in (corpus.SKILLS[skill](rng) for skill in corpus.SKILLS for _ in range(5)):
        sent = corpus.record(item)
        text = render(sent["messages"], tools=sent.get("tools"))
        assert tokenizer.encode(text, add_special_tokens=False).ids == encoder.prompt(item.messages[:-1], item.tools)


def test_encoder_weights_only_assistant_tokens(tokenizer: Tokenizer) -> None:
    from bench.builtin_model.training.tokenizer import Encoder

    item = corpus.SKILLS["arithmetic"](Random(9))
    ids, spoken = Encoder(tokenizer).example(corpus.Conversation(item.messages))
    said = tokenizer.decode([token for token, said in zip(ids, spoken, strict=True) if said], skip_special_tokens=False)
    assert said == f"{item.messages[-1]['content']}<|end|>"
