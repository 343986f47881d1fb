"""Simon Willison's llm, with the server as an extra OpenAI model: its library and its command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import llm
import pytest
from click.testing import CliRunner
from llm.cli import cli
from scenarios import GREETING, MODEL, PERSON, PERSON_QUESTION, WEATHER_ANSWER, WEATHER_QUESTION, WEATHER_RESULT, Person

CLIENT = "llm"
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture
def home(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user directory in which the server is the model ``tandem``."""
    common = f"  model_name: {MODEL}\n  api_base: {url}\n  supports_schema: true\n  supports_tools: true\n"
    written = f"- model_id: chat\n{common}- model_id: responses\n  responses: true\n{common}"
    written += f"- model_id: completion\n  completion: true\n{common}"
    (tmp_path / "extra-openai-models.yaml").write_text(written)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def model_of(home: Path, name: str) -> Any:
    assert os.environ["LLM_USER_PATH"] == str(home)
    model = llm.get_model(name)
    model.key = "none"
    return model


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_prompt(home: Path, api: str, stream: bool) -> None:
    """prompt"""
    assert model_of(home, api).prompt(GREETING, system="Be short.", stream=stream, temperature=0).text()


@APIS
def check_conversation(home: Path, api: str) -> None:
    """a conversation of two turns"""
    conversation = model_of(home, api).conversation()
    assert conversation.prompt(GREETING, temperature=0).text()
    assert "5" in conversation.prompt("What is 2 + 3?", temperature=0).text()


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_tools(home: Path, api: str, stream: bool) -> None:
    """chain: a tool's call and result"""

    def get_weather(city: str) -> str:
        """Get the weather of a city"""
        assert city == "Oslo"
        return json.dumps(WEATHER_RESULT)

    chain = model_of(home, api).chain(WEATHER_QUESTION, tools=[get_weather], stream=stream, options={"temperature": 0})
    assert chain.text() == WEATHER_ANSWER


@APIS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def check_schema(home: Path, api: str, stream: bool) -> None:
    """schema of a pydantic type"""
    text = model_of(home, api).prompt(PERSON_QUESTION, schema=Person, stream=stream, temperature=0).text()
    assert Person.model_validate_json(text) == PERSON


def check_completion(home: Path) -> None:
    """a model for text completions"""
    assert model_of(home, "completion").prompt("One two", max_tokens=5).text()


def check_command(home: Path) -> None:
    """the command `llm -m MODEL`"""
    assert os.environ["LLM_USER_PATH"] == str(home)
    done = CliRunner().invoke(cli, ["-m", "chat", "--key", "none", "-o", "temperature", "0", GREETING])
    assert done.exit_code == 0 and done.output.strip(), done.output
