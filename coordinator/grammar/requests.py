"""What the grammar of a request depends on: its constraint, its tools and its bound on reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.core.errors import RequestError
from coordinator.grammar.errors import UNSUPPORTED
from coordinator.grammar.task import MAX_TASK, Answer, EncodedTask, Task, Tool, encode
from coordinator.output.formats import OutputFormat
from coordinator.requests.spec import ChatBody, Constraint, Options, ToolUse


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """``encoded``: ``task`` as it is compiled. ``params``: the fields of the request by the ``subject`` of a verdict,
    for error messages. ``optional``: whether the request can be served without a grammar, as tools that are not strict
    and need not be called."""

    task: Task
    encoded: EncodedTask
    params: Mapping[int | None, str]
    optional: bool = False


def _wanted(task: Task, params: Mapping[int | None, str], optional: bool = False) -> GrammarRequest:
    encoded = encode(task)
    if (size := len(encoded.data)) > MAX_TASK:
        text = f"{params[None]!r} and the tools have {size:,} bytes; at most {MAX_TASK:,} are allowed."
        raise RequestError(text, param=params[None], code="grammar_too_complex")
    return GrammarRequest(task, encoded, params, optional)


def for_completion(options: Options) -> GrammarRequest | None:
    """Return what the grammar of a text completion depends on, None if it has no constraint. Raises RequestError if
    that is too large."""
    given = options.constraint
    return None if given is None else _wanted(Task(_answer(given)), {None: given.param})


def for_chat(body: ChatBody, form: OutputFormat, thinking: bool) -> GrammarRequest | None:
    """Return what the grammar of a chat depends on, None if its output may be anything. ``form``: how the model writes
    reasoning and calls. ``thinking``: whether the prompt ends inside reasoning. Raises RequestError if calls must be
    made or must obey their schemas, or reasoning is bounded, in a notation that is not known, or if schemas are too
    large."""
    given, use, bound = body.options.constraint, body.tool_use, body.max_reasoning_tokens
    if use is not None and form.tools is None:
        if use.choice != "auto":
            raise _unknown("tool_choice", "calls cannot be forced, as it is not known how this model writes them")
        for tool in _tools(use):
            if tool.strict:
                at = f"{use.params[tool.index].rpartition('.')[0]}.strict"
                raise _unknown(at, "the schema cannot be enforced, as it is not known how this model writes calls")
        use = None
    if bound is not None and form.reasoning is None:
        raise _unknown(body.max_reasoning_param, "it is not known how this model marks its reasoning")
    if given is None and use is None and bound is None:
        return None
    tools = () if use is None else _tools(use)
    forced = use is not None and use.choice != "auto"
    task = Task(
        answer=None if given is None else _answer(given),
        tools=tools,
        forced=forced,
        parallel=use is None or (use.parallel and use.choice != "named"),  # a named function is called once
        tool_format=form.tools if tools else None,
        reasoning=form.reasoning,
        thinking=thinking,
        max_reasoning_tokens=bound,
    )
    params: dict[int | None, str] = dict(enumerate(() if use is None else use.params))
    params[None] = given.param if given is not None else "tools" if bound is None else body.max_reasoning_param
    optional = given is None and bound is None and not forced and not any(tool.strict for tool in tools)
    return _wanted(task, params, optional)


def _answer(given: Constraint) -> Answer:
    return Answer(given.kind, given.value, given.strict, given.whitespace, given.closed)


def _tools(use: ToolUse) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, each in enumerate(use.tools):
        function = each["function"]
        assert isinstance(function, dict)
        tools.append(Tool(str(function["name"]), function.get("parameters"), index, function.get("strict") is True))
    return tuple(tools)


def _unknown(param: str, why: str) -> RequestError:
    return RequestError(f"{param!r} is not supported: {why}.", param=param, code=UNSUPPORTED)
