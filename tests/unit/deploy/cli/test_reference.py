"""The generated pages of docs/reference equal what the code generates now."""

from __future__ import annotations

import pytest

from common.config.options import options
from coordinator.api import openai
from deploy.cli import field_help, reference
from deploy.cli.commands import CONFIGS


@pytest.mark.parametrize("name", ["flags.md", "http-api.md", "metrics.md"])
def test_the_page_is_the_one_of_today(name: str) -> None:
    written = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert written == reference.reference_pages()[name], "run: make docs"


def test_every_flag_has_a_row() -> None:
    page = reference.flags_page()
    for config in CONFIGS:
        for item in options(config):
            assert f"`{item.flag}`" in page


def test_every_request_field_has_a_line_and_every_line_a_field() -> None:
    read = reference.request_fields(openai.parse_chat) | reference.request_fields(openai.parse_completion)
    assert read.keys() == field_help.FIELD_HELP.keys()
    assert read["stream_options.include_usage"] == "boolean"
    assert read["top_logprobs"] == "integer, 0 to 20"
    assert (read["min_tokens"], read["max_tokens"]) == ("integer, at least 0", "integer")


@pytest.mark.parametrize(
    ("read", "helps"),
    [
        (reference.responses_fields(), field_help.RESPONSES_HELP),
        (reference.messages_fields(), field_help.MESSAGES_HELP),
    ],
)
def test_every_field_of_the_field_help_is_described(read: dict[str, str], helps: dict[str, str]) -> None:
    assert helps.keys() <= read.keys(), "every line has a field"
    assert read.keys() - helps.keys() <= field_help.FIELD_HELP.keys(), "the other fields are those of chat completions"
    assert "seed" in read and "temperature" in read


def test_every_error_code_has_a_line_and_every_line_a_code() -> None:
    assert {code for _, code in reference.error_codes()} == reference.ERROR_HELP.keys()


def test_endpoints_are_those_of_the_application() -> None:
    paths = [path for path, _ in reference.endpoints()]
    assert "`POST /v1/chat/completions`" in paths
    assert "`GET /v1/models/{id}`" in paths
