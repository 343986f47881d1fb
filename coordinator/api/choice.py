"""The state of one choice while its tokens arrive: incremental detokenization, stop strings, text and token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from common.core.request import FinishReason
from common.net.messages import Logprobs
from coordinator.api.delta_encoder import encode
from coordinator.api.prompt_report import PromptReport, closed
from coordinator.output.deltas import Delta
from coordinator.requests.spec import Json, Options
from coordinator.text.tokenizer import StopStrings, StopWindow, TextModel


@dataclass(slots=True)
class Piece:
    """A token and what it adds to a response. ``text`` is the part of the visible text and may be empty. ``delta`` is
    set if the output is parsed (:mod:`coordinator.api.parsed_choice`), and then holds everything that is added."""

    text: str
    token: int
    logprobs: Logprobs | None
    delta: Delta | None = None


class Choice:
    """The state of one choice: incremental detokenization, stop strings, and the text and token ids so far."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_window", "delta", "finish_reason", "ids", "index",
                 "logprobs", "prompt", "reasoning_tokens", "report", "rest", "sent_chars", "text")  # fmt: skip

    def __init__(
        self,
        index: int,
        prompt: list[int],
        options: Options,
        text: TextModel,
        stops: StopStrings | None,
        *,
        continues: bool = False,
        echoed: bool = False,
    ) -> None:
        """``continues``: whether the output continues the text of ``prompt``, rather than being a text of its own.
        ``echoed``: whether that text is shown too."""
        self.index, self.prompt = index, prompt
        after = prompt if continues else ()
        self._detokenizer = text.detokenizer(
            skip_special_tokens=options.skip_special_tokens, after=after, echoed=echoed
        )
        self._window = StopWindow(stops) if stops else None
        self._include_stop, self._min_tokens = options.include_stop, options.sampling.min_tokens
        self.ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: dict[str, bytearray] = {}
        """Log-probability arrays of a whole answer by name. Each is an opening bracket and the encoded elements, each
        followed by a comma."""
        self.sent_chars = 0
        self.finish_reason: str | None = None
        self.delta: Delta | None = None
        """What the last token adds, of a parsed output."""
        self.rest = Delta()
        """Text that was held back when the output ended without another token."""
        self.reasoning_tokens: int | None = None
        """Number of reasoning tokens so far, None if reasoning is not separated from content."""
        self.report: PromptReport | None = None
        """Log-probabilities of the prompt, if the answer shows them."""

    def show_prompt(self, report: PromptReport) -> None:
        """Let the answer show the log-probabilities of the prompt, and its text if that is echoed."""
        self.report, self.sent_chars = report, report.chars

    def feed(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], finish: FinishReason) -> Iterator[Piece]:
        """Yield one :class:`Piece` per token, up to the token that ends the choice. ``finish`` belongs to the last
        id."""
        last = len(ids) - 1
        for at, token in enumerate(ids):
            ends = at == last and finish is not FinishReason.RUNNING
            text, stopped = self._advance(token, ends and finish is FinishReason.STOP, ends)
            logprob = logprobs[at] if at < len(logprobs) else None
            self.ids.append(token)
            self.text.append(text)
            if stopped or ends:
                self._end(by_length=not stopped and finish is FinishReason.LENGTH)
            yield Piece(text, token, logprob, self.delta)
            if stopped:
                return
        if not ids and finish is not FinishReason.RUNNING:
            self.rest = self._rest()
            self.text.append(self.rest.content)
            self._end(by_length=finish is FinishReason.LENGTH)

    def message(self) -> Json:
        """Return OpenAI's message of a whole answer."""
        return {"role": "assistant", "content": "".join(self.text), "refusal": None}

    @property
    def former_calls(self) -> bool:
        """Whether the answer has its call as OpenAI's deprecated ``function_call``."""
        return False

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return self._window.found if self._window is not None else None

    @property
    def stopped(self) -> bool:
        """Whether the choice has ended, for any reason."""
        return self.finish_reason is not None

    def keep_logprobs(self, shown: Json) -> None:
        """Append the elements of each array of ``shown``, encoded as JSON.

        A whole answer may have tens of megabytes of them. Encoding them per token does not block the event loop, as
        encoding them at the end would, and takes a fraction of the memory."""
        for name, elements in shown.items():
            self.logprobs.setdefault(name, bytearray(b"[")).extend(encode(elements)[1:-1] + b",")

    def take_logprobs(self, name: str) -> msgspec.Raw:
        """Remove and return a kept array as JSON; of a text completion that echoes its prompt, with the prompt's
        elements before it."""
        array = self.logprobs.pop(name, bytearray(b"["))
        return closed(array, b"") if self.report is None else self.report.echo(name, array[1:])

    def _advance(self, token: int, stop_token: bool, ends: bool) -> tuple[str, bool]:
        """Return the text that may be sent after ``token``, and whether a stop string is complete."""
        text = "" if stop_token and not self._include_stop else self._detokenizer.push(token)
        if stop_token and self._window is not None and not text.endswith(shown := self._window.shown(token)):
            text += shown
        if ends:
            text += self._detokenizer.finish()
        return (text, False) if self._window is None else self._windowed(text, ends)

    def _windowed(self, text: str, ends: bool) -> tuple[str, bool]:
        """Return what may be sent of ``text``, which the present token adds, and whether a stop string is complete."""
        window = self._window
        assert window is not None
        if len(self.ids) + 1 <= self._min_tokens:
            return window.let_pass(text), False
        shown, stopped = window.push(text)
        if ends and not stopped:
            shown += window.finish()
        return shown, stopped

    def _end(self, *, by_length: bool) -> None:
        self.finish_reason = "length" if by_length else "stop"
        if self._window is not None and self.ids and not by_length:
            self._window.end(self.ids[-1])

    def _rest(self) -> Delta:
        rest = self._detokenizer.finish()
        return Delta(rest if self._window is None else self._window.let_pass(rest))
