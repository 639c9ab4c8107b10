"""Traces: one id per run and per message, the same on every attempt, host and process.

The id follows from the run's or event's own id, so that a log line, a span and a row are found
from each other without a table. Spans go out by OTLP when OTEL_EXPORTER_OTLP_ENDPOINT is set and
the extra `otlp` is installed; otherwise a span only puts the trace id on the log.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quantwatch.errors import UserError
from quantwatch.observability import logs
from quantwatch.observability.redaction import scrub

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
RETRIES = "quantwatch.retry_count"
_exporting: list["Exporter"] = []


class Exporter:
    """A started OTLP export; `stop` sends what is left."""

    def __init__(self, tracer: Any, api: Any, shutdown: Callable[[], None]) -> None:
        self.tracer, self.api, self._shutdown = tracer, api, shutdown

    def stop(self) -> None:
        """Send what is left and end."""
        _exporting.clear()
        self._shutdown()


def trace_of(subject_id: str) -> str:
    """Return the trace id (32 hex digits) of a run or an event."""
    return hashlib.sha256(subject_id.encode()).hexdigest()[:32]


@contextmanager
def span(name: str, subject_id: str, *, retries: int = 0, **facts: Any) -> Iterator[str]:
    """Follow one piece of work on a run or message: its trace id is on every record in the body.

    `retries` is how many attempts came before this one. Yields the trace id.
    """
    trace = trace_of(subject_id)
    with logs.bound(trace=trace):
        if not _exporting:
            yield trace
            return
        with _exported(_exporting[0], name, trace, {RETRIES: retries, **facts}):
            yield trace


def start(env: Mapping[str, str] = os.environ) -> Exporter | None:
    """Begin to export when an endpoint is set. Raises UserError when the extra is missing."""
    named = next((name for name in VARIABLES if env.get(name)), None)
    if named is None:
        return None
    try:
        exporter = _otlp()
    except ImportError as error:
        raise UserError(
            f"{named} is set, but {error.name} is not installed; "
            'run: pip install "quantwatch[otlp]", or unset it'
        ) from error
    use(exporter)
    return exporter


def use(exporter: Exporter) -> None:
    """Send spans to this exporter from now on."""
    _exporting[:] = [exporter]


def _otlp() -> Exporter:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(
        {"service.name": "quantwatch", "service.instance.id": os.urandom(8).hex()}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Exporter(provider.get_tracer("quantwatch"), trace, provider.shutdown)


@contextmanager
def _exported(
    exporter: Exporter, name: str, trace_id: str, attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Record a span in the given trace; an error in the body is noted, without its secrets."""
    api = exporter.api
    # A parent that nobody recorded: it only carries the trace id.
    parent = api.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(trace_id[:16], 16) or 1,
        is_remote=True,
        trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
    )
    context = api.set_span_in_context(api.NonRecordingSpan(parent))
    shown = {key: scrub(v) if isinstance(v, str) else v for key, v in attributes.items()}
    with exporter.tracer.start_as_current_span(
        name,
        context=context,
        attributes=shown,
        record_exception=False,
        set_status_on_exception=False,
    ) as recorded:
        try:
            yield
        except BaseException as error:
            words = scrub(f"{type(error).__name__}: {error}")
            recorded.set_status(api.Status(api.StatusCode.ERROR, words))
            raise
