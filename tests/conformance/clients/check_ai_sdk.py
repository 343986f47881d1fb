"""The AI SDK for JavaScript with its providers for OpenAI, OpenAI-compatible servers and Anthropic (``ai_sdk.mjs``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from scenarios import GREETING, MODEL, PERSON_QUESTION, WEATHER_ANSWER, WEATHER_QUESTION, WEATHER_RESULT

CLIENT = "AI SDK"
PACKAGES = Path(os.environ["CONFORMANCE_NPM"]) / "node_modules"
pytestmark = pytest.mark.skipif(
    not (shutil.which("node") and (PACKAGES / "ai").is_dir()), reason="node and npm are not installed"
)
VERSION = (
    json.loads((PACKAGES / "ai" / "package.json").read_text())["version"] if (PACKAGES / "ai").is_dir() else "absent"
)
SCENARIO = {
    "model": MODEL,
    "greeting": GREETING,
    "weather_question": WEATHER_QUESTION,
    "weather_result": WEATHER_RESULT,
    "weather_answer": WEATHER_ANSWER,
    "person_question": PERSON_QUESTION,
}
APIS = pytest.mark.parametrize("api", ["openai", "openai-chat", "compatible", "anthropic"])


def run(feature: str, api: str, base: str) -> None:
    """AssertionError with what node wrote unless the feature works."""
    environment = os.environ | {"CONFORMANCE_SCENARIO": json.dumps(SCENARIO), "VERCEL_AI_SDK_TELEMETRY_DISABLED": "1"}
    command = ["node", str(Path(__file__).with_name("ai_sdk.mjs")), feature, api, base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout


@APIS
@pytest.mark.parametrize(
    "feature",
    [
        "generateText",
        "messages",
        "streamText",
        "tools",
        "toolRequired",
        "toolNamed",
        "toolNone",
        "toolLoop",
        "streamTools",
        "generateObject",
        "streamObject",
        "outputObject",
        "outputChoice",
        "settings",
        "image",
    ],
)
def check_feature(feature: str, api: str, base: str) -> None:
    """feature, provider"""
    run(feature, api, base)


@pytest.mark.parametrize("api", ["openai", "compatible"])
def check_embed(api: str, base: str) -> None:
    """embed, provider"""
    run("embed", api, base)
