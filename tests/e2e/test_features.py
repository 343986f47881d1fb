"""Every feature gives the same answer in every topology, whole and as a stream.

``features.py`` has the table. One undisturbed colocated system gives the answers to compare with. Each topology is then
one system with small KV pools, whose workers die where a feature says so.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common import builtin
from tests.e2e.feature_client import FeatureAnswer, FeatureChoice, ask, check_same
from tests.e2e.features import (
    DIES_AT,
    FEATURES,
    KV_BLOCKS,
    MODEL_LEN,
    PREFILL_CHUNK,
    TOPOLOGIES,
    WHOLE_ONLY,
    Feature,
    open_string,
)
from tests.e2e.spawner import PRELOADED
from tests.e2e.system import ApiClient, RunningSystem
from tests.e2e.test_tokens import metrics
from tests.fakes import dying_worker
from tests.pace import scaled

pytestmark = pytest.mark.e2e

SMALL = ("--dtype", "float32", "--threads", "1", "--max-model-len", str(MODEL_LEN), "--local-prefill", "never")


@dataclass
class Outcome:
    """The answers of one system to one feature, whole and streamed in turn, or why it has none. ``grown``: by how much
    the feature's counter grew."""

    answers: list[FeatureAnswer] = field(default_factory=list)
    grown: float = 0.0
    error: BaseException | None = None


Outcomes = dict[str, Outcome]


