"""The served model: its name, its tokenizer and chat template, its limits, and the rules of its sampling.

Turns validated bodies into token ids. A text that cannot fit the context is refused before any work. Long texts are
tokenized in :mod:`coordinator.text.lanes`.
"""

from __future__ import annotations

import functools
import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import TypeVar

from common.checkpoint.files import Checkpoint
from common.config.coordinator import CoordinatorConfig
from common.core.errors import RequestError
from common.kv.budget import check_length
from common.kv.prefix import Chain, chain_root
from coordinator.api.delta_encoder import encode
from coordinator.api.fields import JsonBudget, refuse
from coordinator.api.openai import parse_chat
from coordinator.api.parsed_choice import OutputReading
from coordinator.api.prompt_report import TokenNames
from coordinator.api.sampling import SamplingRules
from coordinator.api.unsupported import refuse_ignored
from coordinator.cluster.registry import Registry
from coordinator.grammar.compiler import GrammarCompiler, ObeyedGrammar
from coordinator.grammar.errors import MALFORMED
from coordinator.grammar.requests import GrammarRequest, for_chat
from coordinator.requests.errors import outside_vocabulary, too_long
from coordinator.requests.spec import ChatBody, CompletionBody, Json, Options
from coordinator.routing.router import Chains
from coordinator.text.lanes import Lanes, cost
from coordinator.text.render_budget import TooMuchText
from coordinator.text.slices import SLICE_CHARS
from coordinator.text.tokenizer import LONG, ChatText, TextModel

T = TypeVar("T")

INLINE_KEY_BYTES = 32_768
"""Bytes of prompt, times its prefix keys, that are hashed in the event loop; more is hashed by a lane."""
MAX_COUNTED_TOKENS = 1 << 20
"""Tokens that POST /tokenize returns at most, unless the context length is more."""
_ID_BYTES = 6
"""Approximate bytes of a token id in JSON, with its comma."""
_CHAR_BYTES = 4
"""Maximum bytes of a character in UTF-8."""
MOST_TEMPLATED = 12 << 20
"""Maximum characters of a rendered chat template, or one and a half times ``--max-body-bytes`` if that is more. The
context length alone is no sufficient limit: a long context has room for hundreds of megabytes of white space."""


