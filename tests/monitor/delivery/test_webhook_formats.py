"""Formats and signatures: each receiver's shape, escaping and limits, rendered alike every time."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook
from tests.monitor.delivery.loopback import endpoint_to

from quantwatch.config.secrets import Secret
from quantwatch.delivery import apprise
from quantwatch.delivery.formats import most_in_digest, render
from quantwatch.delivery.formats.digest import (
    MOST_BYTES,
    MOST_MESSAGES,
    digest_body,
    members_of,
)
from quantwatch.delivery.signing import new_signing_secret, signed_headers
from quantwatch.errors import UserError
from quantwatch.store.deliveries import Due, Message
from quantwatch.store.outbox import canonical

NOW = datetime.now(UTC)
ALERT = {
    "episode": "e1",
    "rule": "output-kl",
    "severity": "critical",
    "change": "fired",
    "metric": "logit_kl",
    "statistic": "mean",
    "value": 0.2,
    "value_kind": "finite",
    "threshold": 0.15,
    "interval": [0.18, 0.22],
    "words": "output KL 0.2 > 0.15",
    "since": "2026-11-29T02:00:00Z",
    "first_run": "01RUN",
}
DATA = {
    "version": 1,
    "title": "nightly / int4: critical, firing: output-kl",
    "severity": "critical",
    "reason": "first",
    "check": "nightly",
    "candidate": "int4",
    "alerts": [ALERT],
    "culprit": "layers.3.mlp.down_proj",
    "changed": [{"what": "torch", "before": "2.12", "now": "2.13"}],
    "link": "https://dash.example/run?run=01RUN",
    "command": "quantwatch check run nightly",
}
FORMATS = ("slack", "discord", "teams", "pagerduty", "alertmanager", "quantwatch")


def message(kind: str = "alert.firing", **data: Any) -> Message:
    body = canonical({"type": kind, "timestamp": "2026-11-29T02:00:00Z", "data": DATA | data})
    return Message(1, "01EVENT", kind, "nightly/int4", body, "hook", 1, "token", NOW)


def rendered(name: str, one: Message) -> Any:
    endpoint = endpoint_to(1, format=name, secrets=(Secret("routing-key-1"),))
    return json.loads(render(one, endpoint))


@pytest.mark.parametrize("name", FORMATS)
def test_says_what_an_alert_must_say(name: str) -> None:
    """Catches X23: a format that leaves out the rule, value, culprit, command or link."""
    text = json.dumps(rendered(name, message()))
    wanted = ["output-kl", "0.15", "https://dash.example/run?run=01RUN", "check run nightly"]
    if name != "alertmanager":
        wanted += ["down", "2.13", "01RUN"]
    for word in wanted:
        assert word in text


@pytest.mark.parametrize("name", FORMATS)
def test_rendering_is_pure(name: str) -> None:
    """Catches B25: a body that differs between two attempts."""
    endpoint = endpoint_to(1, format=name, secrets=(Secret("routing-key-1"),))
    assert render(message(), endpoint) == render(message(), endpoint)


@settings(max_examples=40)
@given(
    st.text(max_size=40).map(lambda text: text * 200),
    st.lists(st.text(max_size=20).map(lambda text: text * 300), max_size=12),
    st.sampled_from(FORMATS),
)
def test_limits(title: str, words: list[str], name: str) -> None:
    """Law: any text stays within each receiver's limits and is strict JSON."""
    alerts = [ALERT | {"rule": text[:64], "words": text} for text in words]
    document = rendered(name, message(title=title, alerts=alerts))
    if name == "slack":
        assert len(document["blocks"]) <= 50
        assert len(document["blocks"][0]["text"]["text"]) <= 150
        assert all(len(block["text"]["text"]) <= 3000 for block in document["blocks"])
    if name == "discord":
        [embed] = document["embeds"]
        fields = embed["fields"]
        assert len(fields) <= 25
        assert len(embed["title"]) <= 256
        assert all(0 < len(one["name"]) <= 256 and 0 < len(one["value"]) <= 1024 for one in fields)
        assert len(embed["title"]) + sum(len(f["name"] + f["value"]) for f in fields) <= 6000
    if name == "teams":
        assert len(json.dumps(document, ensure_ascii=False).encode()) < 28_000
    if name == "pagerduty":
        assert len(document["payload"]["summary"]) <= 1024


def test_slack_escapes() -> None:
    """Catches a name that becomes markup, a link, or a call to everybody."""
    document = rendered("slack", message(culprit="<!channel> a&b <https://x|y>"))
    text = json.dumps(document, ensure_ascii=False)
    assert "<!channel>" not in text
    assert "&lt;!channel&gt; a&amp;b" in text


