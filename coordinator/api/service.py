"""The model that is served: its name, its text side, its limits and its sampling defaults.

Turns validated bodies into what workers need: token ids and :class:`~common.core.request.SamplingParams`. What cannot
fit the context is refused before any work; other texts become tokens in :mod:`coordinator.text.lanes`.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import TypeVar

from common.checkpoint.files import Checkpoint
from common.config.coordinator import CoordinatorConfig
from common.core.errors import RequestError, StartError
from common.core.request import SamplingParams
from common.kv.prefix import Chain, chain_root
from coordinator.api.fields import refuse
from coordinator.api.response_encoder import encode
from coordinator.cluster.registry import Registry
from coordinator.requests.spec import ChatBody, CompletionBody, Options, Sampling
from coordinator.routing.router import Chains
from coordinator.text.lanes import Lanes, cost
from coordinator.text.render_budget import TooMuchText
from coordinator.text.slices import SLICE_CHARS
from coordinator.text.tokenizer import LONG, ChatText, TextModel

T = TypeVar("T")

INLINE_BYTES = 32_768
MAX_COUNTED_TOKENS = 1 << 20
"""POST /tokenize goes on beyond the context length up to so many tokens."""
_ID_BYTES = 6
"""About what a token id takes in JSON, with its comma."""
_CHAR_BYTES = 4
"""The most bytes of a character in UTF-8."""
MOST_TEMPLATED = 12 << 20
"""The most characters that a chat template may make of a chat, or one and a half times the bytes of the largest body,
whichever is more: a context may have room for hundreds of megabytes of white space."""
MOST_LOGPROB_BYTES = 128 << 20
"""Bound of the log-probabilities of a whole answer, which stay in memory until it is sent."""
_LOGPROB_BYTES = {"messages": 110, "prompt": 50}
"""About what one of them takes in JSON, with its token, at most for ordinary ones; by what the prompt is called."""
_FALLBACK = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0}


@functools.cache
def product_version() -> str:
    """The installed version of Tandem. Half a millisecond to find out, which every answer tells."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0"


