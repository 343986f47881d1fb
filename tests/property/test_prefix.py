"""The prefix index and its hash chain against a plain dictionary of token tuples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core.ids import BlockId, pack_tokens
from common.kv.layout import CHAIN_STEP
from common.kv.prefix import KEY_BYTES, Chain, PrefixIndex, chain_root, extend_chain

# few distinct steps, so that prefixes coincide
STEPS = [[10 * kind + i for i in range(CHAIN_STEP)] for kind in range(3)]
steps = st.lists(st.integers(0, 2), max_size=6)
tails = st.integers(0, CHAIN_STEP - 1)
texts = st.one_of(st.text(max_size=5), st.sampled_from(["", "a", "ab", "\ud800"]))
block_sizes = st.sampled_from([16, 32, 48])


def tokens_of(kinds: list[int], tail: int) -> list[int]:
    return [token for kind in kinds for token in STEPS[kind]] + list(range(900, 900 + tail))


@given(steps, tails, steps, tails)
def test_keys_are_equal_exactly_where_all_tokens_before_are(a: list[int], x: int, b: list[int], y: int) -> None:
    root = chain_root("", "model", "float32")
    first, second = extend_chain(root, [], tokens_of(a, x)), extend_chain(root, [], tokens_of(b, y))
    assert (len(first), len(second)) == (len(a), len(b)), "a partial step has no key"
    for index in range(min(len(a), len(b))):
        assert (first[index] == second[index]) == (a[: index + 1] == b[: index + 1])
    assert all(len(key) == KEY_BYTES for key in first)


@given(steps, tails, st.data())
def test_a_chain_grown_in_parts_is_the_chain_of_the_whole(kinds: list[int], tail: int, data: st.DataObject) -> None:
    tokens, root = tokens_of(kinds, tail), chain_root("s", "m", "d")
    chain: list[bytes] = []
    for cut in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4))):
        extend_chain(root, chain, tokens[:cut])
    assert extend_chain(root, chain, tokens) == extend_chain(root, [], tokens)


@given(steps, tails, st.data())
def test_a_chain_that_is_made_as_far_as_it_is_looked_at_is_the_same(
    kinds: list[int], tail: int, data: st.DataObject
) -> None:
    tokens, root = tokens_of(kinds, tail), chain_root("s", "m", "d")
    expected, chain = extend_chain(root, [], tokens), Chain(root, pack_tokens(tokens))
    assert len(chain) == len(expected)
    for at in data.draw(st.lists(st.integers(-len(kinds), len(kinds) - 1), max_size=4)) if kinds else []:
        assert chain[at] == expected[at]
    assert chain[1:] == expected[1:] and list(chain) == expected
    for beyond in (len(kinds), -len(kinds) - 1):
        with pytest.raises(IndexError):
            chain[beyond]


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_roots_differ_whenever_any_part_does(a: tuple[str, str, str], b: tuple[str, str, str]) -> None:
    assert (chain_root(*a) == chain_root(*b)) == (a == b)


class Model:
    """Model of the index: (salt, tokens of a prefix) -> block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_of: dict[tuple[str, tuple[int, ...]], BlockId] = {}

    def match(self, salt: str, tokens: list[int], limit: int) -> list[BlockId]:
        found = []
        for end in range(self.block_size, min(len(tokens), limit) + 1, self.block_size):
            block = self.block_of.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found


@settings(max_examples=150, deadline=None)
@given(block_size=block_sizes, data=st.data())
def test_the_index_is_a_dictionary_of_prefixes(block_size: int, data: st.DataObject) -> None:
    index, model = PrefixIndex(block_size), Model(block_size)
    announced: set[bytes] = set()
    next_block = 0
    for _ in range(data.draw(st.integers(1, 12))):
        salt = data.draw(st.sampled_from(["", "other"]))
        tokens = tokens_of(data.draw(steps), data.draw(tails))
        chain = extend_chain(chain_root(salt, "m", "d"), [], tokens)
        action = data.draw(st.sampled_from(["add", "add", "match", "forget"]))
        if action == "add":
            full = len(tokens) // block_size
            blocks = [BlockId(next_block + i) for i in range(full)]
            next_block += full
            first = data.draw(st.integers(0, full))
            fresh = index.add(chain, blocks, first, full)
            prefixes = [(salt, tuple(tokens[: (i + 1) * block_size])) for i in range(first, full)]
            expected = [
                b for b, p in zip(blocks[first:], prefixes, strict=True) if model.block_of.setdefault(p, b) == b
            ]
            assert fresh == expected, "exactly the blocks whose prefix was not known"
        elif action == "forget" and model.block_of:
            key = data.draw(st.sampled_from(sorted(model.block_of)))
            index.forget(model.block_of.pop(key))
        limit = data.draw(st.integers(0, len(tokens) + 5))
        assert index.match(chain, limit) == model.match(salt, tokens, limit)
        assert len(index) == len(model.block_of)
        added, removed = index.take_changes()
        assert not set(added) & set(removed), "a change is reported in its final state"
        announced = (announced | set(added)) - set(removed)
        assert len(announced) == len(index), "announcements lead a listener to the same set"
