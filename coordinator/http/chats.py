"""The path of a chat whatever API it came by: from its parsed body to its answer.

The modules with the routes parse a body into a :class:`~coordinator.requests.spec.ChatBody` and choose a shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiohttp import web

from coordinator.api.parsed_choice import OutputReading
from coordinator.api.service import ServedModel
from coordinator.api.shape import Shape
from coordinator.grammar.requests import GrammarRequest
from coordinator.http.answer import EXTRA_HEADERS, answer
from coordinator.http.context import SERVICES
from coordinator.requests.spec import ChatBody, Options
from coordinator.text.tokenizer import ChatText

UNPARSED_TOOLS = {"x-tandem-tools": "unparsed"}
"""Header of an answer that may have tool calls in its content, because the model's way to write them is not known."""


@dataclass(slots=True)
class ChatRequest:
    """A chat as it was read. ``reading``: how outputs are parsed. ``unparsed``: whether calls stay in the content.
    ``grammar``: what the grammar of outputs depends on. ``continues``: whether outputs continue the text of the last
    message. ``capped``: whether a ``max_tokens`` beyond the context means what fits; otherwise it is refused."""

    options: Options
    text: ChatText | None
    reading: OutputReading | None
    unparsed: bool
    grammar: GrammarRequest | None
    continues: bool
    capped: bool = False

    def take_text(self) -> ChatText:
        """Return the rendered chat, once, so that its memory is released when it is tokenized."""
        assert self.text is not None
        text, self.text = self.text, None
        return text

    def take_grammar(self) -> GrammarRequest | None:
        """Return ``grammar``, once, for the same reason."""
        grammar, self.grammar = self.grammar, None
        return grammar


def read_chat(model: ServedModel, body: ChatBody, field: str) -> ChatRequest:
    """Return ``body`` rendered. ``field``: the name of the field with the messages. Raises RequestError."""
    model.check_name(body.options.model)
    text = model.chat_text(body, field)
    unparsed = body.tool_use is not None and not model.text.output.reads_calls
    continues = body.continue_final_message and bool(body.messages[-1]["content"])
    grammar = model.chat_grammar(body, text)
    return ChatRequest(body.options, text, model.reading(body, text), unparsed, grammar, continues)


async def answer_chat(
    request: web.Request, arrived_at: float, chat: ChatRequest, field: str, shape: Shape
) -> web.StreamResponse:
    """Return the response to ``chat`` in ``shape``."""
    model = request.app[SERVICES].model
    if chat.unparsed:
        request[EXTRA_HEADERS] = {**request.get(EXTRA_HEADERS, {}), **UNPARSED_TOOLS}
    grammar = await model.grammar(chat.take_grammar())
    prompt = await model.chat_prompt(chat.take_text(), chat.options, field)
    options = chat.options
    if chat.capped and (options.sampling.max_tokens or 0) > model.context_length - len(prompt):
        options = replace(options, sampling=replace(options.sampling, max_tokens=None))
    return await answer(
        request, arrived_at, [prompt], field, options, shape, grammar, chat.reading, continues=chat.continues
    )
