"""``tandem bench quantization``: its options, and its table."""

from __future__ import annotations

import pytest

from bench.commands.quantization import rows
from common.config.bench.quantization import BenchQuantizationConfig
from common.core.errors import StartError


@pytest.mark.parametrize(("ways", "words"), [("none,int3", "int3"), ("int8,none,int8", "twice")])
def test_wrong_ways_are_refused(ways: str, words: str) -> None:
    with pytest.raises(StartError, match=words):
        _ = BenchQuantizationConfig(model="", ways=ways).way_names


def test_ratios_are_to_the_first_way() -> None:
    whole = {"one": 100.0, "eight": 400.0, "prompt": 1000.0, "start_s": 2.0, "memory": 8 << 20}
    found = {"none": whole, "int8": whole | {"one": 150.0, "memory": 4 << 20}}
    shown = {(name, what): (value, ratio) for name, what, value, ratio in rows(found)}
    assert shown["int8", "decode, one stream"] == ("150.0 tokens/s", "1.50")
    assert shown["int8", "memory of all processes"] == ("4.0 MiB", "0.50")
    assert {ratio for (name, _), (_, ratio) in shown.items() if name == "none"} == {"1.00"}
