"""The page of features is written from the table that is tested, and the table has every sampling parameter."""

from __future__ import annotations

import re

from common.core.request import SamplingParams
from tests.e2e import features

NOT_OF_REQUESTS = {"eos_token_ids", "grammar"}
"""Sampling parameters that the coordinator sets: from the model, and from ``response_format``, tools and others."""


def test_the_page_is_the_one_of_today() -> None:
    assert features.PAGE.read_text(encoding="utf-8") == features.page(), f"run: {features.COMMAND}"


def test_every_feature_has_one_row_and_a_command_for_each_topology() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (`make test.*) \|$", features.page(), re.MULTILINE)
    assert [name for name, _ in rows] == [feature.name for feature in features.FEATURES]
    assert len(dict(rows)) == len(rows)
    assert {len(cells.split(" | ")) for _, cells in rows} == {len(features.TOPOLOGIES)}


def test_every_sampling_parameter_is_used_in_a_row() -> None:
    used = {name for feature in features.FEATURES for name in feature.fields}
    assert set(SamplingParams.__struct_fields__) - NOT_OF_REQUESTS <= used


def test_open_string() -> None:
    inside = ['{"', '{"a": "b', '{"a": "b\\"', '{"a": "\\\\\\"c', '{"a\\\\\\\\b']
    outside = ["", "{", '{"a"', '{"a": "b\\""', '{"a": "\\\\"', '{"a": "\\\\", ']
    assert [text for text in inside if not features.open_string(text)] == []
    assert [text for text in outside if features.open_string(text)] == []
