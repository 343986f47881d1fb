"""OpenTelemetry: traces and metrics of ended requests, sent by OTLP over HTTP. All modules but ``attributes`` import
packages of the ``otel`` extra, so they are imported only if an endpoint is configured. Must not know HTTP handlers."""
