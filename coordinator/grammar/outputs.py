"""Grammars of whole outputs: reasoning, then an answer, tool calls, or text in which tool calls are obeyed.

What begins a call is what :mod:`coordinator.output.introductions` says, by which outputs are read too; from there on
the call is obeyed. Where all markers are or contain control tokens, free text is any tokens but those and the ends of
the sequence, so that nothing else is restricted, and a bound on reasoning counts tokens. Where one is text, free text
has no control tokens, and only the whole marker begins a call; text that resembles it stays possible. In families
without a marker, an output is a call exactly if it begins like one of a known tool.
"""

from __future__ import annotations

import functools

from coordinator.grammar import lark, texts
from coordinator.grammar.answers import answer
from coordinator.grammar.errors import unsupported
from coordinator.grammar.structural_tag import markers
from coordinator.grammar.task import Task
from coordinator.grammar.tool_calls import Calls, Detail
from coordinator.output.formats import ReasoningFormat
from coordinator.output.introductions import counting
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
        begins_free = not self._task.thinking and self._begins_free(form)
        reasoned = self._reasoned(form, rest, begins_free)
        if self._task.thinking:
            return reasoned
        begin = markers(form.begin.strip(), self._vocabulary)
        before = self._free() if begins_free else self._space
        return self._grammar.rule("output", f"{before} {begin} {reasoned} | {rest}")

    def _begins_free(self, form: ReasoningFormat) -> bool:
        """Return whether an output may begin with any tokens. White space before reasoning then needs no rule."""
        if self._task.answer is not None or not isinstance(self._vocabulary.split(form.begin)[0], int):
            return False
        if self._calls is None:
            return True
        return not self._task.forced and bool(self._calls.form.opening) and self._by_token()

    def _reasoned(self, form: ReasoningFormat, rest: str, behind_text: bool) -> str:
        """Return the expression for reasoning that has begun, its end, and ``rest``. ``behind_text``: there may be text
        before it. Readers then may take it for content, so that no call may begin in it."""
        end = form.end.strip()
        calls = self._beginnings if form.ended_by_call else []
        token = self._vocabulary.control_id(end)
        if token is None or not all(isinstance(trigger, int) for trigger, _ in calls):
            return self._text_thoughts([(end if token is None else token, f"{self._space} {rest}"), *calls])
        ended = f"{lark.tokens(token)} {self._space} {rest}"
        if not calls:
            hidden = self._triggers() if behind_text and not form.anywhere else ()
            return f"{self._thoughts(token, *hidden)} {ended}"
        called = (f"{lark.tokens(trigger)} {behind}" for trigger, behind in calls if isinstance(trigger, int))
        ended = self._grammar.rule("ended", " | ".join((ended, *called)))
        return f"{self._thoughts(token, *self._triggers())} {ended}"

    def _thoughts(self, *ids: int) -> str:
        """Return the expression for reasoning: tokens other than ``ids`` and the ends of a sequence, within the
        bound."""
        most = self._task.max_reasoning_tokens
        if most == 0:
            return ""
        return self._other_tokens(*ids) + ("*" if most is None else f"{{0,{most}}}")

    def _text_thoughts(self, ends: list[tuple[str | int, str]]) -> str:
        """Return the expression for reasoning up to the first of ``ends``, texts or tokens, and for what stands behind
        each, within the bound. Behind its last token the only continuation is an end, so that it is forced."""
        most = self._task.max_reasoning_tokens
        if most is None:
            return self._in_text(ends, self._any_text())
        options = (f"{lark.tokens(end) if isinstance(end, int) else lark.literal(end)} {rest}" for end, rest in ends)
        ended = self._grammar.rule("ended", " | ".join(options))
        if most == 0:
            return ended
        within = self._grammar.other(texts.pieces_without(*(end for end, _ in ends if isinstance(end, str))))
        # llguidance lets a part at the very beginning have one more token than its ``max_tokens``, unless that is 0
        thoughts = self._grammar.rule("reasoning", within, f"[max_tokens={most - self._task.thinking}]")
        return f"{thoughts} {ended}"

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
            return f"{self._space} {self._calls.whole_group()}"
        if constrained is not None:
            return f"{self._space} {self._calls.whole_group()} | {constrained}"
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
        form, ids = self._task.reasoning, self._triggers()
        begin = self._vocabulary.split(form.begin.strip())[:1] if form is not None else []
        return f"{self._other_tokens(*ids, *(part for part in begin if isinstance(part, int)))}*"

    # -- text with calls --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _beginnings(self) -> list[tuple[str | int, str]]:
        """What begins groups of calls in free text, texts or control tokens, and the expression for what stands behind
        each. If a marker has text and tokens, its first token is what begins the group."""
        found: list[tuple[str | int, str]] = []
        for each in counting(self._calls.form, self._names_token) if self._calls is not None else ():
            assert self._calls is not None
            behind, parts = self._calls.introduced(each), self._vocabulary.split(each.marker)
            at = next((at for at, part in enumerate(parts) if isinstance(part, int)), None)
            if at is None:
                found.append((each.marker, behind))
            else:
                others = (
                    lark.literal(part) if isinstance(part, str) else lark.tokens(part) for part in parts[at + 1 :]
                )
                found.append((parts[at], " ".join((*others, behind))))
        return found

    def _names_token(self, text: str) -> bool:
        return any(isinstance(part, int) for part in self._vocabulary.split(text))

    def _triggers(self) -> list[int]:
        """Return the control tokens that begin groups of calls."""
        return [trigger for trigger, _ in self._beginnings if isinstance(trigger, int)]

    def _by_token(self) -> bool:
        """Return whether all groups of calls begin with control tokens."""
        return all(isinstance(trigger, int) for trigger, _ in self._beginnings)

    def _in_text(self, beginnings: list[tuple[str | int, str]], text: str) -> str:
        """Return the expression for text, of the terminal ``text``, up to the first of ``beginnings``, and for what is
        behind that."""
        options: list[str] = []
        for trigger, behind in beginnings:
            if isinstance(trigger, int):
                options.append(f"{text} {lark.tokens(trigger)} {behind}")
            else:
                head = self._grammar.shared("head", f"{text} {lark.literal(trigger)}", "[lazy]")
                options.append(f"{head} {behind}")
        return self._grammar.shared("part", " | ".join(options))

    def _any_text(self) -> str:
        return self._grammar.shared("TEXT", lark.ANY_TEXT)

    def _text_with_calls(self) -> str:
        """Return the expression for text in which markers begin calls."""
        beginnings = self._beginnings
        if self._by_token():
            free = self._grammar.rule("free", self._free())
            group = self._grammar.rule("calls", " | ".join(f"<[{trigger}]> {behind}" for trigger, behind in beginnings))
            return f"{free} ({group} {free}){'*' if self._task.parallel else '?'}"
        text = self._any_text()
        part = self._in_text(beginnings, text)
        return f"{part}* {text}" if self._task.parallel else f"{part} | {text}"

    def _unmarked(self) -> str:
        """Return the expression for text that is a call exactly if it begins like one."""
        assert self._calls is not None
        text, beginnings = self._calls.unlike_calls(), self._beginnings
        options = [self._calls.unmarked_group(), text]
        return " | ".join([*options, self._in_text(beginnings, text)] if beginnings else options)

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