@functools.cache
def product_version() -> str:
    """Return the installed version of Tandem, "0" if it is not installed. Cached, because every response contains it
    and the look-up takes half a millisecond."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0"


class ServedModel:
    """A served model and its name. Raises StartError if the configured context is too long or too short."""

    def __init__(self, checkpoint: Checkpoint, config: CoordinatorConfig, workers: Registry) -> None:
        self.checkpoint, self.workers = checkpoint, workers
        self.name = config.served_name
        self.created = int(time.time())
        self.text = TextModel(
            checkpoint.path,
            vocab_size=checkpoint.vocab_size,
            chat_template=config.chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self.eos_token_ids = checkpoint.eos_token_ids
        self.rules = SamplingRules(checkpoint, self.text, lambda: self.context_length)
        self._limit = min(config.max_model_len or checkpoint.position_limit, checkpoint.position_limit)
        check_length(checkpoint.max_position, config.max_model_len, checkpoint.position_limit, checkpoint.scaling)
        parsers = f"{config.tool_call_parser} {config.reasoning_parser}"  # calls are constrained to their format
        self._settings = f"{self.rules.defaults}{config.chat_template}{self._limit}{parsers}"
        self._most_repeated = config.max_body_bytes
        self._most_templated = max(MOST_TEMPLATED, config.max_body_bytes * 3 // 2)
        self._tokens_as_ids, self._strict_params = config.return_tokens_as_token_ids, config.strict_params
        self._lanes = Lanes()
        self._grammars = GrammarCompiler(checkpoint.path, checkpoint.vocab_size, self.eos_token_ids)

    def close(self) -> None:
        """Drop the text work that waits in the lanes and end their threads after the running step. End the process that
        compiles grammars."""
        self._lanes.close()
        self._grammars.close()

    def check_name(self, wanted: str | None) -> None:
        """Raise RequestError 404 unless ``wanted`` is this model's name or None."""
        if wanted is not None and wanted != self.name:
            raise RequestError(
                f"The model {wanted[:128]!r} does not exist; this server serves {self.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    def check_ignored(self, options: Options) -> None:
        """Raise RequestError if a field was ignored and ``--strict-params`` forbids that."""
        if self._strict_params:
            refuse_ignored(options)

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: it changes when the same request and seed may get a different answer. Covers
        the version, the checkpoint, the settings, and the quantization and element types that workers report."""
        loaded = sorted({(hello.fingerprint, hello.dtype) for hello in self.workers.hellos()})
        digest = hashlib.blake2b(f"{self._settings}{loaded}".encode(), digest_size=3).hexdigest()
        return f"tandem-{product_version()}-{self.checkpoint.fingerprint[:8]}-{digest}"

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and output together: the minimum over all workers."""
        return min((hello.max_model_len for hello in self.workers.hellos()), default=self._limit)

    def token_names(self, options: Options) -> TokenNames:
        """Return how log-probabilities in the answer to a request name tokens."""
        return TokenNames(self.text, self._tokens_as_ids if options.tokens_as_ids is None else options.tokens_as_ids)

    # -- prompts --------------------------------------------------------------------------------------------------

    def parse_chat(self, fields: Json, budget: JsonBudget) -> ChatBody:
        """Parse the JSON object of a chat request. Raises RequestError, also for the name of another model."""
        body = parse_chat(fields, budget, self.check_chars, arguments_as_text=self.arguments_as_text)
        self.check_name(body.options.model)
        return body

    @property
    def arguments_as_text(self) -> bool:
        """Whether the chat template wants the arguments of earlier calls as text, not as objects."""
        return self.text.templates is not None and self.text.templates.arguments_as_text

    def chat_text(self, body: ChatBody, field: str = "messages") -> ChatText:
        """Render the chat template. ``field``: the name of the field with the messages. Raises RequestError if they
        cannot fit the context, before rendering if they are too long themselves, else as soon as the rendered text is
        too long."""
        truncates = body.options.truncate_prompt is not None
        if not truncates:
            self.check_chars(_size([body.messages, body.tools, body.documents, body.template_kwargs]), field)
        most = self._most_templated if truncates else min(self._most_chars, self._most_templated)
        try:
            chat = self.text.chat_text(body, most)
        except TooMuchText:
            head = f"This model's maximum context length is {self.context_length} tokens, at most {most} characters"
            text = f"{head}, but {field!r} has more after the chat template is applied. Shorten it."
            raise too_long(text, field) from None
        if not truncates:
            self.check_chars(chat.chars, field)
        return chat

    def reading(self, body: ChatBody, chat: ChatText) -> OutputReading | None:
        """Return how the outputs of ``body``, rendered as ``chat``, are parsed. None if they are only text: the model
        has no reasoning, and it cannot call tools or the way in which it writes calls is not known."""
        form = self.text.output
        tools = body.tool_use if form.reads_calls else None
        if tools is None and not form.reads_reasoning:
            return None
        constrained = body.options.constraint is not None
        return OutputReading(form, tools, chat.thinking, body.include_reasoning, calls_first=constrained)

    async def chat_prompt(self, chat: ChatText, options: Options, field: str = "messages") -> list[int]:
        """Return the token ids of a rendered chat, truncated if the client wants that. ``field``: as for
        :meth:`chat_text`."""
        slices, most = self.text.chat_slices(chat), self._most_tokens(options)
        return self._truncated(await self._tokens(slices, len(chat.text), most, field), options)

    async def text_prompts(self, prompts: Sequence[str | list[int]], options: Options) -> list[list[int]]:
        """Return the token ids of completion prompts, truncated if the client wants that. Prompts given as ids are only
        checked against the vocabulary."""
        self.check_prompts(prompts, options)
        return [self._truncated(await self._text_prompt(prompt, options), options) for prompt in prompts]

    def _most_tokens(self, options: Options) -> int:
        """Return the maximum length of a prompt before truncation."""
        return self.context_length if options.truncate_prompt is None else max(self.context_length, MAX_COUNTED_TOKENS)

    def _truncated(self, prompt: list[int], options: Options) -> list[int]:
        """Return the last tokens of ``prompt`` that ``truncate_prompt_tokens`` keeps."""
        keep = options.truncate_prompt
        if keep is None:
            return prompt
        if keep == 0:
            asked = options.sampling.max_tokens
            output = (options.sampling.default_tokens or 1) if asked is None else asked
            keep = max(1, self.context_length - output)
        return prompt[-keep:]

    def check_prompts(self, prompts: Sequence[str | list[int]], options: Options) -> None:
        """Raise RequestError if one of ``prompts`` cannot fit the context or has ids outside the vocabulary."""
        for prompt in prompts:
            if isinstance(prompt, str):
                if options.truncate_prompt is None:
                    self.check_chars(len(prompt), "prompt")
            elif max(prompt) >= self.checkpoint.vocab_size:
                raise outside_vocabulary("prompt", max(prompt), self.checkpoint.vocab_size)

    def check_repeats(self, body: CompletionBody, prompts: Sequence[str | list[int]]) -> None:
        """Raise RequestError if the answer would repeat more bytes of ``prompts`` than a request body may have. Each
        choice repeats them: as text with ``echo``, as ids with ``return_token_ids``.

        The ids of text prompts are not known yet and not counted; call again with the tokenized prompts."""
        size = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                size += len(encode(prompt)) if body.echo else 0
                continue
            if body.options.return_token_ids:
                size += len(prompt) * _ID_BYTES
            if body.echo:
                size += sum(len(self.text.token_bytes(token)) for token in prompt)
        if size * body.options.n > self._most_repeated:
            text = f"The answer would repeat {size:,} bytes of prompts for each of {body.options.n} choices, at most"
            refuse(f"{text} {self._most_repeated:,} in all are allowed (--max-body-bytes).", "n")

    def check_detokenized(self, tokens: Sequence[int]) -> None:
        """Raise RequestError if ``tokens`` are outside the vocabulary, or if their text has more bytes than a request
        body may have."""
        if tokens and max(tokens) >= self.checkpoint.vocab_size:
            refuse(f"Token id {max(tokens)} is outside the vocabulary.", "tokens")
        if len(tokens) * self.text.chars_per_token * _CHAR_BYTES <= self._most_repeated:
            return
        size = sum(len(self.text.token_bytes(token)) for token in tokens)
        if size > self._most_repeated:
            text = f"The text of 'tokens' has {size:,} bytes, at most {self._most_repeated:,} are allowed"
            refuse(f"{text} (--max-body-bytes).", "tokens")

    async def _text_prompt(self, prompt: str | list[int], options: Options) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        slices = self.text.slices(prompt, add_special_tokens=options.add_special_tokens)
        ids = await self._tokens(slices, len(prompt), self._most_tokens(options), "prompt")
        if not ids:
            raise RequestError("A prompt is empty: it needs at least one token.", param="prompt", code="invalid_value")
        return ids

    async def counted(self, prompt: str | ChatText, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids for POST /tokenize, which may be more than the context length."""
        most = max(self.context_length, MAX_COUNTED_TOKENS)
        if isinstance(prompt, ChatText):
            return await self._tokens(self.text.chat_slices(prompt), len(prompt.text), most, "messages")
        slices = self.text.slices(prompt, add_special_tokens=add_special_tokens)
        return await self._tokens(slices, len(prompt), most, "prompt")

    async def _tokens(self, slices: Iterator[list[int]], chars: int, most: int, param: str) -> list[int]:
        """Return all ids of ``slices``, the slices of a text of ``chars`` characters. Raises RequestError as soon as
        there are more than ``most`` ids.

        Each slice of a long text is one step in a lane, so that no further slice is tokenized after the client has
        disconnected."""
        if chars <= SLICE_CHARS:
            return await self.run(chars, lambda: list(chain.from_iterable(slices)))
        lane, ids = self._lanes.of(chars), array("I")  # 4 bytes per id instead of 36 in a list
        with lane.admitted(chars):
            while (part := await lane.step(lambda: next(slices, None), SLICE_CHARS)) is not None:
                ids.extend(part)
                if len(ids) > most:
                    head = f"This model's maximum context length is {self.context_length} tokens"
                    raise too_long(f"{head}, but {param!r} has more than {most}. Shorten it.", param)
        return ids.tolist()

    async def prefix_chains(self, packed: bytes, cache_salt: str) -> Chains:
        """Return the prefix-cache keys of the ``packed`` tokens, one chain for each KV element type in use by a
        worker."""
        hellos = self.workers.hellos()
        roots = {hello.dtype: chain_root(cache_salt, hello.fingerprint, hello.dtype) for hello in hellos}
        chains = {dtype: Chain(root, packed) for dtype, root in roots.items()}
        if len(packed) * len(chains) > INLINE_KEY_BYTES:  # computing them later would block the event loop
            await self.in_lane(len(packed) // 4, lambda: [list(chain) for chain in chains.values()])
        return chains

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` on ``size`` characters or tokens, in a lane if ``size`` is large, else in the event loop."""
        return work() if size < LONG else await self.in_lane(size, work)

    async def in_lane(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` on ``size`` characters or tokens as one step of a lane. Raises RequestError 429 if it is
        full."""
        return await self._lanes.of(size).only_step(size, work)

    async def in_body_lane(self, body: bytes, work: Callable[[], T]) -> T:
        """Run ``work`` on a request body as one step of a lane. Raises RequestError 429 if the lane is full."""
        return await self._lanes.of_body(len(body)).only_step(cost(body), work)

    # -- grammars -------------------------------------------------------------------------------------------------

    def chat_grammar(self, body: ChatBody, chat: ChatText) -> GrammarRequest | None:
        """Return what the grammar of ``body``, rendered as ``chat``, depends on, for :meth:`grammar`."""
        return for_chat(body, self.text.output, chat.thinking)

    async def grammar(self, wanted: GrammarRequest | None) -> ObeyedGrammar:
        """Return the grammar that the output of a request must match, none also where it is optional and cannot be
        obeyed or compiled now. Raises RequestError if one that is not optional cannot be, or if a schema is
        malformed."""
        if wanted is None:
            return ObeyedGrammar()
        try:
            return await self._grammars.compile(wanted.encoded, wanted.params)
        except RequestError as error:
            if wanted.optional and (error.code or "") not in MALFORMED:
                return ObeyedGrammar()
            raise

    def check_chars(self, chars: int, param: str) -> None:
        """Raise RequestError if no text of ``chars`` characters can fit the context."""
        most = self._most_chars
        if chars > most:
            head = f"This model's maximum context length is {self.context_length} tokens, at most {most} characters"
            raise too_long(f"{head}, but {param!r} has {chars}. Shorten it.", param)

    @property
    def _most_chars(self) -> int:
        """Maximum characters of any text that fits the context."""
        return self.context_length * self.text.chars_per_token


def _size(value: object) -> int:
    """Estimate the characters of ``value`` as text: those of its strings and keys, and one for each other value."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
            continue
        size += 1
        if isinstance(item, dict):
            size += sum(map(len, item))
            left += item.values()
        elif isinstance(item, list):
            left += item
    return size
