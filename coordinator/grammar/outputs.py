"""Grammars of whole outputs: reasoning, then an answer, tool calls, or text in which tool calls are obeyed.

Where a marker is a control token, free text is any tokens but the marker and the ends of the sequence, so that nothing
else is restricted, and a bound on reasoning counts tokens. Where it is text, free text has no control tokens, and only
the whole marker begins a call; text that resembles it stays possible. In families without a marker, an output is a call
exactly if it begins like one of a known tool, which is how it is read.
"""

from __future__ import annotations

from coordinator.grammar import lark, texts
from coordinator.grammar.answers import answer
from coordinator.grammar.errors import unsupported
from coordinator.grammar.structural_tag import markers
from coordinator.grammar.task import Task
from coordinator.grammar.tool_calls import Calls, Detail
from coordinator.output.formats import ReasoningFormat
from coordinator.requests.spec import Constraint

GAP = r"/[ \t\r\n]{1,4}/"
"""White space between reasoning and what follows it, which readers drop."""


class Output:
    """Rules for one output of ``task``. ``detail``: as of :class:`~coordinator.grammar.tool_calls.Calls`."""

    def __init__(self, grammar: lark.Grammar, vocabulary: lark.Vocabulary, task: Task, *, detail: Detail) -> None:
        self._grammar, self._vocabulary, self._task = grammar, vocabulary, task
        self._calls = None
        if task.tools and task.tool_format is not None:
            form = task.tool_format
            self._calls = Calls(grammar, vocabulary, form, task.tools, parallel=task.parallel, detail=detail)
        self._gap = ""

    @property
    def left_out(self) -> tuple[tuple[int, str], ...]:
        """Index of a tool and path of what of its schema is not obeyed."""
        return () if self._calls is None else tuple(dict.fromkeys(self._calls.left_out))

    @property
    def _space(self) -> str:
        """Expression for white space that may be left out."""
        self._gap = self._gap or self._grammar.rule("GAP", GAP)
        return f"{self._gap}?"

    def start(self) -> str:
        """Return the expression that the whole output must match. Raises GrammarError."""
        reasoning, tools = self._task.reasoning, self._task.tool_format
        if (reasoning is not None and reasoning.style == "channels") or (tools and tools.style == "channels"):
            return self._channels()
        if reasoning is not None:
            return self._tags(reasoning)
        return self._rest()

    # -- reasoning between tags -------------------------------------------------------------------------------------

    def _tags(self, form: ReasoningFormat) -> str:
        """Return the expression for reasoning between tags and what comes behind it. If the prompt does not end inside
        reasoning, the output may begin with some."""
        rest = self._grammar.rule("answer", self._around_content(form))
        reasoned = self._reasoned(form, rest)
        if self._task.thinking:
            return reasoned
        begin = markers(form.begin.strip(), self._vocabulary)
        before = self._free() if self._begins_free(form) else self._space
        return self._grammar.rule("output", f"{before} {begin} {reasoned} | {rest}")

    def _begins_free(self, form: ReasoningFormat) -> bool:
        """Return whether an output may begin with any tokens. White space before reasoning then needs no rule."""
        if self._task.answer is not None or not isinstance(self._vocabulary.split(form.begin)[0], int):
            return False
        if self._calls is None:
            return True
        return not self._task.forced and bool(self._calls.form.opening) and isinstance(self._trigger()[0], int)

    def _reasoned(self, form: ReasoningFormat, rest: str) -> str:
        """Return the expression for reasoning that has begun, its end, and ``rest``."""
        end = form.end.strip()
        if (token := self._vocabulary.control_id(end)) is None:
            return f"{self._text_thoughts(end)} {self._space} {rest}"
        ended = f"{lark.tokens(token)} {self._space} {rest}"
        trigger = None if self._calls is None or not form.ended_by_call else self._trigger()[0]
        if not isinstance(trigger, int):
            return f"{self._thoughts(token)} {ended}"
        called = f"{lark.tokens(trigger)} {self._behind_trigger()}"
        ended = self._grammar.rule("ended", f"{ended} | {called}")
        return f"{self._thoughts(token, trigger)} {ended}"

    def _thoughts(self, *ids: int) -> str:
        """Return the expression for reasoning: tokens other than ``ids`` and the ends of a sequence, within the
        bound."""
        most = self._task.max_reasoning_tokens
        if most == 0:
            return ""
        return self._other_tokens(*ids) + ("*" if most is None else f"{{0,{most}}}")

    def _text_thoughts(self, end: str) -> str:
        """Return the expression for reasoning up to the text ``end``, within the bound. Behind its last token the only
        continuation is ``end``, so that this is forced."""
        most = self._task.max_reasoning_tokens
        if most is None:
            return self._grammar.rule("reasoning", f"{lark.ANY_TEXT} {lark.literal(end)}", "[lazy]")
        if most == 0:
            return lark.literal(end)
        within = self._grammar.other(texts.pieces_without(end))
        # llguidance lets a part at the very beginning have one more token than its ``max_tokens``, unless that is 0
        thoughts = self._grammar.rule("reasoning", within, f"[max_tokens={most - self._task.thinking}]")
        return f"{thoughts} {lark.literal(end)}"

    def _around_content(self, form: ReasoningFormat) -> str:
        rest = self._rest()
        if not form.around_content or self._task.answer is None:
            return rest
        before, after = (markers(text, self._vocabulary) for text in form.around_content)
        return f"({before})? {self._grammar.rule('content', rest)} ({after})?"

    # -- what comes behind reasoning --------------------------------------------------------------------------------

    def _rest(self) -> str:
        constrained = self._answer()
        if self._calls is None:
            return constrained or self._free()
        if self._task.forced:
            return f"{self._space} {self._whole_group()}"
        if constrained is not None:
            return f"{self._space} {self._whole_group()} | {constrained}"
        return self._text_with_calls() if self._calls.form.opening else self._unmarked()

    def _answer(self) -> str | None:
        given = self._task.answer
        if given is None:
            return None
        constraint = Constraint(
            kind=given.kind,
            value=given.value,
            param="",
            strict=given.strict,
            whitespace=given.whitespace,
            closed=given.closed,
        )
        return answer(self._grammar, constraint, self._vocabulary)

    def _free(self) -> str:
        """Return the expression for any tokens that begin neither reasoning nor a call."""
        form, texts = self._task.reasoning, list[str]()
        if form is not None:
            texts.append(form.begin.strip())
        if self._calls is not None:
            texts += [self._calls.opening(), *self._calls.form.also]
        parts = [self._vocabulary.split(text)[0] for text in texts if text]
        return f"{self._other_tokens(*(part for part in parts if isinstance(part, int)))}*"

    # -- text with calls --------------------------------------------------------------------------------------------

    def _trigger(self) -> tuple[str | int, str]:
        """Return what begins a group of calls, a text or a control token, and the text between it and the group."""
        assert self._calls is not None
        opening = self._calls.opening()
        first = self._vocabulary.split(opening)[0]
        if isinstance(first, int):
            token = next(text for text in range(1, len(opening) + 1) if self._vocabulary.control_id(opening[:text]))
            return first, opening[token:]
        text = self._calls.form.trigger
        if opening == f"{text}\n[":  # a word alone is often no call
            return f"{text}[", ""
        text = text if len(text) <= len(first) else first
        return text, opening[len(text) :]

    def _behind_trigger(self) -> str:
        assert self._calls is not None
        return f"{self._calls.flexible(self._trigger()[1])} {self._calls.group()}"

    def _whole_group(self) -> str:
        assert self._calls is not None
        return f"{self._calls.flexible(self._calls.opening())} {self._calls.group()}"

    def _other_introductions(self) -> list[str]:
        """Return expressions for groups of calls that other markers introduce, those that are control tokens."""
        calls = self._calls
        assert calls is not None
        bracket = '"["' if calls.opening().endswith("[") else ""
        return [
            f"{lark.tokens(token)} {calls.space} {bracket} {calls.group()}"
            for other in calls.form.also
            if (token := self._vocabulary.control_id(other)) is not None
        ]

    def _text_with_calls(self) -> str:
        """Return the expression for text in which the trigger of the family begins calls."""
        trigger, _ = self._trigger()
        if isinstance(trigger, int):
            options = [f"{lark.tokens(trigger)} {self._behind_trigger()}", *self._other_introductions()]
            free = self._grammar.rule("free", self._free())
            group = self._grammar.rule("calls", " | ".join(options))
            return f"{free} ({group} {free}){'*' if self._task.parallel else '?'}"
        text = self._grammar.rule("TEXT", lark.ANY_TEXT)
        head = self._grammar.rule("head", f"{text} {lark.literal(trigger)}", "[lazy]")
        options = [f"{head} {self._behind_trigger()}", *(f"{text} {each}" for each in self._other_introductions())]
        part = self._grammar.rule("part", " | ".join(options))
        return f"{part}* {text}" if self._task.parallel else f"{part} | {text}"

    def _unmarked(self) -> str:
        """Return the expression for text that is a call exactly if it begins like one."""
        calls = self._calls
        assert calls is not None
        text = calls.unlike_calls()
        return " | ".join([calls.unmarked_group(), text, *(f"{text} {each}" for each in self._other_introductions())])

    # -- channels ---------------------------------------------------------------------------------------------------

    def _channels(self) -> str:
        """Return the expression for messages of the harmony format behind ``<|start|>assistant``: analyses and
        comments, then a call or the final message. A bound holds for one analysis, and there is no other."""
        names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
        channel, message, end, start = (self._needed(name) for name in names)
        controls = (channel, message, end, start)
        text, thoughts = self._other_tokens(*controls), self._thoughts(*controls)
        at_channel, at_message, at_end = map(lark.tokens, (channel, message, end))
        following = f'{lark.tokens(start)} "assistant"'
        analysis = f'{at_channel} "analysis" {at_message} {thoughts} {at_end} {following}'
        comment = f'{at_channel} "commentary" {at_message} {text}* {at_end} {following}'
        bounded = self._task.max_reasoning_tokens is not None
        before = self._grammar.rule("before", comment if bounded else f"{analysis} | {comment}")
        last = self._grammar.rule("last", " | ".join(self._last_messages(at_channel, at_message, text)))
        if self._task.thinking:
            return f"{thoughts} {at_end} {following} {before}* {last}"
        return f"({analysis})? {before}* {last}" if bounded else f"{before}* {last}"

    def _last_messages(self, channel: str, message: str, text: str) -> list[str]:
        """Return the expressions for the message that ends an output. A call names its function before its channel or
        behind it."""
        constrain = self._vocabulary.control_id("<|constrain|>")
        kind = '(" json")?' if constrain is None else f'(" "? {lark.tokens(constrain)} "json" | " json")?'
        last: list[str] = []
        if self._calls is not None:
            behind = self._calls.named_calls(f"{kind} {message}")
            before = self._calls.named_calls(f'{channel} "commentary" {kind} {message}')
            last = [f'{channel} "commentary to=functions." {behind}', f'" to=functions." {before}']
        if self._calls is None or not self._task.forced:
            last.append(f'{channel} "final" {kind} {message} ({self._answer() or f"{text}*"})')
        return last

    # -- tokens -----------------------------------------------------------------------------------------------------

    def _needed(self, text: str) -> int:
        token = self._vocabulary.control_id(text)
        if token is None:
            unsupported(f"is not supported: this model's tokenizer has no token {text!r}.")
        return token

    def _other_tokens(self, *ids: int) -> str:
        return lark.other_tokens(*sorted({*ids, *self._vocabulary.end_ids}))
