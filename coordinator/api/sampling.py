"""From the sampling fields of a request to the parameters that workers get.

Owns the model's sampling defaults, the number of output tokens that fits, the check of token ids against the
vocabulary, and the limit on the size of log-probabilities in an answer.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable

from common.checkpoint.files import Checkpoint
from common.core.ids import TOKEN_ID_BYTES, max_token, unpack_tokens
from common.core.request import MAX_BAD_WORD_TOKENS, SamplingParams
from coordinator.api.fields import refuse
from coordinator.requests.errors import outside_vocabulary, too_long
from coordinator.requests.spec import Options, Sampling
from coordinator.text.tokenizer import TextModel

MOST_LOGPROB_BYTES = 128 << 20
"""Maximum bytes of the log-probabilities of a prompt and, unless the answer is a stream of completions, of its output.
They stay in memory until they are sent."""
_LOGPROB_BYTES = {"messages": 110, "prompt": 50, "input": 440}
"""Approximate bytes in JSON of one log-probability with its token, an upper estimate for ordinary tokens. By the name
of the prompt field: chat responses have more per entry than completions, and the last events of a stream of the
Responses API repeat all entries four times."""
_PROMPT_LOGPROB_BYTES = 85
"""Approximate bytes in JSON of one log-probability in ``prompt_logprobs``, with its token and rank."""
_KEPT_BAD_WORDS = 256
_FALLBACK = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "min_p": 0.0}


class SamplingRules:
    """The rules of one model. ``context_length``: returns the maximum tokens of prompt and output together, which
    depends on the present workers. ``defaults``: the model's sampling defaults by field."""

    def __init__(self, checkpoint: Checkpoint, text: TextModel, context_length: Callable[[], int]) -> None:
        self._checkpoint, self._text, self._context_length = checkpoint, text, context_length
        self.defaults = _defaults(checkpoint)
        self._banned = functools.lru_cache(maxsize=_KEPT_BAD_WORDS)(text.bad_words)

    def params(
        self,
        options: Options,
        prompt_tokens: int,
        prompt_field: str,
        most_output: int | None,
        choices: int,
        grammar: str = "",
    ) -> SamplingParams:
        """Return the sampling parameters for one prompt of a request with ``choices`` choices over all its prompts.
        ``grammar``: what its output must match, "" for no constraint.

        Without ``max_tokens`` the output is limited to what fits the context, and to ``most_output`` tokens per choice.
        Raises RequestError if prompt and output do not fit the context, a token id is outside the vocabulary, or the
        answer could have more than MOST_LOGPROB_BYTES of log-probabilities."""
        asked = options.sampling
        of_prompt = self._check_prompt_logprobs(options, prompt_tokens, prompt_field, choices)
        if asked.logprobs is None or (options.stream and prompt_field != "input"):
            max_tokens = self._max_tokens(asked, prompt_tokens, prompt_field, most_output)
        else:
            per_token = _LOGPROB_BYTES[prompt_field] * (asked.logprobs + 1) * choices
            most = (MOST_LOGPROB_BYTES - of_prompt) // per_token
            most_output = most if most_output is None else min(most, most_output)
            max_tokens = self._max_tokens(asked, prompt_tokens, prompt_field, most_output)
            if max_tokens > most:
                size = of_prompt + max_tokens * per_token
                text = f"The answer may have {size:,} bytes of log-probabilities, at most"
                text = f"{text} {MOST_LOGPROB_BYTES:,} are allowed. Request fewer"
                text += "." if prompt_field == "input" else ", or a stream ('stream': true)."
                refuse(text, "logprobs" if prompt_field == "prompt" else "top_logprobs")
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
            stop_token_ids=self._stop_token_ids(options),
            eos_token_ids=self._checkpoint.eos_token_ids,
            ignore_eos=asked.ignore_eos,
            logprobs=asked.logprobs,
            grammar=grammar,
            prompt_logprobs=asked.prompt_logprobs,
            allowed_token_ids=asked.allowed_token_ids,
            bad_words=self._bad_words(asked),
        )

    def _check_prompt_logprobs(self, options: Options, prompt_tokens: int, prompt_field: str, choices: int) -> int:
        """Return the approximate bytes of the log-probabilities of a prompt in the answer, where each of ``choices``
        choices repeats them. Raises RequestError if they are more than MOST_LOGPROB_BYTES."""
        asked = options.sampling
        if asked.prompt_logprobs is None:
            return 0
        shown = asked.logprobs is not None and prompt_field == "prompt"
        echoed = _LOGPROB_BYTES[prompt_field] * ((asked.logprobs or 0) + 1) if shown else 0
        field = options.prompt_logprobs
        size = prompt_tokens * choices * (echoed + (0 if field is None else _PROMPT_LOGPROB_BYTES * (field + 1)))
        if size > MOST_LOGPROB_BYTES:
            text = f"The answer would have {size:,} bytes of log-probabilities of the prompt, at most"
            text = f"{text} {MOST_LOGPROB_BYTES:,} are allowed. Request fewer, or send fewer prompts at once."
            refuse(text, "logprobs" if field is None else "prompt_logprobs")
        return size

    def _stop_token_ids(self, options: Options) -> tuple[int, ...]:
        """Return the ids that end an output: also those of stop strings that are exactly one special token, whose text
        an output does not have."""
        return tuple(dict.fromkeys((*options.sampling.stop_token_ids, *self._text.control_tokens(options.stop))))

    def _bad_words(self, asked: Sampling) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of ``bad_words``. Raises RequestError if one has more than MAX_BAD_WORD_TOKENS:
        a character may be several tokens."""
        words = self._banned(asked.bad_words)
        if (longest := max(map(len, words), default=0)) > MAX_BAD_WORD_TOKENS:
            refuse(
                f"A word of 'bad_words' has {longest} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed.", "bad_words"
            )
        return words

    def _max_tokens(self, asked: Sampling, prompt_tokens: int, prompt_field: str, most_output: int | None) -> int:
        limit = self._context_length()
        room = limit - prompt_tokens
        fitting = room if most_output is None else min(room, max(1, most_output))
        if asked.default_tokens is not None:
            fitting = min(fitting, asked.default_tokens)
        wanted = fitting if asked.max_tokens is None else asked.max_tokens
        if wanted == asked.max_tokens == 0 <= room or 1 <= wanted <= room:
            return wanted
        head = f"This model's maximum context length is {limit} tokens, but the prompt has {prompt_tokens}"
        if room < 1:
            raise too_long(f"{head}. Shorten the prompt.", prompt_field)
        param = "max_output_tokens" if prompt_field == "input" else "max_tokens"
        raise too_long(f"{head} and {wanted} output tokens are requested. At most {room} fit.", param)

    def _check_ids(self, asked: Sampling) -> None:
        vocab = self._checkpoint.vocab_size
        given = (
            ("stop_token_ids", max(asked.stop_token_ids, default=0)),
            ("logit_bias", max(asked.logit_bias, default=0)),
            ("allowed_token_ids", max_token(asked.allowed_token_ids)),
        )
        for param, largest in given:
            if largest >= vocab:
                raise outside_vocabulary(param, largest, vocab)
        ends = {*self._checkpoint.eos_token_ids, *asked.stop_token_ids}
        allowed = asked.allowed_token_ids
        few = asked.min_tokens and 0 < len(allowed) <= TOKEN_ID_BYTES * len(ends)
        if few and ends.issuperset(unpack_tokens(allowed)):
            refuse("'allowed_token_ids' has only ids that end the output, which 'min_tokens' forbids.", "min_tokens")


def _defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the sampling defaults: the numbers in the checkpoint's generation_config.json, else _FALLBACK."""
    given = checkpoint.generation_config
    known = {name: given[name] for name in _FALLBACK if isinstance(given.get(name), int | float)}
    return _FALLBACK | known
