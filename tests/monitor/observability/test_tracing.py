"""Traces: the same id everywhere; spans with the retry count when they are asked for."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quantwatch.errors import UserError
from quantwatch.observability import logs, redaction, tracing


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    exporter = tracing.Exporter(provider.get_tracer("test"), api, provider.shutdown)
    tracing.use(exporter)
    yield memory
    exporter.stop()


def test_the_id_follows_from_what_it_is_about() -> None:
    """Catches a second attempt, on another host, under another trace."""
    assert tracing.trace_of("01JRUN") == tracing.trace_of("01JRUN")
    assert tracing.trace_of("01JRUN") != tracing.trace_of("01JRUM")
    assert len(tracing.trace_of("01JRUN")) == 32


def test_without_export_the_log_still_carries_the_trace() -> None:
    """Catches log lines that cannot be put together without OpenTelemetry."""
    with tracing.span("run", "01JRUN") as trace:
        assert logs.context() == {"trace": trace}
    assert logs.context() == {}


def test_attempts_are_spans_of_one_trace_with_their_retry_count(
    spans: InMemorySpanExporter,
) -> None:
    """Catches a trace per attempt, and a span from which nobody sees how often it was tried."""
    for retries in (0, 1):
        with tracing.span("run", "01JRUN", retries=retries, check="nightly"):
            pass
    first, second = spans.get_finished_spans()
    assert f"{first.context.trace_id:032x}" == tracing.trace_of("01JRUN")
    assert first.context.trace_id == second.context.trace_id
    assert [dict(span.attributes or {})[tracing.RETRIES] for span in (first, second)] == [0, 1]
    assert dict(first.attributes or {})["check"] == "nightly"


def test_a_failed_span_says_so_without_secrets(spans: InMemorySpanExporter) -> None:
    """Catches the token of a webhook in a trace (B29)."""
    redaction.register("canary-12345")
    with (
        pytest.raises(OSError, match="canary"),
        tracing.span("deliver", "01JEVT", where="https://x/canary-12345"),
    ):
        raise OSError("no route to https://x/canary-12345")
    redaction.forget()
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is api.StatusCode.ERROR
    assert "OSError" in str(span.status.description)
    assert "canary" not in span.to_json()


def test_without_an_endpoint_nothing_is_exported() -> None:
    """Catches telemetry that nobody asked for (X39)."""
    assert tracing.start({}) is None


def test_an_endpoint_without_the_extra_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an export that silently does not happen."""

    def missing() -> tracing.Exporter:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")

    monkeypatch.setattr(tracing, "_otlp", missing)
    with pytest.raises(UserError, match=r'ENDPOINT is set.*pip install "quantwatch\[otlp\]"'):
        tracing.start({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})


def test_the_real_exporter_starts_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a call that the library does not have."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    exporter = tracing.start(env)
    assert exporter is not None
    exporter.stop()
    with tracing.span("run", "01JRUN"):
        pass
