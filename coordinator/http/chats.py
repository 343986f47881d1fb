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
from coordinator.http.answer import EXTRA_HEADERS, answer, compiled
from coordinator.http.context import SERVICES
from coordinator.requests.spec import ChatBody, Options
from coordinator.text.tokenizer import ChatText

TOOLS_HEADER = "x-tandem-tools"
"""Header of answers to requests with tools that are not served in full: ``unparsed`` if the model's way to write calls
is not known, so that they stay in the content; ``unconstrained`` if calls are read but may break the tool's schema."""


@dataclass(slots=True)
class ChatRequest:
    """A chat as it was read. ``reading``: how outputs are parsed. ``tools``: the value of TOOLS_HEADER, "" for none.
    ``grammar``: what the grammar of outputs depends on. ``continues``: whether outputs continue the text of the last
    message. ``capped``: whether a ``max_tokens`` beyond the context means what fits; otherwise it is refused."""

    options: Options
    text: ChatText | None
    reading: OutputReading | None
    tools: str
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
    model.check_ignored(body.options)
    text = model.chat_text(body, field)
    form, tools = model.text.output, ""
    if body.tool_use is not None and form.tools is None:
        tools = "unconstrained" if form.reads_calls else "unparsed"
    continues = body.continue_final_message and bool(body.messages[-1]["content"])
    grammar = model.chat_grammar(body, text)
    return ChatRequest(body.options, text, model.reading(body, text), tools, grammar, continues)


async def answer_chat(
    request: web.Request, arrived_at: float, chat: ChatRequest, field: str, shape: Shape
) -> web.StreamResponse:
    """Return the response to ``chat`` in ``shape``."""
    model = request.app[SERVICES].model
    wanted = chat.take_grammar()
    grammar = await compiled(request, model, wanted)
    if tools := chat.tools or ("unconstrained" if wanted is not None and not grammar.text else ""):
        request[EXTRA_HEADERS] = {**request.get(EXTRA_HEADERS, {}), TOOLS_HEADER: tools}
    prompt = await model.chat_prompt(chat.take_text(), chat.options, field)
    options = chat.options
    if grammar.left_out:
        options = replace(options, ignored=(*options.ignored, *grammar.left_out))
        model.check_ignored(options)
    if chat.capped and (options.sampling.max_tokens or 0) > model.context_length - len(prompt):
        options = replace(options, sampling=replace(options.sampling, max_tokens=None))
    return await answer(
        request, arrived_at, [prompt], field, options, shape, grammar.text, chat.reading, continues=chat.continues
    )
