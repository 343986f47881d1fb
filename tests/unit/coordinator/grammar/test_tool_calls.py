"""Tool calls of every family: what models write is allowed, and what is allowed are valid calls."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest

from coordinator.grammar.errors import MALFORMED, UNSUPPORTED
from coordinator.grammar.task import Answer, Task, Tool
from coordinator.output.detection import detect
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.output.parser import OutputParser
from tests.unit.coordinator.grammar.families import model_with
from tests.unit.coordinator.grammar.matching import Model, builtin
from tests.unit.coordinator.output.reading import JSON_LINES, TOOLS, Read, add_up
from tests.unit.coordinator.output.test_regions import LISTED, QUOTED
from tests.unit.coordinator.output.transcripts import TRANSCRIPTS, Transcript


def tools_of(given: Any = TOOLS, *, strict: bool = False) -> tuple[Tool, ...]:
    functions = [tool["function"] for tool in given]
    return tuple(Tool(each["name"], each.get("parameters"), at, strict) for at, each in enumerate(functions))


NOT_WRITTEN = (
    "get_weather.call(",
    "get_weather('Paris')",
    "print(1)",
    "now[ARGS]",
    "to=python",
    "A plain answer",
    "<|call|>",
)
"""Parts of transcripts that are read but that a grammar does not let models write: arguments by position, calls without
arguments, tools of the model itself, answers outside of a channel; ``<|call|>`` ends gpt-oss's sequences."""


@pytest.mark.parametrize("control", [False, True], ids=["text", "control"])
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: f"{each.tools}-{each.text[:20]}")
def test_what_a_family_writes_is_allowed(transcript: Transcript, control: bool) -> None:
    if any(part in transcript.text for part in NOT_WRITTEN):
        pytest.skip("not among what a grammar allows")
    model = model_with(transcript.control if control else ())
    task = Task(
        tools=tools_of(),
        tool_format=TOOL_FORMATS[transcript.tools],
        reasoning=REASONING_FORMATS.get(transcript.reasoning),
        thinking=transcript.thinking,
    )
    if transcript.tools == "openai" and not control:
        assert model.verdict(task).code == UNSUPPORTED
        return
    assert model.accepts(model.grammar(task), transcript.text)


# -- families with their control tokens, where they have some ----------------------------------------------------------

HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")


def family(name: str) -> Model:
    control = next((each.control for each in TRANSCRIPTS if each.tools == name and each.control), ())
    return model_with(HARMONY if name == "openai" else control)


def read(name: str, model: Model, text: str, given: Any = TOOLS) -> Read:
    """Return what a parser of the family reads in ``text``."""
    form = OutputFormat(TOOL_FORMATS[name], REASONING_FORMATS["harmony"] if name == "openai" else None)
    numbers = iter(range(1000))
    parser = OutputParser(form, given, thinking=False, parse_tools=True, new_id=lambda: f"call_{next(numbers)}")
    pieces = model.vocabulary.split(text)
    special = [
        (model.tokenizer.decode_str([piece]), True) if isinstance(piece, int) else (piece, False) for piece in pieces
    ]
    deltas = [parser.push(*piece) for piece in special]
    return add_up([*deltas, parser.finish()])


