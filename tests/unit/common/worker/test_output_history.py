"""Output of finished requests can be sent again."""

from __future__ import annotations

from common.net.messages import Resend
from tests.unit.workers import Bench, make_request


def test_output_history_resends_final_first_tokens(pair: Bench) -> None:
    """Decode never got the request's first tokens, and prefill holds nothing of the request any more."""
    request = make_request(50, 1, n=2)
    pair.place(request, "prefill-0", "decode-1")
    pair.until(lambda: pair.done(request) and pair.quiet())
    pair.streams.clear()
    pair.finished.clear()
    for choice in range(2):
        for name in pair.workers:
            pair.send(name, Resend(request.id, 1, choice, 0))
    pair.until(lambda: pair.done(request))
    pair.check(request)