class ServedModel:
    """One model behind one name."""

    def __init__(self, checkpoint: Checkpoint, config: CoordinatorConfig, workers: Registry) -> None:
        self.checkpoint, self.workers = checkpoint, workers
        self.name = config.served_name
        self.created = int(time.time())
        self.text = TextModel(checkpoint.path, vocab_size=checkpoint.vocab_size, chat_template=config.chat_template)
        self.eos_token_ids = checkpoint.eos_token_ids
        self.defaults = _defaults(checkpoint)
        self._limit = min(config.max_model_len or checkpoint.position_limit, checkpoint.position_limit)
        if config.max_model_len and config.max_model_len > checkpoint.position_limit:
            raise StartError(
                f"--max-model-len {config.max_model_len} is too long",
                f"{self.name} was made for {checkpoint.position_limit} tokens",
                f"give at most {checkpoint.position_limit}",
            )
        self._settings = f"{self.defaults}{config.chat_template}{self._limit}"
        self._most_repeated = config.max_body_bytes
        self._most_templated = max(MOST_TEMPLATED, config.max_body_bytes * 3 // 2)
        self._lanes = Lanes()

    def close(self) -> None:
        self._lanes.close()

    def check_name(self, wanted: str | None) -> None:
        """RequestError 404 unless ``wanted`` is this model (or absent)."""
        if wanted is not None and wanted != self.name:
            raise RequestError(
                f"The model {wanted[:128]!r} does not exist; this server has {self.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    @property
    def system_fingerprint(self) -> str:
        """What tells answers apart that the same request may get: version, checkpoint, settings, and what loading made
        of the weights (quantisation, element types), which workers know."""
        loaded = sorted({(hello.fingerprint, hello.dtype) for hello in self.workers.hellos()})
        digest = hashlib.blake2b(f"{self._settings}{loaded}".encode(), digest_size=3).hexdigest()
        return f"tandem-{product_version()}-{self.checkpoint.fingerprint[:8]}-{digest}"

    @property
    def context_length(self) -> int:
        """The longest prompt plus output, as the least capable worker knows it."""
        return min((hello.max_model_len for hello in self.workers.hellos()), default=self._limit)

    # -- prompts --------------------------------------------------------------------------------------------------

    def chat_text(self, body: ChatBody) -> ChatText:
        """The templated chat; RequestError if it cannot fit the context: before it is templated, or as soon as the
        template makes too much of it."""
        self.check_chars(_size([body.messages, body.tools, body.template_kwargs]), "messages")
        most = min(self._most_chars, self._most_templated)
        try:
            chat = self.text.chat_text(body, most)
        except TooMuchText:
            head = f"This model's maximum context length is {self.context_length} tokens, at most {most} characters"
            text = f"{head}, but the chat template makes more of 'messages'. Shorten them."
            raise _too_long(text, "messages") from None
        self.check_chars(chat.chars, "messages")
        return chat

    async def chat_prompt(self, chat: ChatText) -> list[int]:
        """Token ids of a templated chat."""
        return await self._tokens(self.text.chat_slices(chat), len(chat.text), self.context_length, "messages")

    async def text_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of completion prompts; ids are taken as they are, after a look at the vocabulary."""
        self.check_prompts(prompts)
        return [await self._text_prompt(prompt) for prompt in prompts]

    def check_prompts(self, prompts: Sequence[str | list[int]]) -> None:
        """RequestError unless each of ``prompts`` may fit the context and the vocabulary."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_chars(len(prompt), "prompt")
            elif max(prompt) >= self.checkpoint.vocab_size:
                self._outside("prompt", max(prompt))

    def check_repeats(self, body: CompletionBody, prompts: Sequence[str | list[int]]) -> None:
        """RequestError if ``prompts`` of ``body`` that the answer repeats, once for each choice, have more bytes
        than a request body may have. Of prompts that are text only what ``echo`` repeats is known."""
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
        """RequestError if ``tokens`` are outside the vocabulary, or have more bytes as text than a request body may."""
        if tokens and max(tokens) >= self.checkpoint.vocab_size:
            refuse(f"Token id {max(tokens)} is outside the vocabulary.", "tokens")
        if len(tokens) * self.text.chars_per_token * _CHAR_BYTES <= self._most_repeated:
            return
        size = sum(len(self.text.token_bytes(token)) for token in tokens)
        if size > self._most_repeated:
            text = f"The text of 'tokens' has {size:,} bytes, at most {self._most_repeated:,} are allowed"
            refuse(f"{text} (--max-body-bytes).", "tokens")

    async def _text_prompt(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        ids = await self._tokens(self.text.slices(prompt), len(prompt), self.context_length, "prompt")
        if not ids:
            raise RequestError("A prompt is empty: it needs at least one token.", param="prompt", code="invalid_value")
        return ids

    async def counted(self, prompt: str | ChatText, add_special_tokens: bool = True) -> list[int]:
        """Token ids for POST /tokenize, which may be more than the context length."""
        most = max(self.context_length, MAX_COUNTED_TOKENS)
        if isinstance(prompt, ChatText):
            return await self._tokens(self.text.chat_slices(prompt), len(prompt.text), most, "messages")
        slices = self.text.slices(prompt, add_special_tokens=add_special_tokens)
        return await self._tokens(slices, len(prompt), most, "prompt")

    async def _tokens(self, slices: Iterator[list[int]], chars: int, most: int, param: str) -> list[int]:
        """All ids of ``slices``, of a text of ``chars`` characters; RequestError as soon as they are more than
        ``most``. Each slice of a long text is a step of its own, and none is begun when the client has left."""
        if chars <= SLICE_CHARS:
            return await self.run(chars, lambda: list(chain.from_iterable(slices)))
        lane, ids = self._lanes.of(chars), array("I")  # four bytes each: a list of as many integers has 36
        with lane.admitted(chars):
            while (part := await lane.step(lambda: next(slices, None), SLICE_CHARS)) is not None:
                ids.extend(part)
                if len(ids) > most:
                    head = f"This model's maximum context length is {self.context_length} tokens"
                    raise _too_long(f"{head}, but {param!r} has more than {most}. Shorten it.", param)
        return ids.tolist()

    async def prefix_chains(self, packed: bytes, cache_salt: str) -> Chains:
        """The prefix keys under which the KV of ``packed`` tokens is cached, by the element type in which it was
        computed: of every type that a worker has."""
        hellos = self.workers.hellos()
        roots = {hello.dtype: chain_root(cache_salt, hello.fingerprint, hello.dtype) for hello in hellos}
        chains = {dtype: Chain(root, packed) for dtype, root in roots.items()}
        if len(packed) * len(chains) > INLINE_BYTES:  # whoever looks for the last key would hold everybody up
            await self.in_lane(len(packed) // 4, lambda: [list(chain) for chain in chains.values()])
        return chains

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters or tokens, in a lane if they are many."""
        return work() if size < LONG else await self.in_lane(size, work)

    async def in_lane(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters or tokens, as one step; RequestError 429 if too much waits already."""
        return await self._lanes.of(size).only_step(size, work)

    async def in_body_lane(self, body: bytes, work: Callable[[], T]) -> T:
        """``work`` on a request body, as one step; RequestError 429 before any if too much waits already."""
        return await self._lanes.of_body(len(body)).only_step(cost(body), work)

    # -- sampling -------------------------------------------------------------------------------------------------

    def sampling(
        self, options: Options, prompt_tokens: int, prompt_field: str, most_output: int | None, choices: int
    ) -> SamplingParams:
        """Sampling for one prompt of a request for ``choices`` in all; RequestError when prompt and output do not fit
        the context, or the log-probabilities not the memory. Who sets no limit gets what fits, at most ``most_output``
        per choice."""
        asked = options.sampling
        if asked.logprobs is None or options.stream:
            max_tokens = self._max_tokens(asked, prompt_tokens, prompt_field, most_output)
        else:
            per_token = _LOGPROB_BYTES[prompt_field] * (asked.logprobs + 1) * choices
            most = MOST_LOGPROB_BYTES // per_token
            most_output = most if most_output is None else min(most, most_output)
            max_tokens = self._max_tokens(asked, prompt_tokens, prompt_field, most_output)
            if max_tokens > most:
                text = f"The answer may have {max_tokens * per_token:,} bytes of log-probabilities, at most"
                text = f"{text} {MOST_LOGPROB_BYTES:,} are allowed. Ask for less, or for a stream."
                refuse(text, "top_logprobs" if prompt_field == "messages" else "logprobs")
        self._check_ids(asked)
        seed = secrets.randbits(64) if asked.seed is None else asked.seed % (1 << 64)
        chosen = {name: getattr(asked, name) for name in _FALLBACK}
        merged = {name: self.defaults[name] if value is None else value for name, value in chosen.items()}
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=float(merged["temperature"]),
            top_k=int(merged["top_k"]),
            top_p=float(merged["top_p"]),
            min_p=float(merged["min_p"]),
            repetition_penalty=float(merged["repetition_penalty"]),
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            logit_bias=asked.logit_bias,
            min_tokens=min(asked.min_tokens, max_tokens),
            stop_token_ids=asked.stop_token_ids,
            eos_token_ids=self.eos_token_ids,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs,
        )

    def _max_tokens(self, asked: Sampling, prompt_tokens: int, prompt_field: str, most_output: int | None) -> int:
        limit = self.context_length
        room = limit - prompt_tokens
        fitting = room if most_output is None else min(room, max(1, most_output))
        wanted = fitting if asked.max_tokens is None else asked.max_tokens
        if 1 <= wanted <= room:
            return wanted
        head = f"This model's maximum context length is {limit} tokens, but the prompt has {prompt_tokens}"
        if room < 1:
            raise _too_long(f"{head}. Shorten the prompt.", prompt_field)
        raise _too_long(f"{head} and {wanted} more are asked for. At most {room} output tokens fit.", "max_tokens")

    def check_chars(self, chars: int, param: str) -> None:
        """RequestError if a text of ``chars`` characters cannot fit the context, whatever they are."""
        most = self._most_chars
        if chars > most:
            head = f"This model's maximum context length is {self.context_length} tokens, at most {most} characters"
            raise _too_long(f"{head}, but {param!r} has {chars}. Shorten it.", param)

    @property
    def _most_chars(self) -> int:
        """The most characters that may fit the context, whatever they are."""
        return self.context_length * self.text.chars_per_token

    def _check_ids(self, asked: Sampling) -> None:
        vocab = self.checkpoint.vocab_size
        for param, ids in (("stop_token_ids", asked.stop_token_ids), ("logit_bias", tuple(asked.logit_bias))):
            if ids and max(ids) >= vocab:
                self._outside(param, max(ids))

    def _outside(self, param: str, token: int) -> None:
        raise RequestError(
            f"Token id {token} in {param!r} is outside the vocabulary of {self.checkpoint.vocab_size}.",
            param=param,
            code="invalid_value",
        )


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")


def _size(value: object) -> int:
    """About how many characters ``value`` would have as text: those of its strings and keys, and one for all else."""
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


def _defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Sampling defaults of the checkpoint's generation_config.json, where they are numbers."""
    given = checkpoint.generation_config
    known = {name: given[name] for name in _FALLBACK if isinstance(given.get(name), int | float)}
    return _FALLBACK | known
