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
    """Those of rates are taken round by round, so that a slow moment of the machine does not count."""
    rounds = {"one": [100.0, 50.0, 120.0], "eight": [400.0] * 3, "prompt": [1000.0] * 3}
    whole = {"one": 100.0, "eight": 400.0, "prompt": 1000.0, "start_s": 2.0, "memory": 8 << 20, "rounds": rounds}
    faster = {"one": 150.0, "memory": 4 << 20, "rounds": rounds | {"one": [150.0, 75.0, 240.0]}}
    found = {"none": whole, "int8": whole | faster}
    shown = {(name, what): (value, ratio) for name, what, value, ratio in rows(found)}
    assert shown["int8", "decode, one stream"] == ("150.0 tokens/s", "1.50")
    assert shown["int8", "memory of all processes"] == ("4.0 MiB", "0.50")
    assert not any(what.startswith("start") for _, what in shown), "there is one start of each"
    assert {ratio for (name, _), (_, ratio) in shown.items() if name == "none"} == {"1.00"}
