"""A chat template's output is bounded before it is built, and within the bound it equals jinja2's."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.requests.spec import Json
from coordinator.text import render_budget
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.render_budget import TooMuchText

MOST = 100_000
MOST_BYTES = 20 * MOST
"""Memory allowed for refusing a text that would take 50 MB or more."""
LINES = "a\n" * 40_000


def deep(count: int, depth: int = 57) -> Any:
    value: Any = [1] * count
    for _ in range(depth):
        value = [value]
    return value


GROWING: dict[str, tuple[str, Json]] = {
    "JSON with an indent": ("{{ x | tojson(indent=4) }}", {"x": deep(MOST * 9 // 10)}),
    "JSON of each": ("{% for y in x %}{{ y | tojson(indent=4) }}{% endfor %}", {"x": [deep(300)] * 800}),
    "JSON of each, in a macro": (
        "{% macro m() %}{% for y in x %}{{ y | tojson(indent=4) }}{% endfor %}{% endmacro %}{{ m() | length }}",
        {"x": [deep(300)] * 800},
    ),
    "JSON of each, joined": ("{{ x | map('tojson', indent=4) | join }}", {"x": [deep(300)] * 800}),
    "JSON of all, for each": (
        "{% for y in x %}{% if (x | tojson) == y %}{% endif %}{% endfor %}",
        {"x": ["a"] * 9_000},
    ),
    "a product": ("{{ ('x' * n) | length }}", {"n": 10**8}),
    "a product of a client's string": ("{{ (n * x) | length }}", {"x": "ab", "n": 10**8}),
    "a product of lists": ("{{ ([x] * n) | length }}", {"x": 1, "n": 10**8}),
    "replace": ("{{ x | replace('a', x) | length }}", {"x": LINES}),
    "replace between characters": ("{{ x | replace('', 'y' * 1000) | length }}", {"x": LINES}),
    "the method replace": ("{{ x.replace('a', x) | length }}", {"x": LINES}),
    "the method replace of a template's text": ("{{ ('b' ~ x).replace('a', x) | length }}", {"x": LINES}),
    "indent": ("{{ x | indent(n, blank=True) | length }}", {"x": LINES, "n": 1000}),
    "indent with a string": ("{{ x | indent(x) | length }}", {"x": LINES}),
    "join": ("{{ y | join(x) | length }}", {"x": LINES, "y": [1] * 1000}),
    "the method join": ("{{ x.join(y | map('string')) | length }}", {"x": LINES, "y": [1] * 1000}),
    "center": ("{{ x | center(n) | length }}", {"x": "a", "n": 10**8}),
    **{
        f"the method {name}": (f"{{{{ x.{name}(n) | length }}}}", {"x": "a", "n": 10**8})
        for name in ("center", "ljust", "rjust", "zfill")
    },
    "expandtabs": ("{{ x.expandtabs(n) | length }}", {"x": "\t" * 1000, "n": 10**5}),
    "expandtabs, named": ("{{ x.expandtabs(tabsize=n) | length }}", {"x": "\t" * 1000, "n": 10**5}),
    "percent": ("{{ ('%*d' % (n, 1)) | length }}", {"n": 10**8}),
    "percent of a client's string": ("{{ (x % y) | length }}", {"x": "%(k)s" * 10_000, "y": {"k": "ab" * 5_000}}),
    "the filter format": ("{{ x | format(1) | length }}", {"x": "%100000000d"}),
    "a precision": ("{{ (x % 1) | length }}", {"x": "%.100000000f"}),
    "the method format": ("{{ x.format(1) | length }}", {"x": "{:100000000}"}),
    "the method format, many fields": ("{{ x.format(y) | length }}", {"x": "{0}" * 10_000, "y": LINES}),
    "the method format_map": ("{{ x.format_map(y) | length }}", {"x": "{k}" * 10_000, "y": {"k": LINES}}),
    "the template's own field": ("{{ '{:{}}'.format(1, n) | length }}", {"n": 10**8}),
    "the template's words for each": ("{% for y in x %}{{ 'word' * 100 }}{% endfor %}", {"x": [1] * 90_000}),
    "a macro's words for each": (
        "{% macro m() %}{% for y in x %}word word word word word word{% endfor %}{% endmacro %}{{ m() | length }}",
        {"x": [1] * 90_000},
    ),
    "a sum that grows": (
        "{% set ns = namespace(s='') %}{% for y in x %}{% set ns.s = ns.s + y %}{% endfor %}{{ ns.s | length }}",
        {"x": ["y" * 1000] * 90_000},
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_text_that_would_be_too_long_is_not_made(name: str) -> None:
    source, kwargs = GROWING[name]
    template = ChatTemplate(source, {})
    tracemalloc.start()
    try:
        with pytest.raises(TooMuchText):
            template.render([{"role": "user", "content": "x"}], kwargs=kwargs, most=MOST)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("operator", ["+", "~"])
def test_render_budget_bounds_total_copies(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    monkeypatch.setattr(render_budget, "MOST_MADE", 10 * MOST)
    loop = f"{{% for m in messages %}}{{% set ns.s = ns.s {operator} m.content %}}{{% endfor %}}"
    template = ChatTemplate("{% set ns = namespace(s='') %}" + loop, {})
    messages: list[Json] = [{"role": "user", "content": "x" * 90}]
    template.render(messages * 100, most=MOST)
    with pytest.raises(TooMuchText):
        template.render(messages * 1000, most=MOST)


@pytest.mark.parametrize(
    "source", ["{{ x.split('b') }}", "{{ x.rsplit('b') }}", "{{ x.split() }}", "{{ x.splitlines() }}", "{{ x | list }}"]
)
def test_parts_are_bounded_together(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(render_budget, "MOST_PARTS", 1000)
    template = ChatTemplate(f"{{% for y in [1, 2, 3] %}}{source}{{% endfor %}}", {})
    messages: list[Json] = [{"role": "user", "content": "x"}]
    for count in (100, 2000):
        kwargs: Json = {"x": "b\n" * count}
        if count == 100:
            template.render(messages, kwargs=kwargs)
            continue
        with pytest.raises(TooMuchText):
            template.render(messages, kwargs=kwargs)


def test_few_parts_of_many_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "MOST_PARTS", 10)
    source = "{{ x.split('b', 1)[1] }}{{ x.rsplit('b', maxsplit=1)[1] }}{{ x.split(None, 1)[1] }}"
    shown = ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], kwargs={"x": "b \n" * 1000})
    assert shown.startswith(" \nb \n")


PLAIN: dict[str, tuple[str, Json, str]] = {
    "replace": ("{{ x | replace('a', 'bcd') }}", {"x": "axaxa"}, "bcdxbcdxbcd"),
    "replace two": ("{{ x | replace('a', 'bcd', 2) }}", {"x": "axaxa"}, "bcdxbcdxa"),
    "the method replace": ("{{ x.replace('a', 'bcd', 2) }}", {"x": "axaxa"}, "bcdxbcdxa"),
    "indent": ("{{ x | indent(3) }}", {"x": "a\n\nb\nc"}, "a\n\n   b\n   c"),
    "indent all": ("{{ x | indent(3, true, true) }}", {"x": "a\n\nb"}, "   a\n   \n   b"),
    "indent with a string": ("{{ x | indent('> ') }}", {"x": "a\nb"}, "a\n> b"),
    "center": ("{{ x | center(9) }}", {"x": "abc"}, "   abc   "),
    "ljust": ("{{ x.ljust(9) }}", {"x": "abc"}, "abc      "),
    "expandtabs": ("{{ x.expandtabs(4) }}", {"x": "\ta"}, "    a"),
    "product": ("{{ x * 3 }}{{ 2 * 'b' }}{{ x * -1 }}{{ [x] * 2 }}", {"x": "a"}, "aaabb['a', 'a']"),
    "join": ("{{ x | join(', ') }}{{ ', '.join(x | map('string')) }}", {"x": [1, "b"]}, "1, b1, b"),
    "join attributes": ("{{ x | join('-', attribute='k.0') }}", {"x": [{"k": [1]}, {"k": [2]}]}, "1-2"),
    "percent": ("{{ '%5d|%-3s|%.1f|%%' % (x, 'a', 1.25) }}", {"x": 7}, "    7|a  |1.2|%"),
    "percent of an object": ("{{ x % {'k': 1} }}", {"x": "<%(k)s>"}, "<1>"),
    "the filter format": ("{{ '%s and %s' | format(x, 2) }}", {"x": "a"}, "a and 2"),
    "the method format": ("{{ x.format(1, k='b') }}{{ '{:>3}{}'.format(x, 1) }}", {"x": "{0}{k}"}, "1b{0}{k}1"),
    "the method format_map": ("{{ x.format_map({'k': 1}) }}", {"x": "{k:3}"}, "  1"),
    "numbers": ("{{ x + 1 }}{{ x * 2 }}{{ x % 2 }}{{ [x] + [1] }}", {"x": 3}, "461[3, 1]"),
    "list": ("{{ x | list }}{{ [1] | list }}", {"x": "ab"}, "['a', 'b'][1]"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_template_within_budget_renders_as_expected(name: str) -> None:
    source, kwargs, wanted = PLAIN[name]
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], kwargs=kwargs, most=100) == wanted


@pytest.mark.parametrize(
    "source", ["{{ x | tojson(indent=4) }}", "{{ x | tojson }}", "{% set y %}{{ x }}{% endset %}{{ y }}"]
)
def test_a_text_may_have_as_many_characters_as_there_is_room_for(source: str) -> None:
    template, messages = ChatTemplate(source, {}), list[Json]([{"role": "user", "content": "x"}])
    kwargs: Json = {"x": ["a", {"b": [1, 2, None]}, 1.5]}
    length = len(template.render(messages, kwargs=kwargs))
    assert len(template.render(messages, kwargs=kwargs, most=length)) == length
    with pytest.raises(TooMuchText):
        template.render(messages, kwargs=kwargs, most=length - 1)


def test_the_mark_of_a_continued_message_takes_no_room() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    messages: list[Json] = [{"role": "assistant", "content": "x" * 50}]
    assert template.render(messages, continue_final_message=True, most=50) == "x" * 50


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)


@given(
    value=values,
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 2, 4, "\t"]),
    separators=st.sampled_from([None, (",", ":"), ("", "")]),
    sort_keys=st.booleans(),
    batch=st.integers(1, 9),
    fast=st.booleans(),
)
def test_json_is_that_of_the_standard_library(value: Any, batch: int, fast: bool, **options: Any) -> None:
    template = ChatTemplate("{{ x | tojson(**options) }}", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render_budget, "_BATCH", batch)
        if not fast:
            patch.setattr(render_budget, "_FAST_JSON", -1)
        shown = template.render([{"role": "user", "content": "x"}], kwargs={"x": value, "options": options})
    assert shown == json.dumps(value, **options)
