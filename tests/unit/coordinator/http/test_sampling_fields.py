"""Fields of vLLM that restrict the output and the prompt, over HTTP: what workers get, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.core.ids import unpack_tokens
from common.core.request import MAX_BAD_WORD_TOKENS, Request
from common.net.messages import Generate, Prefill
from tests.unit.coordinator.fake_cluster import CHAT, HELLO, TEXT, FakeCluster, until

pytestmark = pytest.mark.processes


def received(cluster: FakeCluster) -> list[Request]:
    """Return the requests that prefill has got so far: with a single token of output it gets no Prefill."""
    return [each.request for each in [*cluster.workers[0].received] if isinstance(each, Prefill | Generate)]


async def sent(cluster: FakeCluster, path: str, **fields: Any) -> Request:
    """Return the request that prefill gets. The answer may come from decode before that."""
    before = len(received(cluster))
    response, body = await cluster.post(path, {"max_tokens": 2, **fields})
    assert response.status == 200, body
    await until(lambda: len(received(cluster)) > before, "prefill gets the request")
    return received(cluster)[-1]


async def test_bad_words_are_banned_with_and_without_a_space(cluster: FakeCluster) -> None:
    encode = cluster.services.model.text.encode
    request = await sent(cluster, CHAT, **HELLO, bad_words=["ab", " c", "ab"])
    expected = [tuple(encode(text, add_special_tokens=False)) for text in ("ab", " ab", "c", " c")]
    assert [*request.sampling.bad_words] == expected
    assert (await sent(cluster, TEXT, prompt="x")).sampling.bad_words == ()
    word = "\N{MUSICAL SYMBOL G CLEF}" * 256
    assert len(encode(f" {word}", add_special_tokens=False)) > MAX_BAD_WORD_TOKENS
    response, body = await cluster.post(TEXT, {"prompt": "x", "bad_words": ["x", word]})
    assert (response.status, body["error"]["param"], body["error"]["code"]) == (400, "bad_words", "invalid_value")


async def test_allowed_ids_must_be_in_the_vocabulary_and_leave_something(cluster: FakeCluster) -> None:
    request = await sent(cluster, TEXT, prompt="x", allowed_token_ids=[9.0, 5, 9])
    assert unpack_tokens(request.sampling.allowed_token_ids) == [5, 9]
    model = cluster.services.model
    for ids, more, param in (
        ([model.checkpoint.vocab_size], {}, "allowed_token_ids"),
        ([model.eos_token_ids[0], 7], {"min_tokens": 1, "stop_token_ids": [7]}, "min_tokens"),
    ):
        response, body = await cluster.post(TEXT, {"prompt": "x", "allowed_token_ids": ids, **more})
        assert (response.status, body["error"]["param"], body["error"]["code"]) == (400, param, "invalid_value")


@pytest.mark.parametrize(("keep", "count"), [(1, 1), (3, 3), (500, 4), (-1, 4), (None, 4)])
async def test_the_last_tokens_of_a_prompt_are_kept(cluster: FakeCluster, keep: int | None, count: int) -> None:
    for prompt in ("hello!", [267, 268, 86, 8]):
        whole = (await sent(cluster, TEXT, prompt=prompt)).prompt_tokens()
        assert len(whole) == 4
        request = await sent(cluster, TEXT, prompt=prompt, truncate_prompt_tokens=keep)
        assert request.prompt_tokens() == whole[-count:]
    _, body = await cluster.post(TEXT, {"prompt": "hello!", "truncate_prompt_tokens": keep, "echo": True})
    assert body["usage"]["prompt_tokens"] == count and body["choices"][0]["text"].startswith(
        cluster.services.model.text.decode(whole[-count:])
    )


async def test_what_fits_the_context_is_kept_and_written(cluster: FakeCluster) -> None:
    context = cluster.services.model.context_length
    long = [20] * (context + 50)
    for fields, prompt, output in (
        ({"truncate_prompt_tokens": -1}, context - 16, 16),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, context - 100, 100),
        ({"truncate_prompt_tokens": -1, "max_tokens": -1}, context - 1, 1),
        ({"truncate_prompt_tokens": context - 7}, context - 7, 7),
        ({"prompt": long[: context - 9]}, context - 9, 9),
        ({"prompt": long[: context - 20]}, context - 20, 16),
        ({"prompt": long[: context - 20], "max_tokens": None}, context - 20, 16),
        ({"prompt": long[: context - 20], "max_tokens": -1}, context - 20, 20),
    ):
        request = await sent(cluster, TEXT, **{"prompt": long, "max_tokens": None, **fields})
        assert (request.prompt_length, request.sampling.max_tokens) == (prompt, output), fields
    text = {"messages": [{"role": "user", "content": "a" * (context * 2)}], "truncate_prompt_tokens": -1}
    assert (await sent(cluster, CHAT, **text)).prompt_length == context - 2
    response, body = await cluster.post(TEXT, {"prompt": long, "truncate_prompt_tokens": context})
    assert (response.status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_without_the_tokenizers_own_tokens(cluster: FakeCluster) -> None:
    model = cluster.services.model
    request = await sent(cluster, TEXT, prompt="hello", add_special_tokens=False)
    assert request.prompt_tokens() == model.text.encode("hello", add_special_tokens=False)


async def test_a_stop_string_that_is_a_control_token_stops_at_its_id(cluster: FakeCluster) -> None:
    """Its text is never part of the output, where it would be looked for."""
    model = cluster.services.model
    special = next(token for token in range(20) if model.text.is_special(token) and token not in model.eos_token_ids)
    stop = [model.text.token_text(special), "zz"]
    request = await sent(cluster, CHAT, **HELLO, stop=stop, stop_token_ids=[300])
    assert request.sampling.stop_token_ids == (300, special)
    request = await sent(cluster, TEXT, prompt="x", stop=f"a{stop[0]}")
    assert request.sampling.stop_token_ids == ()
