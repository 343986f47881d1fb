"""Screening of a grammar: it is compiled as the workers will do, and some of its masks are computed.

Turns llguidance's messages into errors that name the keyword, and leaves out what only its developers understand.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.grammar.limits import LIMIT_S
from coordinator.grammar import lark
from coordinator.grammar.build import build
from coordinator.grammar.errors import TOO_COMPLEX, UNSUPPORTED, GrammarError, refuse
from coordinator.grammar.expressions import parsed
from coordinator.grammar.json_schema import path_of, patterns
from coordinator.grammar.task import Answer, Task, Verdict
from coordinator.grammar.trial import SHARE, TooSlow, affordable

_POSITION = re.compile(r"^at \d+\(\d+\): ")
_TOO_MUCH = re.compile(r"too (big|large|complex|many)|limit|exceeded|fuel|max is")
_UNSUPPORTED = re.compile(
    r"not supported|Unimplemented|Unknown format|lookaround|only supported|not disjoint", re.IGNORECASE
)
_KEYWORDS = (
    ("oneOf", "oneOf"),
    ("min/maxProperties", "minProperties"),
    ("patternProperty", "patternProperties"),
    ("circular references", "$ref"),
    ("multiple", "multipleOf"),
    ("integer range", "minimum"),
    ("float range", "minimum"),
)
"""(part of a message of llguidance, the keyword that it is about)."""
MAX_TEXT = 300
_NOTHING = "allows no output at all."
_SLOW = (
    f"is too complex: computing which tokens may come next takes more than {LIMIT_S * SHARE * 1000:g} ms of CPU time "
    "for several tokens."
)


def screen(task: Task, tokenizer: LLTokenizer, vocabulary: lark.Vocabulary, limits: LLParserLimits) -> Verdict:
    """Build the grammar of ``task`` and try it out."""
    try:
        grammar, left_out = build(task, vocabulary)
        _try_out(grammar, task.answer, tokenizer, limits)
    except GrammarError as error:
        return Verdict(error=error.text, path=error.path, code=error.code, subject=error.subject)
    except RecursionError:
        return Verdict(error="is nested too deeply.", code=TOO_COMPLEX)
    return Verdict(grammar, left_out=left_out)


def _try_out(grammar: str, answer: Answer | None, tokenizer: LLTokenizer, limits: LLParserLimits) -> None:
    """Raise GrammarError if a worker cannot follow ``grammar``."""
    for last in (False, True):  # what else runs on the machine may slow down one trial
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            _explain(matcher.get_error(), answer, tokenizer)
        try:
            state = affordable(matcher, tokenizer)
        except TooSlow:
            if last:
                refuse(_SLOW, "", TOO_COMPLEX)
            continue
        if state.is_error():
            _explain(state.get_error(), answer, tokenizer)
        break
    if not any(matcher.compute_bitmask()) and not matcher.is_accepting():
        refuse(_NOTHING)


def _explain(message: str, answer: Answer | None, tokenizer: LLTokenizer) -> None:
    """Raise GrammarError for an error of llguidance."""
    if "NoExtension" in message:
        refuse(_NOTHING)
    code = "invalid_value"
    if _UNSUPPORTED.search(message):
        code = UNSUPPORTED
    elif _TOO_MUCH.search(message):
        code = TOO_COMPLEX
    path = ""
    if answer is not None and answer.kind == "json_schema":
        path = _culprit(parsed(answer.value), message, tokenizer)
    refuse(f"cannot be obeyed: {_readable(message)}.", path, code)


def _culprit(schema: object, message: str, tokenizer: LLTokenizer) -> str:
    """Return the path of the keyword of ``schema`` that an error is about, "" if it cannot be seen."""
    if "regex" in message:
        for path, expression in patterns(schema):
            if LLMatcher.validate_grammar(f"start: {lark.regex(expression)}", tokenizer):
                return path
    for part, keyword in _KEYWORDS:
        if part in message:
            return path_of(schema, keyword)
    return ""


def _readable(message: str) -> str:
    """Return the essence of a message of llguidance on one line."""
    lines = [line.strip() for line in _POSITION.sub("", message).splitlines()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = reasons[0] if reasons else lines[0] if lines else ""
    if "are available" in text:  # a list of all control tokens follows
        text = text.partition(";")[0]
    if "coerce_one_of" in text:
        text = "the branches of 'oneOf' do not provably exclude each other; use 'anyOf'"
    if "; max is" in text:  # advice on grammars follows, which the client of a schema has not written
        text = ";".join(text.split(";")[:2])
    return text.rstrip(".")[:MAX_TEXT]
