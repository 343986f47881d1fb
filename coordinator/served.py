"""The model that is served: its name, its text side, its limits and its sampling defaults.

Turns validated bodies into what workers need: token ids and :class:`~common.request.SamplingParams`. Long texts are
tokenized in two threads, while the event loop goes on; what waits for those threads is bounded.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from common import threads
from common.checkpoint import Checkpoint
from common.config import CoordinatorConfig
from common.errors import RequestError, StartError
from common.kv.prefix import Chain, chain_root
from common.request import SamplingParams
from coordinator.answers import encode
from coordinator.limits import MAX_RETRY_S, MIN_RETRY_S
from coordinator.openai import ChatBody, Options, Sampling
from coordinator.refusals import overloaded
from coordinator.registry import Registry
from coordinator.router import Chains
from coordinator.text import LONG, TextModel

T = TypeVar("T")

INLINE_BYTES = 32_768
MAX_TEXTS = 256
MAX_TEXT_CHARS = 64 << 20
"""So many texts, of so many characters together, may be tokenized or wait for it; more get 429."""
_CHARS_PER_S = 1e6
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
        self._texts = self._chars = 0
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="text", initializer=threads.compute)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

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

    async def chat_prompt(self, body: ChatBody) -> list[int]:
        """Token ids of a templated chat."""
        size = len(encode([body.messages, body.tools, body.template_kwargs]))
        return await self.run(
            size, lambda: self.text.encode_chat(body, lambda chars: self._check_chars(chars, "messages"))
        )

    async def text_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of completion prompts; ids are taken as they are, after a look at the vocabulary."""
        return await self.run(
            sum(map(len, prompts)), lambda: [self._text_prompt(prompt, at) for at, prompt in enumerate(prompts)]
        )

    def _text_prompt(self, prompt: str | list[int], at: int) -> list[int]:
        if isinstance(prompt, str):
            self._check_chars(len(prompt), "prompt")
            ids = self.text.encode(prompt)
            if not ids:
                raise RequestError(
                    "A prompt is empty: it needs at least one token.", param="prompt", code="invalid_value"
                )
            return ids
        if max(prompt) >= self.checkpoint.vocab_size:
            self._outside("prompt", max(prompt))
        return prompt

    async def prefix_chains(self, packed: bytes, cache_salt: str) -> Chains:
        """The prefix keys under which the KV of ``packed`` tokens is cached, by the element type in which it was
        computed: of every type that a worker has."""
        hellos = self.workers.hellos()
        roots = {hello.dtype: chain_root(cache_salt, hello.fingerprint, hello.dtype) for hello in hellos}
        chains = {dtype: Chain(root, packed) for dtype, root in roots.items()}
        if len(packed) * len(chains) > INLINE_BYTES:  # whoever looks for the last key would hold everybody up
            await self.in_thread(len(packed), lambda: [list(chain) for chain in chains.values()])
        return chains

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters or tokens, in a thread if they are many."""
        return work() if size < LONG else await self.in_thread(size, work)

    async def in_thread(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` characters, tokens or bytes, in a thread; RequestError 429 if too many wait already."""
        if self._texts >= MAX_TEXTS or (self._texts and self._chars + size > MAX_TEXT_CHARS):
            waiting = f"{self._texts} texts of {self._chars} characters are being tokenized"
            raise overloaded(waiting, min(MAX_RETRY_S, max(MIN_RETRY_S, self._chars / _CHARS_PER_S)))
        self._texts, self._chars = self._texts + 1, self._chars + size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._texts, self._chars = self._texts - 1, self._chars - size

    # -- sampling -------------------------------------------------------------------------------------------------

    def sampling(
        self, options: Options, prompt_tokens: int, prompt_field: str, most_output: int | None = None
    ) -> SamplingParams:
        """Sampling for one prompt; RequestError when prompt and output do not fit the context. Who sets no limit gets
        what fits, at most ``most_output`` per choice."""
        asked = options.sampling
        max_tokens = self._max_tokens(asked, prompt_tokens, prompt_field, most_output)
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

    def _check_chars(self, chars: int, param: str) -> None:
        """Refuses a text that is hopelessly long before it costs the time to tokenize it."""
        limit, least = self.context_length, self.text.least_tokens(chars)
        if least > limit:
            head = f"This model's maximum context length is {limit} tokens, but the prompt has at least {least}"
            raise _too_long(f"{head}. Shorten the prompt.", param)

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


def _defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Sampling defaults of the checkpoint's generation_config.json, where they are numbers."""
    given = checkpoint.generation_config
    known = {name: given[name] for name in _FALLBACK if isinstance(given.get(name), int | float)}
    return _FALLBACK | known
