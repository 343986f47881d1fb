"""Options of traces and metrics: which URLs are valid, and what is said if a package is missing."""

from __future__ import annotations

import pytest

from common.config import telemetry
from common.config.coordinator import CoordinatorConfig
from common.config.options import Parser, add_options
from common.config.up import UpConfig
from common.core.errors import StartError
from deploy.cli.commands import load_config


def up(*words: str) -> UpConfig:
    parser = Parser(prog="tandem up")
    add_options(parser, UpConfig)
    return load_config(UpConfig, vars(parser.parse_args(list(words))), {}).config


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4318", "https://collector/v1/traces", "http://[::1]:4318/", "https://host/api?team=a"]
)
def test_urls_of_receivers(url: str) -> None:
    assert up("--otlp-traces-endpoint", url).for_coordinator().otlp_traces_endpoint == url


@pytest.mark.parametrize(
    "url",
    ["collector:4318", "grpc://collector:4317", "http://", "http://user:secret@host", "http://host:0", "http://host:x",
     "http://host:70000", "http://host/#part", "http://[::1", ""],
)  # fmt: skip
def test_what_is_no_url_of_a_receiver(url: str) -> None:
    with pytest.raises(StartError, match="--otlp-traces-endpoint") as refused:
        up("--otlp-traces-endpoint", url)
    assert "secret" not in str(refused.value)


def test_the_ratio_is_a_share() -> None:
    assert up("--trace-sample-ratio", "0.25").trace_sample_ratio == 0.25
    for text in ("-0.1", "1.1", "nan", "often"):
        with pytest.raises(StartError, match="--trace-sample-ratio"):
            up("--trace-sample-ratio", text)


@pytest.mark.parametrize("missing", telemetry.PACKAGES)
def test_a_missing_package_is_a_start_error(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "find_spec", lambda name: None if name == missing else object())
    CoordinatorConfig(model="m").check_telemetry()
    config = CoordinatorConfig(model="m", otlp_metrics_endpoint="http://a")
    with pytest.raises(StartError) as refused:
        config.check_telemetry()
    assert (refused.value.what, refused.value.why) == (
        "--otlp-metrics-endpoint needs OpenTelemetry", f"the Python module {missing} is not installed",
    )  # fmt: skip
    assert refused.value.todo == "pip install -e '.[otel]' -c constraints.txt, or start without --otlp-metrics-endpoint"


def test_a_missing_parent_package_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "PACKAGES", ("no_such_package.part",))
    with pytest.raises(StartError, match="needs OpenTelemetry"):
        CoordinatorConfig(model="m", otlp_traces_endpoint="http://a").check_telemetry()
