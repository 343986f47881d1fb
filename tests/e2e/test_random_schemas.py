"""Random JSON schemas on the built-in model: every answer that ends by itself is valid."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from common import builtin
from tests.e2e.system import RunningSystem
from tests.unit.coordinator.grammar.random_schemas import Generator

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCHEMAS, SAMPLED_SCHEMAS = 500, 100
SMALL = ("--dtype", "float32", "--threads", "1", "--num-kv-blocks", "1024")


def outcome(client: OpenAI, seed: int) -> str:
    """Ask for an answer to the random schema number ``seed``, check it, and return how it ended."""
    schema: Any = {"type": "object", "properties": {"answer": Generator(seed).document()}, "required": ["answer"]}
    inner = schema["properties"]["answer"]
    schema["$defs"] = inner.pop("$defs", {})
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        choice = client.chat.completions.create(
            model="model",
            messages=[{"role": "user", "content": "Write JSON."}],
            response_format=form,
            max_tokens=200,
            seed=seed,
            temperature=0.8,
        ).choices[0]
    except BadRequestError as error:
        return "impossible" if "nsatisfiable" in error.message else f"{schema}: {error.message}"
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    return choice.finish_reason


def test_every_answer_that_ends_is_valid(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    count = SAMPLED_SCHEMAS if pytestconfig.getoption("--sample") else SCHEMAS
    with (
        RunningSystem.up(tmp_path, builtin.path(), small=SMALL) as system,
        OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        outcomes = Counter(threads.map(lambda seed: outcome(client, seed), range(count)))
    assert set(outcomes) <= {"stop", "length", "impossible"} and outcomes["stop"] > count * 0.6, outcomes
