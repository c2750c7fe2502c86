"""Spans of requests: one per request, under the caller's, without any text."""

import importlib

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.tracing import Tracing, traceparent
from shared.errors import ConfigError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_span_continues_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing("none", SimpleSpanProcessor(exporter))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "authorization": "Bearer secret"}
    span = tracing.start_request("/v1/completions", "cmpl-1", headers)
    version, trace, own, flags = traceparent(span).split("-")
    span.end()
    (done,) = exporter.get_finished_spans()
    assert (version, trace, flags) == ("00", TRACE, "01") and own != PARENT
    assert done.parent is not None and f"{done.parent.span_id:016x}" == PARENT
    assert "secret" not in done.to_json()
    tracing.close()


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_without_a_valid_parent_a_new_trace_begins(header: str) -> None:
    tracing = Tracing()
    span = tracing.start_request("/v1/completions", "cmpl-1", {"traceparent": header})
    assert traceparent(span).split("-")[1] not in (TRACE, "0" * 32)
    tracing.close()


def test_an_exporter_that_is_not_installed_is_a_clear_error() -> None:
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp"):
            Tracing("otlp")
