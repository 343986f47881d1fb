"""Options of what the coordinator reports about requests: traces and metrics by OTLP, and access lines."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from common.config.options import OTLP_URL, SWITCH, decimal, option
from common.core.errors import StartError

PACKAGES = ("opentelemetry.sdk", "opentelemetry.proto", "opentelemetry.exporter.otlp.proto.http")
"""Modules that the ``otel`` extra installs."""


@dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """Options of traces, pushed metrics and access lines. Without an endpoint nothing of OpenTelemetry is imported."""

    otlp_traces_endpoint: str | None = option(
        None, "OTLP/HTTP receiver of one trace per request; /v1/traces is added to a URL without a path", OTLP_URL,
        "logs", shown_default="no traces",
    )  # fmt: skip
    otlp_metrics_endpoint: str | None = option(
        None, "OTLP/HTTP receiver of the gen_ai.server metrics; /v1/metrics is added to a URL without a path",
        OTLP_URL, "logs", shown_default="/metrics only",
    )  # fmt: skip
    trace_sample_ratio: float = option(
        1.0, "share of requests to trace, of those that do not come with a traceparent header, whose sampled flag wins",
        decimal(0, 1), "logs",
    )  # fmt: skip
    access_log: bool = option(False, "log a line for each answered request", SWITCH, "logs")

    def check_telemetry(self) -> None:
        """Raise StartError if an endpoint is given and a package that is needed for it is not installed."""
        given = [
            flag
            for flag, value in (
                ("--otlp-traces-endpoint", self.otlp_traces_endpoint),
                ("--otlp-metrics-endpoint", self.otlp_metrics_endpoint),
            )
            if value
        ]
        missing = [name for name in PACKAGES if given and not _installed(name)]
        if missing:
            raise StartError(
                f"{given[0]} needs OpenTelemetry",
                f"the Python module {missing[0]} is not installed",
                f"pip install -e '.[otel]' -c constraints.txt, or start without {' and '.join(given)}",
            )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that contains it
        return False