STRICT_TOOLS: list[dict[str, Any]] = [
    {
        "function": {
            "name": "set_light",
            "parameters": {
                "type": "object",
                "properties": {
                    "room": {"enum": ["hall", "attic"]},
                    "level": {"type": "integer", "minimum": 0, "maximum": 99},
                    "on": {"type": "boolean"},
                    "hours": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["room", "level"],
                "additionalProperties": False,
            },
        }
    },
    {"function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in STRICT_TOOLS}


def forced(name: str, **options: Any) -> Task:
    harmony = REASONING_FORMATS["harmony"] if name == "openai" else None
    return Task(tools=tools_of(STRICT_TOOLS), tool_format=TOOL_FORMATS[name], forced=True, reasoning=harmony, **options)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_forced_output_is_valid_calls_and_nothing_else(name: str, pytestconfig: pytest.Config) -> None:
    model, rng, seen = family(name), random.Random(name), set[str]()
    grammar = model.grammar(forced(name))
    validators = {tool: jsonschema.Draft202012Validator(schema) for tool, schema in SCHEMAS.items()}
    for _ in range(10 if pytestconfig.getoption("--sample") else 30):
        text = model.random_match(grammar, rng, 300)
        if text is None:
            continue
        found = read(name, model, text, STRICT_TOOLS)
        assert found.calls and not found.content, (text, found)
        for tool, arguments in found.named:
            validators[tool].validate(arguments)
            seen.add(tool)
    assert seen, "no output was complete"


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("tool", ["-mcp.weather/now:0", "x" * 128])
def test_every_family_can_write_every_name_that_is_accepted(name: str, tool: str) -> None:
    given = [{"function": {"name": tool, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
    harmony = REASONING_FORMATS["harmony"] if name == "openai" else None
    task = Task(tools=tools_of(given), tool_format=TOOL_FORMATS[name], forced=True, parallel=False, reasoning=harmony)
    model, rng = family(name), random.Random(name)
    grammar = model.grammar(task)
    texts = filter(None, (model.random_match(grammar, rng, 400) for _ in range(3)))
    found = [read(name, model, text, given) for text in texts]
    assert found and all([called for called, _ in each.named] == [tool] for each in found)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_without_parallel_calls_there_is_one(name: str, pytestconfig: pytest.Config) -> None:
    model, rng, found = family(name), random.Random(name), 0
    grammar = model.grammar(forced(name, parallel=False))
    for _ in range(8 if pytestconfig.getoption("--sample") else 20):
        if (text := model.random_match(grammar, rng, 300)) is not None:
            assert len(read(name, model, text, STRICT_TOOLS).calls) == 1, text
            found += 1
    assert found


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("control", [False, True], ids=["text", "control"])
def test_text_without_a_whole_marker_is_free(name: str, control: bool) -> None:
    if name == "openai":
        return  # all text is in channels
    model = family(name) if control else model_with(())
    form = TOOL_FORMATS[name]
    grammar = model.grammar(Task(tools=tools_of(STRICT_TOOLS), tool_format=form))
    texts = [
        "",
        "Hello.",
        "a < b > c [1] {x} (y)",
        '{"a": [1, 2]}',
        "[1, 2]",
        '{"name": "Bob"}',
        "stop the car",
        "{",
        "[",
    ]
    if isinstance((model.vocabulary.split(form.trigger) or [0])[0], str):
        texts += [f"see {form.trigger[:-1]} there", f"{form.trigger[:-2]}"]
    for text in texts:
        assert model.accepts(grammar, text), text


def test_from_the_marker_on_name_and_arguments_are_obeyed() -> None:
    model = builtin()
    grammar = model.grammar(Task(tools=tools_of(STRICT_TOOLS), tool_format=TOOL_FORMATS["hermes"]))
    light = '<tool_call>{"name": "set_light", "arguments": {"room": "hall", "level": 7}}</tool_call>'
    for good in (light, f"I do. {light}", f"{light}\n{light}", f"{light} done", light.replace(">{", ">\n{")):
        assert model.accepts(grammar, good), good
    for bad in (
        '<tool_call>{"name": "set_l"',
        "<tool_call> and text",
        '<tool_call>{"arguments"',
        light.replace("hall", "cellar"),
        light.replace("7", "100"),
        light.replace(', "level": 7', ""),
        light.replace("7}", '7, "more": 1}'),
        "<tool_call></tool_call>",
        "</tool_call>x<tool_call>}",
    ):
        assert not model.accepts(grammar, bad), bad


def test_one_call_only_in_free_text() -> None:
    model = builtin()
    task = Task(tools=tools_of(STRICT_TOOLS), tool_format=TOOL_FORMATS["hermes"], parallel=False)
    grammar = model.grammar(task)
    stop = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert model.accepts(grammar, f"a {stop} b") and not model.begins(grammar, f"{stop}<tool_call>")


def test_a_call_or_a_constrained_answer() -> None:
    model = builtin()
    answer = Answer("json_schema", {"type": "object", "properties": {"x": {"type": "integer"}}}, True)
    grammar = model.grammar(Task(answer, tools=tools_of(STRICT_TOOLS), tool_format=TOOL_FORMATS["hermes"]))
    stop = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert model.accepts(grammar, stop) and model.accepts(grammar, '{"x": 1}')
    assert not model.begins(grammar, "Hello") and not model.begins(grammar, '{"x": 1}<tool_call>')


def schema_tool(schema: Any, *, strict: bool = False) -> tuple[Tool, ...]:
    return (Tool("f", schema, 3, strict),)


def call(arguments: str) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (None, ['{"a": 1}', "{}"], ["[]", "1"]),
        ({}, ['{"a": 1}'], ["null"]),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": "x"}', "[]"]),
        (
            {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}},
            ['{"a": 1}'],
            ['{"a": ""}'],
        ),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, ['{"a": 1}'], ["[]"]),
        ({"type": "object", "properties": {"a": {"$ref": "http://a.b/c"}}}, ['{"a": 1}'], ["1"]),
    ],
)
def test_what_a_schema_cannot_have_obeyed_is_left_out(schema: Any, good: list[str], bad: list[str]) -> None:
    model = builtin()
    grammar = model.grammar(Task(tools=schema_tool(schema), tool_format=TOOL_FORMATS["hermes"]))
    assert all(model.accepts(grammar, call(each)) for each in good)
    assert not any(model.accepts(grammar, call(each)) for each in bad)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ()),
        ({"properties": {"a": {"not": {}}}}, (".properties.a.not",)),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, None),
        ({"$ref": "http://a.b/c"}, (".$ref", "")),
    ],
)
def test_what_is_left_out_is_named(form: str, schema: Any, left_out: tuple[str, ...] | None) -> None:
    made = family(form).verdict(Task(tools=schema_tool(schema), tool_format=TOOL_FORMATS[form]))
    found = tuple(path for index, path in made.left_out if index == 3)
    assert len(found) == len(made.left_out) and (found == left_out if left_out is not None else found)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "objec"}, ".type"),
        ({"properties": {"a": "string"}}, ".properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, ".properties.a.$ref"),
    ],
)
def test_a_malformed_schema_is_an_error_of_the_client(form: str, schema: Any, path: str) -> None:
    made = family(form).verdict(Task(tools=schema_tool(schema), tool_format=TOOL_FORMATS[form]))
    assert made.code in MALFORMED and (made.path, made.subject) == (path, 3)


