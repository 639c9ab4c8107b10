"""The message body: small, strict JSON, nothing secret, every key documented."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quantwatch.domain import Severity
from quantwatch.observability import redaction
from quantwatch.report.message import MAX_BYTES, Member, Notice, body, link
from quantwatch.report.numbers import Number

AT = datetime(2026, 11, 29, 2, 3, tzinfo=UTC)
DOCS = Path(__file__).parents[3] / "docs" / "webhooks.md"


def scope(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "scope": name, "metric": "lens_kl", "statistic": "mean", "value": 0.4,
        "value_kind": "finite", "threshold": 0.15, "prompt": 3, "position": 17, **fields,
    }  # fmt: skip


def member(rule: str = "layer-kl", **fields: Any) -> Member:
    evidence = {
        "metric": "lens_kl", "statistic": "mean", "interval": [0.3, 0.5], "scope": "layers.3",
        "value": 0.4, "value_kind": "finite", "threshold": 0.15, "words": f"{rule} said so",
        "scopes": [scope("layers.3"), scope("layers.4")], "more_scopes": 1,
        "culprit": "layers.3.mlp.down_proj stands out", "baseline": "01BASE",
        "changed": [{"name": "environment.gpus", "part": "gpu", "value": ["A"], "baseline": ["B"]}],
        "drift": "changed since the baseline: gpus B → A",
        "more_changed": 2, "run": "01RUN", "command": "quantwatch check run nightly",
        "confirmation": "confirmed by run 01CONFIRM",
    }  # fmt: skip
    known = Member(
        alert_id=7, episode_id="01EPISODE", rule=rule, severity=Severity.CRITICAL, change="fired",
        since=AT - timedelta(hours=1), first_run="01FIRST", num_runs=2,
        evidence=evidence | fields.pop("evidence", {}), peak=Number(0.5),
    )  # fmt: skip
    return replace(known, **fields)


def notice(*members: Member, **fields: Any) -> Notice:
    known = Notice(
        type="alert.firing", reason="first", check="nightly", candidate="int4", moment=AT,
        members=members or (member(),), num_open=1, dashboard_url="https://watch.example",
    )  # fmt: skip
    return replace(known, **fields)


def resolved(**fields: Any) -> Notice:
    one = member(change="resolved", resolve_reason="recovered",
                 evidence={"now": {"value": 0.01, "value_kind": "finite", "run": "01LAST"}})  # fmt: skip
    return notice(one, type="alert.resolved", reason="resolved_all", num_open=0, **fields)


def test_a_message_is_one_whole_document() -> None:
    """Catches a key that is renamed: receivers rely on them."""
    document = body(notice())
    assert document["type"] == "alert.firing"
    assert document["timestamp"] == "2026-11-29T02:03:00Z"
    data = document["data"]
    assert data["title"] == "nightly / int4: critical, firing: layer-kl: layer-kl said so"
    assert (data["run"], data["baseline"], data["duration_s"]) == ("01RUN", "01BASE", None)
    assert data["link"] == "https://watch.example/run?run=01RUN"
    assert data["since"] == "2026-11-29T01:03:00Z"
    assert (data["more_scopes"], data["more_changed"]) == (1, 2)
    assert data["changed"][0]["value"] == '["A"]'
    [one] = data["alerts"]
    assert (one["interval"], one["peak"], one["value_kind"]) == ([0.3, 0.5], 0.5, "finite")
    assert one["confirmation"] == "confirmed by run 01CONFIRM"


def test_a_resolve_says_how_long_and_what_now() -> None:
    """Catches an end without duration and value (X17)."""
    data = body(resolved())["data"]
    assert data["title"] == "nightly / int4: resolved: layer-kl"
    assert (data["duration_s"], data["run"]) == (3600.0, "01LAST")
    [one] = data["alerts"]
    assert (one["resolved_value"], one["resolve_reason"]) == (0.01, "recovered")


TITLES = [
    ("new_members", "nightly / int4: critical, firing: layer-kl: layer-kl said so"),
    ("escalated", "nightly / int4: critical, escalated: layer-kl: layer-kl said so"),
    ("reminder", "nightly / int4: critical, still firing: layer-kl: layer-kl said so"),
    ("silence_expired",
     "nightly / int4: critical, still firing after silence: layer-kl: layer-kl said so"),
    ("resolved_some", "nightly / int4: resolved: layer-kl, 4 still open"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "title"), TITLES)
def test_the_title_says_why(reason: str, title: str) -> None:
    """Catches a reminder that looks like news."""
    assert body(notice(reason=reason, num_open=4))["data"]["title"] == title


def test_critical_goes_first() -> None:
    """Catches a page whose first line is a warning."""
    warning = member("a-warning", severity=Severity.WARNING, evidence={"culprit": "warned"})
    data = body(notice(warning, member("z-critical")))["data"]
    assert data["severity"] == "critical"
    assert [one["rule"] for one in data["alerts"]] == ["z-critical", "a-warning"]
    assert data["culprit"] == "layers.3.mlp.down_proj stands out"


def monsters() -> Iterator[Member]:
    for number in range(200):
        huge = "é\u0000\ud83d" * 5000
        scopes = [scope(f"layers.{n}.{huge}", metric=huge) for n in range(50)]
        changed = [{"name": huge, "value": [huge], "baseline": {"k": huge}} for _ in range(50)]
        yield member(
            f"rule-{number}",
            evidence={"words": huge, "culprit": huge, "scopes": scopes, "changed": changed},
        )


@pytest.mark.slow
def test_the_largest_message_is_small_enough() -> None:
    """Catches a message that receivers refuse: at most 20 kB, whatever there is to tell."""
    from quantwatch.store.outbox import canonical

    document = body(notice(*monsters()))
    assert len(canonical(document)) < MAX_BYTES
    data = document["data"]
    assert len(data["alerts"]) + data["more_alerts"] == 200
    assert len(data["scopes"]) + data["more_scopes"] == 200 * 51
    assert "\x00" not in json.dumps(document)


def test_what_is_not_a_number_has_a_kind() -> None:
    """Catches NaN in a body (B14), and a receiver that reads null as 0."""
    broken = member(evidence={"value": None, "value_kind": "nan"}, peak=Number(None, "nan"))
    document = body(notice(broken))
    [one] = document["data"]["alerts"]
    assert (one["value"], one["value_kind"], one["peak_kind"]) == (None, "nan", "nan")
    json.dumps(document, allow_nan=False)


def test_a_secret_never_leaves() -> None:
    """Catches a token in the alert about it (B29): in words, names, values, anywhere."""
    redaction.register("canary-4711")
    try:
        said = "https://hooks.example/T0/canary-4711 said canary-4711"
        leaky = member(
            evidence={
                "words": said, "culprit": said, "confirmation": said,
                "scopes": [scope(said)], "changed": [{"name": said, "value": [said], "baseline": said}],
            }
        )  # fmt: skip
        assert "canary" not in json.dumps(body(notice(leaky)))
    finally:
        redaction.forget()


LINKS = [
    ("https://w.example/", "01R", "https://w.example/run?run=01R"),
    ("https://w.example/quant", None, "https://w.example/quant/alerts"),
    (None, "01R", None),
]


@pytest.mark.parametrize(("url", "run", "expected"), LINKS)
def test_the_link_leads_to_the_page(url: str | None, run: str | None, expected: str | None) -> None:
    """Catches a link with two slashes, or to nowhere."""
    assert link(url, run) == expected


def keys(value: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{prefix}.{key}" if prefix else key
            found |= {path} | keys(inner, path)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        found |= keys(value[0], f"{prefix}[]")
    return found


def test_every_key_is_documented() -> None:
    """Catches a key that nobody can know of, and one that is promised and not there."""
    documented = set(
        re.findall(r"^\| `([a-z_.\[\]]+)` \|", DOCS.read_text().split("## Keys")[1], re.MULTILINE)
    )
    assert documented == keys(body(resolved()))
