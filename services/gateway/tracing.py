"""One OpenTelemetry span per request; its context travels with the submission. No prompt or answer is recorded."""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import ConfigError

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """The process's tracer. Without an exporter spans cost little and go nowhere, but ids still propagate."""

    def __init__(self, exporter: str = "none", *processors: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "pagewire-gateway"}))
        for processor in processors:
            self._provider.add_span_processor(processor)
        if exporter != "none":
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(exporter)))
        self._tracer = self._provider.get_tracer("services.gateway")

    def start_request(self, name: str, request_id: str, headers: Mapping[str, str]) -> trace.Span:
        """A span under the caller's `traceparent`, if there is one."""
        context = _propagator.extract(dict(headers))
        attributes = {"gen_ai.operation.name": name, "gen_ai.response.id": request_id}
        return self._tracer.start_span(name, context, trace.SpanKind.SERVER, attributes)

    def close(self) -> None:
        """Send what is waiting."""
        self._provider.shutdown()


def traceparent(span: trace.Span) -> str:
    """The header value under which others continue the trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found]
            OTLPSpanExporter,
        )
    except ImportError as error:
        raise ConfigError("trace_exporter=otlp needs the package opentelemetry-exporter-otlp-proto-http") from error
    exporter: SpanExporter = OTLPSpanExporter()
    return exporter
