"""Every model type of transformers' causal language models is served exactly, or refused for a reason that is known.

The whole sweep runs in ``make test-all`` and holds the page of the documentation; some types run in each test run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoint.refused_types import REFUSED_TYPES
from deploy.launcher.inspection import FUSED_TYPES
from tests.checkpoints import architectures
from tests.checkpoints.architectures import PAGE, Outcome, examine, examine_all, faults, model_types, page

SERVED = re.compile(r"^\| ([\w-]+) \| (\w+) \| (fused kernels in C|modules) \|$", re.MULTILINE)
REFUSED = re.compile(r"^\| ([\w-]+) \| ([^|]+) \|$", re.MULTILINE)
SAMPLE = {
    "llama": "served",
    "longcat_flash": "served",  # its router reads the weight of a linear layer
    "afmoe": "served",  # calls view on the result of attention
    "deepseek_v3": "served",
    "mamba2": "recurrent state",
    "gptj": "attention function of its own",
    "openai-gpt": "attention function of its own",
    "roberta": "other positions than",
    "glm_moe_dsa": "an indexer chooses",
    "whisper": "encoder-decoder",
}


def sections() -> tuple[str, str]:
    text = PAGE.read_text(encoding="utf-8").partition("## Served")[2]
    served, _, refused = text.partition("## Refused")
    return served, refused


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_types() -> None:
    outcomes = examine_all(list(SAMPLE))
    assert not faults(outcomes)
    found = {each.model_type: each.words or each.result for each in outcomes}
    assert {kind: words for kind, words in SAMPLE.items() if words not in found[kind]} == {}


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_all_types_are_as_the_page_says() -> None:
    outcomes = examine_all(list(model_types()))
    assert not faults(outcomes)
    assert page(outcomes) == PAGE.read_text(encoding="utf-8"), "run python -m tests.checkpoints.architectures"


def test_the_page_has_every_type_once() -> None:
    served, refused = sections()
    listed = [
        found[1]
        for found in (*SERVED.finditer(served), *REFUSED.finditer(refused))
        if found[1].strip("-") and found[1] != "model type"
    ]
    assert sorted(listed) == sorted(model_types())


def test_types_refused_by_name_are_refused_on_the_page() -> None:
    reasons = {found[1]: found[2] for found in REFUSED.finditer(sections()[1])}
    wrong = {kind: why for kind, why in REFUSED_TYPES.items() if kind in model_types() and why not in reasons[kind]}
    assert not wrong


def test_inspect_knows_the_types_with_fused_layers() -> None:
    assert {found[1] for found in SERVED.finditer(sections()[0]) if found[3] != "modules"} == FUSED_TYPES


def test_a_crash_an_exception_and_a_vague_refusal_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Outcome("llama", "LlamaForCausalLM", "served")
    vague = replace(fine, result="refused", words="its forward pass fails with KeyError: 'x'")
    known = replace(fine, result="refused", words="LlamaForCausalLM has layers with a recurrent state")
    assert not faults([fine, known]) and len(faults([vague, replace(fine, result="failed")])) == 2
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert [each.result for each in examine_all(["llama", "qwen2"])] == ["failed", "failed"]


def test_wrong_logits_and_exceptions_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_largest_difference", lambda *_: 0.01)
    found = examine("llama", tmp_path / "model")
    assert found.result == "failed" and "off by 0.01" in found.words
    monkeypatch.setattr("tests.checkpoints.tiny.make_tiny", lambda *_: {}["x"])
    assert "KeyError" in examine("llama", tmp_path / "other").words