def thinking_model(directory: Path) -> Path:
    """Write the built-in model with reasoning that a request may open: two control tokens that no request here needs
    become ``<think>`` and ``</think>``."""
    model = directory / "model"
    shutil.copytree(builtin.path(), model, ignore=shutil.ignore_patterns(builtin.draft_path().name))
    source = (model / "chat_template.jinja").read_text(encoding="utf-8").rstrip()
    end = "{{- '<|assistant|>' -}}\n{%- endif -%}"
    assert source.endswith(end)
    opened = "{{- '<|assistant|>' }}{{ '<think>' if enable_thinking else '' }}{# </think> #}{%- endif -%}"
    (model / "chat_template.jinja").write_text(source.removesuffix(end) + opened, encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (model / name).read_text(encoding="utf-8")
        text = text.replace("<|pad|>", "<think>").replace("<|tool|>", "</think>")
        (model / name).write_text(text, encoding="utf-8")
    return model


async def _both(client: ApiClient, feature: Feature) -> Outcome:
    """Ask for a whole answer and a stream: in turn if their effect is observed, else at once."""
    if feature.asked_before:
        await ask(client, feature, stream=False)
        await client.until_idle(10, since_now=True)
    try:
        if feature.alone and not feature.together:
            answers = [await ask(client, feature, stream=each) for each in (False, True)]
        else:
            decoding = sum(each["role"] != "prefill" for each in (await client.workers()).values())
            pairs = decoding if feature.together else 1
            answers = await asyncio.gather(*(ask(client, feature, stream=each) for each in (False, True) * pairs))
    except AssertionError as error:
        return Outcome(error=error)
    return Outcome(answers)


async def _counted(client: ApiClient, name: str) -> float:
    return sum(value for key, value in (await metrics(client)).items() if re.split(r"[{ ]", key)[0] == name)


async def _alone(client: ApiClient, feature: Feature, disturbed: bool) -> Outcome:
    before = await _counted(client, feature.counter)
    outcome = await _both(client, feature)
    deadline = time.monotonic() + scaled(5.0)  # the next heartbeat reports it
    while feature.counter and disturbed and outcome.error is None and not outcome.grown:
        outcome.grown = await _counted(client, feature.counter) - before
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    return outcome


async def _ask_all(system: RunningSystem, features: Sequence[Feature], *, disturbed: bool) -> Outcomes:
    """Ask for ``features``: all at once, but one after the other those whose effect is observed."""
    beside = [each for each in features if not each.alone]
    async with system.client() as client:
        answers = await asyncio.gather(*(_both(client, each) for each in beside))
        outcomes = {each.name: answer for each, answer in zip(beside, answers, strict=True)}
        for feature in features:
            if feature.alone:
                outcomes[feature.name] = await _alone(client, feature, disturbed)
    return outcomes


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> list[Feature]:
    """The features of this run."""
    return [each for each in FEATURES if not (each.whole and request.config.getoption("--sample"))]


@pytest.fixture(scope="module")
def reference(wanted: list[Feature], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The answers of a colocated worker with room for all requests, which nothing disturbs."""
    directory = tmp_path_factory.mktemp("reference")
    flags = (*TOPOLOGIES["colocated"], "--num-kv-blocks", "600")
    with RunningSystem.up(directory, thinking_model(directory), *flags, small=SMALL) as system:
        return asyncio.run(_ask_all(system, wanted, disturbed=False))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.whole if name in WHOLE_ONLY else ()) for name in TOPOLOGIES],
)
def outcomes(
    request: pytest.FixtureRequest, wanted: list[Feature], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcomes]:
    """The answers of a system of one topology."""
    directory = tmp_path_factory.mktemp(request.param)
    flags = (*TOPOLOGIES[request.param], "--num-kv-blocks", str(KV_BLOCKS))
    flags += ("--max-num-batched-tokens", str(PREFILL_CHUNK))
    death = {PRELOADED: dying_worker.__name__, dying_worker.AT: json.dumps(DIES_AT)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in death.items():
            patch.setenv(name, value)
        with RunningSystem.up(directory, thinking_model(directory), *flags, small=SMALL) as system:
            yield asyncio.run(_ask_all(system, wanted, disturbed=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "feature",
    [pytest.param(each, id=each.name, marks=pytest.mark.whole if each.whole else ()) for each in FEATURES],
)
def test_a_feature_is_the_same(feature: Feature, reference: Outcomes, outcomes: Outcomes) -> None:
    expected, found = reference[feature.name], outcomes[feature.name]
    for outcome in (expected, found):
        if outcome.error is not None:
            raise outcome.error
    [first, *others] = [*expected.answers, *found.answers]
    for answer in others:
        check_same(answer, first)
        check_expected(feature, answer)
    check_expected(feature, first)
    if other := feature.expects.get("unlike"):
        assert first.choices[0].token_ids != reference[other].answers[0].choices[0].token_ids, "it changed nothing"
    assert not feature.counter or found.grown, f"{feature.counter} has not grown"


def check_expected(feature: Feature, answer: FeatureAnswer) -> None:
    """Check that the feature acted."""
    expects = feature.expects
    assert len(answer.choices) == expects.get("choices", 1)
    if feature.asked_before:
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= expects["cached"]
    assert len(answer.prompt) >= expects.get("prompt_tokens", 1)
    for choice in answer.choices:
        _check_choice(choice, answer.prompt, expects)


def _check_choice(choice: FeatureChoice, prompt: list[int], expects: dict[str, Any]) -> None:
    assert choice.finish_reason in ([expects["finish_reason"]] if "finish_reason" in expects else ["stop", "length"])
    assert len(choice.token_ids) == expects.get("tokens", len(choice.token_ids))
    assert bool(choice.reasoning) == expects.get("reasoning", False)
    assert "without" not in expects or expects["without"] not in choice.text
    assert re.fullmatch(expects.get("regex", "(?s).*"), choice.text), choice.text
    if "schema" in expects:
        jsonschema.validate(json.loads(choice.text), expects["schema"])
    if "in_string_after" in expects and choice.pieces:
        assert open_string("".join(choice.pieces[: expects["in_string_after"]])), choice.pieces
    assert bool(choice.calls) == ("calls" in expects)
    for name, arguments in choice.calls:
        assert name in expects["calls"] and json.loads(arguments)
    scored = len(choice.logprobs.get("content") or choice.logprobs["token_logprobs"])
    assert scored == len(choice.token_ids) + (len(prompt) if expects.get("echo") else 0)
    if "tops" in expects:
        assert all(len(entry["top_logprobs"]) == expects["tops"] for entry in choice.logprobs["content"])
    if expects.get("prompt_logprobs"):
        assert choice.prompt_logprobs is not None and len(choice.prompt_logprobs) == len(prompt)
