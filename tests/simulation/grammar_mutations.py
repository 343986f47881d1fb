"""Known bugs of constrained outputs: see :mod:`tests.simulation.mutations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.core.sequence import Batch, StepResult
from common.core.sequence import Sequence as Tokens
from common.engine.restrictions import Restriction
from common.engine.scheduler import Planner
from common.grammar.masks import Grammars, StepMasks
from common.grammar.matcher import Mask, Matcher
from common.worker.held_requests import HeldRequests
from common.worker.token_spans import TokenSpanEncoder
from decode.role import DecodeWorker
from tests.simulation.mutation import NO_NEXT_TOKEN, WRONG_TOKENS, Mutation

_FOLLOW, _FINISH, _FORCE, _REPORT = Matcher.follow, StepMasks.finish, Grammars.force, DecodeWorker._report
_COMPLETE, _MASK, _FAIL, _ADD = Planner.complete, Restriction.mask, HeldRequests.fail, TokenSpanEncoder.add
REFUSED, NOTHING_TO_DO = "fails with grammar_failed", "nothing to compute"


def _forgets_what_was_emitted(self: Matcher, tokens: Sequence[int]) -> None:
    if self.length == 0 and len(tokens) > 1:
        self.length = len(tokens)
    else:
        _FOLLOW(self, tokens)


def _turns_rows(self: StepMasks) -> None:
    """Give each row the mask of another one."""
    _FINISH(self)
    rows = [*self.ready.values()]
    self.ready = dict(zip(self.ready, [*rows[1:], *rows[:1]], strict=True))


def _takes_old_masks(self: StepMasks) -> None:
    _FINISH(self)
    old = {index: grammar for index, _, grammar in self.rows if index in self.late and grammar.mask_at >= 0}
    self.ready |= old
    self.late -= old.keys()


def _forces_twice(self: Grammars, sequence: Tokens) -> list[int]:
    return 2 * _FORCE(self, sequence)


def _forces_in_vain(self: Grammars, sequence: Tokens) -> list[int]:
    return _FORCE(self, sequence)[:-1]


def _computed_all(self: DecodeWorker, sequence: Tokens, writer: TokenSpanEncoder) -> None:
    """Take the KV of forced tokens for computed."""
    _REPORT(self, sequence, writer)
    sequence.computed = max(sequence.computed, len(sequence.tokens) - 1)


def _is_never_late(self: Planner, batch: Batch, result: StepResult) -> Any:
    result.late.clear()
    return _COMPLETE(self, batch, result)


def _adds_the_last(self: TokenSpanEncoder, sequence: Tokens, start: int) -> None:
    _ADD(self, sequence, max(start, sequence.output_length - 1))


def _forgets_words(self: Restriction, sequence: Tokens, grammar: Mask | None) -> Mask:
    """Look for bad words only behind what was emitted before."""
    emitted = sequence.prompt_length + len(sequence.request.emitted_tokens(sequence.choice))
    tokens = Tokens(sequence.request, sequence.attempt, sequence.choice)
    tokens.tokens, tokens.prompt_length = sequence.tokens, emitted
    return _MASK(self, tokens, grammar)


def _retries_refusals(self: HeldRequests, transfer: Any, code: str, detail: str, *, retriable: bool) -> None:
    _FAIL(self, transfer, code, detail, retriable=retriable or code.startswith("grammar"))


GRAMMAR_MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "grammars begin anew after a retry": (
        Mutation(
            "what was emitted before is not followed",
            Matcher, "follow", _forgets_what_was_emitted, (WRONG_TOKENS, REFUSED),
        ),
    ),
    "masks of other rows": (
        Mutation("a row gets the mask of another", StepMasks, "finish", _turns_rows, (WRONG_TOKENS, REFUSED)),
    ),
    "masks of an earlier token": (
        Mutation("where a mask is late, the last one is used", StepMasks, "finish", _takes_old_masks, (WRONG_TOKENS,)),
    ),
    "late rows are computed": (
        Mutation("a row without a mask is not computed again", Planner, "complete", _is_never_late, (NOTHING_TO_DO,)),
    ),
    "forced twice": (
        Mutation("forced tokens are appended twice", Grammars, "force", _forces_twice, (WRONG_TOKENS,)),
    ),
    "forced and lost": (
        Mutation("the last forced token is not appended", Grammars, "force", _forces_in_vain, (REFUSED,)),
    ),
    "forced tokens are not sent": (
        Mutation("only the last token of a step is sent", TokenSpanEncoder, "add", _adds_the_last, (NO_NEXT_TOKEN,)),
    ),
    "forced tokens have no KV": (
        Mutation("the KV of forced tokens is not computed", DecodeWorker, "_report", _computed_all, (WRONG_TOKENS,)),
    ),
    "bad words begin anew after a retry": (
        Mutation("a bad word that was begun before is completed", Restriction, "mask", _forgets_words, (WRONG_TOKENS,)),
    ),
    "refusals are retried": (
        Mutation(
            "what a grammar refuses is tried on other workers",
            HeldRequests, "fail", _retries_refusals, ("fails with worker_lost",),
        ),
    ),
}  # fmt: skip
