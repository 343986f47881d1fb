"""``tandem chat``: a chat in the terminal with a running server.

On a terminal it prompts for messages, streams each answer and prints its speed. Ctrl-C stops an answer or discards the
line being typed, Ctrl-D ends the chat. If standard input is not a terminal, it is read as one message and only the
answer is printed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

from common.config.chat import ChatConfig
from common.core.errors import StartError
from common.core.printable import printable, without_control
from common.net.http_client import HttpClient, HttpError

Messages = list[dict[str, str]]


def run(config: ChatConfig, prompt: str | None) -> int:
    """Answer ``prompt`` or standard input once, or chat if neither is given. Returns the exit code. Raises StartError
    if the prompt is empty or the server gives no answer."""
    server = HttpClient(config.url, config.api_key)
    conversation = _Conversation(server, server.model(), config)
    if prompt is None and sys.stdin.isatty():
        return conversation.hold()
    return conversation.answer_once(prompt if prompt is not None else sys.stdin.read())


class _Conversation:
    """The messages so far and the settings of the next request."""

    def __init__(self, server: HttpClient, model: str, config: ChatConfig) -> None:
        self._server, self._model = server, model
        self._console = Console(highlight=False)
        self._settings: dict[str, Any] = {
            name: value
            for name, value in (("max_tokens", config.max_tokens), ("temperature", config.temperature))
            if value is not None
        }
        self._messages: Messages = []
        if config.system_prompt:
            self._messages.append({"role": "system", "content": config.system_prompt})

    def answer_once(self, prompt: str) -> int:
        """Answer ``prompt`` and return the exit code. Raises StartError if there is no answer."""
        if not prompt.strip():
            raise StartError("there is nothing to send", "the prompt is empty", 'run tandem chat "your question"')
        try:
            self._answer(prompt, sys.stdout.isatty())
        except HttpError as error:
            todo = error.todo("change the question or the flags" if error.status == 400 else "see the server's log")
            raise StartError("the server gave no answer", str(error), todo) from error
        except KeyboardInterrupt:
            print()
            return 130
        return 0

    def hold(self) -> int:
        """Chat until end of file (Ctrl-D) and return the exit code."""
        import readline  # noqa: F401 - line editing and history for input()

        self._console.print(
            f"[bold]{self._model}[/] at {self._server.url}   [dim]Ctrl-C stops an answer, Ctrl-D ends the chat[/]"
        )
        while True:
            try:
                prompt = input("\n› ")
            except EOFError:
                self._console.print()
                return 0
            except KeyboardInterrupt:  # not an exit: it may have been meant for an answer that has just ended
                self._console.print("\n[dim]Ctrl-D ends the chat[/]")
                continue
            if not prompt.strip():
                continue
            try:
                self._answer(prompt, True)
            except HttpError as error:
                self._console.print(printable(str(error)), style="red", markup=False)
            except KeyboardInterrupt:
                self._console.print("\n[dim]stopped[/]")

    def _answer(self, prompt: str, figures: bool) -> None:
        """Print one answer as it streams and add it to the messages, also if it was interrupted. ``figures``: whether
        to print its reasoning and its speed too."""
        asked = [*self._messages, {"role": "user", "content": prompt}]
        said: list[str] = []
        started = time.perf_counter()
        moments: list[float] = []
        reasons, terminal = False, sys.stdout.isatty()
        chunks = self._server.chat({"model": self._model, "messages": asked, **self._settings})
        try:
            for chunk in chunks:
                for choice in chunk.get("choices") or ():
                    moments.append(time.perf_counter())
                    delta = choice.get("delta") or {}
                    text = delta.get("content") or ""
                    if figures and (thought := delta.get("reasoning_content")):
                        reasons = True
                        self._console.print(without_control(thought), style="dim", end="", markup=False, soft_wrap=True)
                    if text and reasons:
                        reasons = False
                        sys.stdout.write("\n\n")
                    said.append(text)
                    sys.stdout.write(without_control(text) if terminal else text)
                    sys.stdout.flush()
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator; closing it closes the connection
            if said:
                self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        print()
        if figures and moments:
            self._console.print(f"[dim]{_figures(started, moments)}[/]")


def _figures(started: float, moments: list[float]) -> str:
    """Return the time to first token, the token rate and the token count as text. ``moments``: the arrival of each
    chunk. The last chunk carries the finish reason instead of a token."""
    count = max(1, len(moments) - 1)
    seconds = moments[-1] - moments[0]
    pace = f", then {count / seconds:.0f} tokens/s" if seconds > 0 and count > 1 else ""
    return f"first token after {1000 * (moments[0] - started):.0f} ms{pace}, {count} tokens"
