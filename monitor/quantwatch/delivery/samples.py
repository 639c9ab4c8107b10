"""Messages that nobody sent, to see what an endpoint would get: real shapes, made-up data."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from quantwatch.delivery.formats.digest import digest_body
from quantwatch.delivery.notices import TEST
from quantwatch.delivery.testing import body_at
from quantwatch.domain import Severity
from quantwatch.report.message import Member, Notice, body
from quantwatch.report.numbers import Number
from quantwatch.store.deliveries import Due, Message
from quantwatch.store.digests import DIGEST
from quantwatch.store.outbox import canonical

Kind = Literal["firing", "resolved", "digest", "test"]

AT = datetime(2026, 1, 5, 2, 3, tzinfo=UTC)
RUN = "01KE6M2T50SAMPLE000000000R"
_EVENT = "01KE6M2T50SAMPLE000000000E"
_OTHER = "01KE6M2T50SAMPLE000000000F"
_SUBJECT = "nightly/int4"


def sample(kind: Kind, endpoint: str, dashboard_url: str | None) -> Message:
    """Return a message of a kind: the same each time, links go to `dashboard_url`."""
    if kind == TEST:
        return as_message(_EVENT, TEST, f"{TEST}:{endpoint}", body_at(_stamp()), endpoint)
    if kind == DIGEST:
        members = [
            Due(
                number, event_id, f"alert.{one}", _SUBJECT, canonical(_alert(one, dashboard_url)), 0
            )
            for number, (event_id, one) in enumerate(((_EVENT, "firing"), (_OTHER, "resolved")))
        ]
        document = digest_body(members, AT)
        return as_message(_EVENT, DIGEST, f"{DIGEST}:{endpoint}", document, endpoint)
    document = _alert(kind, dashboard_url)
    return as_message(_EVENT, document["type"], _SUBJECT, document, endpoint)


def as_message(
    event_id: str, kind: str, subject: str, document: Mapping[str, Any] | bytes, endpoint: str
) -> Message:
    """Return a document as a message that is not on its way: there is no delivery of it."""
    body = document if isinstance(document, bytes) else canonical(document)
    return Message(0, event_id, kind, subject, body, endpoint, 1, "", AT)


def _stamp() -> str:
    return AT.isoformat()


def _alert(kind: str, dashboard_url: str | None) -> dict[str, Any]:
    over = kind == "resolved"
    members = [_worst(over=over)] if over else [_worst(over=over), _not_a_number()]
    return body(
        Notice(
            type=f"alert.{kind}",
            reason="resolved_all" if over else "first",
            check="nightly",
            candidate="int4",
            moment=AT,
            members=members,
            num_open=0 if over else len(members),
            dashboard_url=dashboard_url,
        )
    )


def _worst(*, over: bool) -> Member:
    place = {
        **{"scope": "layers.17", "metric": "lens_kl", "statistic": "mean"},
        **{"value": 0.41, "value_kind": "finite", "threshold": 0.15, "prompt": 3, "position": 17},
    }
    changed = [
        {"name": "environment.libraries.torch", "part": "library", "value": "b", "baseline": "a"}
    ]
    evidence: dict[str, Any] = {
        **{name: place[name] for name in ("scope", "metric", "statistic", "value", "value_kind")},
        **{"threshold": 0.15, "interval": [0.38, 0.44], "scopes": [place], "more_scopes": 2},
        "words": 'sample: "lens KL" 0.41 > 0.15\nat layers.17',
        "culprit": "sample: layers.17.mlp.down_proj stands out",
        **{"baseline": "01KE3ZRT50SAMPLE000000000B", "drift": "torch a → b", "changed": changed},
        **{"run": RUN, "command": "quantwatch check run nightly", "confirmation": "confirmed"},
    }
    if over:
        evidence["now"] = {"value": 0.02, "value_kind": "finite", "run": RUN}
    return Member(
        alert_id=7,
        episode_id="01KE6M2T50SAMPLE000000000P",
        rule="layer-kl",
        severity=Severity.CRITICAL,
        change="resolved" if over else "fired",
        since=AT - timedelta(hours=24),
        first_run=RUN,
        num_runs=2,
        evidence=evidence,
        peak=Number(0.41),
        resolve_reason="recovered" if over else None,
    )


def _not_a_number() -> Member:
    """A value that isn't finite, and next to nothing beside it: what is missing shows."""
    return Member(
        alert_id=8,
        episode_id="01KE6M2T50SAMPLE000000000Q",
        rule="nonfinite",
        severity=Severity.WARNING,
        change="fired",
        since=AT,
        first_run=None,
        num_runs=1,
        evidence={"value": None, "value_kind": "nan", "words": "sample: 3 values are NaN"},
        peak=Number(None, "nan"),
    )
