"""The server metrics of the semantic conventions for generative AI, pushed by OTLP.

They say the same as metrics of ``GET /metrics``, under the names that OpenTelemetry's backends know. Its SDK aggregates
them and sends them from a thread of its own, every minute or as ``OTEL_METRIC_EXPORT_INTERVAL`` says.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/.
"""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from coordinator.requests.state import State
from coordinator.requests.timeline import Timeline
from coordinator.telemetry.attributes import PROVIDER, operation

CLOSING_MS = 1500
"""How long the end of the process may take to send the last values."""
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class ServerMetrics:
    """Observes ended requests for the served ``model``. ``url``: the full URL of the receiver."""

    def __init__(self, url: str, model: str, resource: Resource, version: str) -> None:
        self._model = model
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=url))
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("tandem", version)
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Time from the arrival of a request to its last token or failure.",
            explicit_bucket_boundaries_advisory=_DURATION,
        )  # fmt: skip
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Time from the arrival of a request to its first token.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN,
        )  # fmt: skip
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean time per output token after the first.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN,
        )  # fmt: skip

    def observe(self, timeline: Timeline) -> None:
        """Observe a request that has ended. One that its client has left counts only up to its first token."""
        facts = timeline.facts()
        attributes = {
            "gen_ai.operation.name": operation(timeline.endpoint),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        first, finished = facts.first_token_at, facts.finished_at
        if first is not None:
            self._first_token.record(first - timeline.arrived_at, attributes)
        if facts.state is State.FAILED:
            attributes["error.type"] = timeline.error_code or "_OTHER"
        elif facts.state is not State.DONE:
            return
        assert finished is not None
        self._duration.record(finished - timeline.arrived_at, attributes)
        later = facts.output_tokens - facts.choices
        if first is not None and later > 0 and facts.state is State.DONE:
            self._per_token.record((finished - first) * facts.choices / later, attributes)

    def close(self) -> None:
        """Send the last values. Blocks for at most CLOSING_MS."""
        self._provider.shutdown(CLOSING_MS)