def test_discord_calls_nobody() -> None:
    """Catches @everyone in a layer's name, and markdown in layers.*.q_proj."""
    document = rendered("discord", message(culprit="@everyone layers.*.q_proj"))
    assert document["allowed_mentions"] == {"parse": []}
    assert r"layers.\*.q\_proj" in json.dumps(document["embeds"]).replace("\\\\", "\\")


@pytest.mark.parametrize(
    ("kind", "reason", "action"),
    [
        ("alert.firing", "first", "trigger"),
        ("alert.escalated", "escalated", "trigger"),
        ("alert.resolved", "resolved_some", "trigger"),
        ("alert.resolved", "resolved_all", "resolve"),
    ],
)
def test_pagerduty_closes_what_it_opened(kind: str, reason: str, action: str) -> None:
    """Catches an incident that stays open, or is closed while something still fires."""
    event = rendered("pagerduty", message(kind, reason=reason))
    assert event["event_action"] == action
    assert event["dedup_key"] == "quantwatch:nightly/int4"
    assert event["routing_key"] == "routing-key-1"


def test_alertmanager_shape() -> None:
    """Catches a field that receivers of Alertmanager's version 4 rely on."""
    document = rendered("alertmanager", message())
    assert set(document) == {
        *("version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels"),
        *("commonLabels", "commonAnnotations", "externalURL", "notification_reason", "alerts"),
    }
    [alert] = document["alerts"]
    assert alert["labels"] == {
        "alertname": "output-kl",
        "severity": "critical",
        "check": "nightly",
        "candidate": "int4",
    }
    assert (document["version"], document["status"], alert["status"]) == ("4", "firing", "firing")
    over = rendered(
        "alertmanager",
        message("alert.resolved", reason="resolved_all", alerts=[ALERT | {"change": "resolved"}]),
    )
    assert over["status"] == "resolved"
    assert over["alerts"][0]["fingerprint"] == alert["fingerprint"]
    assert over["alerts"][0]["endsAt"] == "2026-11-29T02:00:00Z"


def due(number: int, subject: str, *, attempts: int = 0, size: int = 0) -> Due:
    data = DATA | {"title": f"number {number}", "fill": "x" * size}
    body = canonical({"type": "alert.firing", "timestamp": "t", "data": data})
    return Due(number, f"id{number}", "alert.firing", subject, body, attempts)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "pagerduty"])
def test_digest_in_every_format(name: str) -> None:
    """Catches a digest that a format can't show."""
    body = canonical(digest_body([due(1, "a"), due(2, "b")], NOW))
    digest = Message(1, "01D", "digest", "digest:hook", body, "hook", 1, "t", NOW)
    text = json.dumps(rendered(name, digest))
    assert "number 1" in text
    assert "number 2" in text


def digest_of(*members: Due) -> Message:
    body = canonical(digest_body(members, NOW))
    return Message(1, "01D", "digest", "digest:hook", body, "hook", 1, "t", NOW)


GROUPING = [name for name in FORMATS if name != "pagerduty"]


@settings(max_examples=30)
@given(
    st.sampled_from(GROUPING),
    st.text(st.sampled_from("aé数*&_ "), min_size=1, max_size=20).map(lambda text: text * 30),
)
def test_everything_in_a_digest_is_shown(name: str, filler: str) -> None:
    """Law: what is marked as delivered is told: 25 of 50 in Discord, 40 of 50 in Slack were."""
    waiting = [due(number, f"s{number}") for number in range(60)]
    titled = [
        replace(one, body=canonical(json.loads(one.body) | {"data": {"title": f"no{n}!{filler}"}}))
        for n, one in enumerate(waiting)
    ]
    members = members_of(titled[:MOST_MESSAGES], most_in_digest(endpoint_to(1, format=name)))
    assert len(members) == {"discord": 25, "slack": 40}.get(name, 50)
    document = rendered(name, digest_of(*members))
    text = json.dumps(document, ensure_ascii=False).replace("\\", "")
    missing = [n for n in range(len(members)) if f"no{n}!" not in text]
    assert not missing
    if name == "discord":
        [embed] = document["embeds"]
        fields = "".join(one["name"] + one["value"] for one in embed["fields"])
        assert len(embed["fields"]) <= 25
        assert len(embed["title"] + fields) <= 6000
    if name == "slack":
        assert len(document["blocks"]) <= 50
    if name == "teams":
        assert len(json.dumps(document, ensure_ascii=False).encode()) < 28_000


