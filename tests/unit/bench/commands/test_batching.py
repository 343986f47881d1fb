"""Static against continuous batching: the workload, and both methods against a server without limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.commands import batching
from bench.commands.batching import LONGEST, longest_answer, mixed, static_batches
from bench.load.client import Record
from bench.load.run import Run
from bench.load.workloads import PlannedRequest
from common.core.errors import StartError
from deploy.cli import main as cli


def test_the_mix_has_the_mean_asked_for() -> None:
    lengths = [ask.output_tokens for ask in mixed([PlannedRequest([1], 1, 1)] * 5000, 20, LONGEST * 20, seed=2)]
    assert sum(lengths) / 5000 == pytest.approx(20, rel=0.05)
    assert min(lengths) == 1 and 100 < max(lengths) <= LONGEST * 20


def test_a_static_batch_runs_as_long_as_its_longest() -> None:
    asks = [PlannedRequest([index], 1, length) for index, length in enumerate([3, 9, 1, 2, 5])]
    batches = static_batches(asks, 2)
    assert [[ask.output_tokens for ask in batch] for batch in batches] == [[9, 9], [2, 2], [5]]
    assert [ask.prompt for batch in batches for ask in batch] == [[0], [1], [2], [3], [4]]


def test_the_command(mock_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mock answers any number at once, so three batches in turn take longer than all requests together."""
    saved = tmp_path / "batching.json"
    words = f"bench batching --url {mock_url} --num-prompts 6 --batch-size 2 --random-input-len 4 --random-output-len 2"
    assert cli.main([*words.split(), "--runs", "1", "--save", str(saved), "--label", "a mock"]) == 0
    figures = json.loads(saved.read_text())
    assert figures["label"] == "a mock"
    assert figures["ratios"][0] > 1.5
    assert "times as many, against batches of 2" in capsys.readouterr().out
    assert figures["most_output_tokens"] == 2 * LONGEST


def test_answers_are_as_long_as_the_server_has_room_for() -> None:
    """With the defaults and the built-in model's 2,048 positions, answers are shortened so that not all are refused."""
    assert longest_answer(128, 1024, 2048) == 1024
    assert longest_answer(128, 1024, 1 << 20) == longest_answer(128, 1024, None) == 128 * LONGEST


def test_answers_that_end_early_are_not_counted_as_whole() -> None:
    """For example because the end of a text is not ignored, or the server cannot ignore it."""
    asks, records = (
        [PlannedRequest([1], 1, 5), PlannedRequest([2], 1, 5)],
        [Record(0.0, 1, output_tokens=5), Record(0.0, 1, output_tokens=4)],
    )
    with pytest.raises(StartError, match="1 of 2 answers ended early"):
        batching._check(asks, Run(records, 1.0, 0.0), Console())
    batching._check(asks[:1], Run(records[:1], 1.0, 0.0), Console())