def test_both_kinds_of_alternatives_are_obeyed_where_their_branches_overlap() -> None:
    model = builtin()
    x = {"anyOf": [{"type": "integer"}, {"type": "string"}], "oneOf": [{"maximum": 5}, {"minimum": 0}]}
    schema = {"type": "object", "properties": {"x": x}, "required": ["x"]}
    grammar = model.grammar(Task(tools=schema_tool(schema), tool_format=TOOL_FORMATS["hermes"]))
    assert model.accepts(grammar, call('{"x": 1}')) and not model.accepts(grammar, call('{"x": null}'))


def test_a_strict_tool_is_obeyed_or_refused() -> None:
    model, form = builtin(), TOOL_FORMATS["hermes"]
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    made = model.verdict(Task(tools=schema_tool(schema, strict=True), tool_format=form))
    assert (made.code, made.path, made.subject) == (UNSUPPORTED, ".properties.a.not", 3)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = model.grammar(Task(tools=schema_tool(schema, strict=True), tool_format=form))
    assert model.accepts(grammar, call('{"a": 1}')) and not model.accepts(grammar, call('{"a": 1, "b": 2}'))


def test_the_schemas_of_many_tools_are_left_out_before_a_grammar_is_too_long() -> None:
    schema = {"type": "object", "properties": {"x" * 30 + str(at): {"const": "y" * 50} for at in range(100)}}
    tools = tuple(Tool(f"tool_{at}", schema, at) for at in range(100))
    model = builtin()
    grammar = model.grammar(Task(tools=tools, tool_format=TOOL_FORMATS["hermes"]))
    assert len(grammar) < 1 << 18
    assert model.accepts(grammar, '<tool_call>{"name": "tool_99", "arguments": {"z": 1}}</tool_call>')
    assert not model.begins(grammar, '<tool_call>{"name": "tool_100')


NAMES = ("f", "my-tool", "a.b", "tool name", 'q"uote', "näme", "x{1}", "f_2")


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "qwen3_coder", "deepseek_v31", "kimi_k2"])
def test_names_are_taken_literally(name: str) -> None:
    model = family(name)
    tools = tuple(Tool(each, {"type": "object", "properties": {}}, at) for at, each in enumerate(NAMES))
    for task in (Task(tools=tools, tool_format=TOOL_FORMATS[name], forced=forces) for forces in (False, True)):
        assert not model.verdict(task).error


@pytest.mark.parametrize("template", [JSON_LINES, LISTED, QUOTED], ids=["json", "listed", "quoted"])
def test_what_a_response_template_shows_is_constrained_and_read_by_it(template: dict[str, Any]) -> None:
    form = detect("{{ messages }}", (), template)
    model, rng, seen = model_with(("<do>", "</do>", "[do]", "[/do]", '<|"|>')), random.Random(3), set[str]()
    task = Task(tools=tools_of(STRICT_TOOLS), tool_format=form.tools, reasoning=form.reasoning, forced=True)
    grammar = model.grammar(task)
    for _ in range(30):
        if (text := model.random_match(grammar, rng, 300)) is None:
            continue
        parser = OutputParser(form, STRICT_TOOLS, thinking=False, parse_tools=True, new_id=lambda: "id")
        found = add_up([parser.push(text), parser.finish()])
        assert found.calls, text
        for tool, arguments in found.named:
            jsonschema.validate(arguments, SCHEMAS[tool])
            seen.add(tool)
    assert seen