@pytest.mark.parametrize(("name", "hidden"), [("discord", 26), ("slack", 11)])
def test_what_is_cut_is_counted(name: str, hidden: int) -> None:
    """Catches a digest of another version that loses its last messages without a word."""
    digest = digest_of(*(due(number, f"s{number}") for number in range(50)))
    text = json.dumps(rendered(name, digest), ensure_ascii=False)
    assert f"… and {hidden} more" in text
    assert f"number {50 - hidden - 1}" in text
    assert f"number {50 - hidden}" not in text


@pytest.mark.parametrize("name", ["slack", "discord", "teams", "pagerduty"])
def test_what_is_not_named_is_counted(name: str) -> None:
    """Catches rules, places and changes beyond the named ones that nobody hears of."""
    scopes = [{"scope": f"layers.{number}"} for number in range(10)]
    one = message(more_alerts=4, scopes=scopes, more_scopes=20, more_changed=5)
    text = json.dumps(rendered(name, one), ensure_ascii=False)
    for words in ("… and 4 more", "… and 27 more", "… and 5 more"):
        assert words in text
    assert "more" not in json.dumps(rendered(name, message()), ensure_ascii=False)


def test_half_a_surrogate_pair_is_sent() -> None:
    """Catches a token piece that no card can hold: a message that dies in every attempt."""
    assert "layers" in json.dumps(rendered("teams", message(culprit="layers \ud83d")))


def test_critical_ones_first() -> None:
    """Catches a critical regression that waits behind forty warnings; the order stays."""
    calm = canonical({"type": "alert.firing", "data": {"severity": "warning"}})
    waiting = [replace(due(number, f"s{number}"), body=calm) for number in range(8)]
    waiting += [due(8, "bad"), replace(due(9, "bad"), body=calm), due(10, "s0")]
    found = members_of(waiting, 4)
    assert [one.delivery_id for one in found] == [0, 8, 9, 10]
    assert [one.delivery_id for one in members_of(waiting, 3)] == [0, 8, 9]


@pytest.mark.parametrize("name", ["pagerduty", "alertmanager"])
@pytest.mark.parametrize(
    ("kind", "is_open"),
    [
        ("endpoint.failing", True),
        ("endpoint.disabled", True),
        ("endpoint.recovered", False),
        ("test", False),
    ],
)
def test_incidents_about_endpoints_end(name: str, kind: str, is_open: bool) -> None:
    """Catches an incident that a test or a notice opens, and nothing ever closes."""
    document = rendered(name, message(kind, alerts=[]))
    if name == "pagerduty":
        assert document["event_action"] == ("trigger" if is_open else "resolve")
    else:
        assert document["status"] == ("firing" if is_open else "resolved")


def test_a_test_is_not_called_resolved() -> None:
    """Catches a test that reads as the end of something."""
    one = message("test", alerts=[], severity="info")
    assert rendered("slack", one)["text"].startswith("[info]")


def test_who_goes_into_a_digest() -> None:
    """Catches a digest of a megabyte, and one that breaks the order or the id of what was tried."""
    waiting = [due(1, "a"), due(2, "b", attempts=1), due(3, "b"), due(4, "a")]
    assert [one.delivery_id for one in members_of(waiting)] == [1, 4]
    large = [due(number, f"s{number}", size=30_000) for number in range(10)]
    assert sum(len(one.body) for one in members_of(large)) <= MOST_BYTES


def test_two_secrets_while_one_rotates() -> None:
    """Catches a rotation during which the receiver refuses everything."""
    old, new = new_signing_secret(), new_signing_secret()
    body = '{"title":"KL über 数"}'.encode()
    # Not NOW: the library refuses a message that is five minutes old, as a suite's can be.
    headers = signed_headers("01EVENT", datetime.now(UTC), body, (Secret(new), Secret(old)))
    for secret in (old, new):
        assert Webhook(secret).verify(body, headers) == {"title": "KL über 数"}
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(new_signing_secret()).verify(body, headers)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(new).verify(body + b" ", headers)


def test_new_secrets_differ() -> None:
    """Catches a secret that is too short, or always the same."""
    secrets = {new_signing_secret() for _ in range(20)}
    assert len(secrets) == 20
    assert all(secret.startswith("whsec_") and len(secret) == 50 for secret in secrets)


def test_apprise_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError in the middle of the night."""
    import sys

    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(UserError, match=r"quantwatch\[apprise\]"):
        apprise.load()
