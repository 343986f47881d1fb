"""The benchmark of tracing, page and access lines: with all three on, every trace arrives and tokens are counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.load.tokens import FileTokenizer, ordinary_ids
from bench.load.workloads import random_asks
from bench.micro import observability
from common.core.errors import StartError
from deploy.cli import main as cli

pytestmark = pytest.mark.e2e


def test_a_coordinator_is_measured_with_and_without_everything(checkpoint: Callable[[str], Path]) -> None:
    model = checkpoint("llama")
    asks = random_asks(ordinary_ids(FileTokenizer(model)), 6, 8, 20, seed=1)
    with observability.observed(str(model)) as system:
        for name in (observability.ALL, observability.PLAIN):
            assert 0 < system.us_per_token(observability.SETTINGS[name], asks) < 1e6
        assert system.traced == 6
        system.traced += 1
        with pytest.raises(StartError, match="6 of 7 traces"):
            system.us_per_token(observability.SETTINGS["access-lines"], asks)


def test_the_standard_error_is_that_of_differences_within_a_round() -> None:
    assert observability.added([10.0, 20.0], [11.0, 21.0]) == pytest.approx((100 / 15, 0.0))
    assert observability.added([10.0, 10.0], [10.0, 12.0]) == pytest.approx((10.0, 10.0))
    assert observability.added([10.0], [12.0]) == pytest.approx((20.0, 0.0))


def test_settings_are_chosen_by_name() -> None:
    assert observability.chosen("all") == ["plain", "all"]
    assert observability.chosen(None) == list(observability.SETTINGS)
    with pytest.raises(StartError, match="no such setting"):
        observability.chosen("all, pages")


@pytest.mark.whole
@pytest.mark.slow
def test_each_setting_is_compared_with_none(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "cost.json"
    words = "--rounds 1 --max-concurrency 4 --random-output-len 32"
    command = ["bench", "observability", str(checkpoint("llama")), *words.split(), "--save", str(saved)]
    assert cli.main(command) == 0
    reported = capsys.readouterr().out
    assert re.findall(r"^  (\S.*?) +\d+\.\d\d us", reported, re.MULTILINE) == list(observability.SETTINGS)
    figures = json.loads(saved.read_text())
    assert {name: len(each) for name, each in figures["us_per_token"].items()} == dict.fromkeys(
        observability.SETTINGS, 1
    )
