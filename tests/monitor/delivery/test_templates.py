"""Filled templates: valid whatever a message holds, exactly the texts of the message, sent signed."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook
from tests.monitor.delivery.loopback import (
    SECRET,
    Receiver,
    Reply,
    endpoint_to,
    lane_to,
    states,
    tell,
    to_next,
)

from quantwatch.config import templates
from quantwatch.config.endpoints import Endpoint
from quantwatch.config.secrets import Secret
from quantwatch.config.template_variables import VARIABLES
from quantwatch.delivery.formats import content_of, most_in_digest, render
from quantwatch.delivery.formats.template import variables
from quantwatch.delivery.samples import AT, Kind, as_message, sample
from quantwatch.store.deliveries import Message
from quantwatch.store.session import Database

PAGE = Path(__file__).parents[3] / "docs" / "webhooks.md"
KINDS: tuple[Kind, ...] = ("firing", "resolved", "digest", "test")
EVERYTHING = json.dumps({name: "{{ " + name + " }}" for name in VARIABLES})
EVERY_VALUE = re.sub(r'"(\{\{.*?\}\})"', r"\1", EVERYTHING)


def with_body(body: str, content_type: str = "application/json", **fields: Any) -> Endpoint:
    template = templates.parse("k", body, content_type)
    return endpoint_to(fields.pop("port", 1), format="template", template=template, **fields)


def filled(body: str, message: Message, content_type: str = "application/json") -> str:
    return render(message, with_body(body, content_type)).decode()


def firing(**data: Any) -> Message:
    document = json.loads(sample("firing", "hook", "https://watch.example").body)
    document["data"] |= data
    return as_message("01E", "alert.firing", "nightly/int4", document, "hook")


def notice(kind: str) -> Message:
    data = {"title": "Endpoint ops fails", "severity": "warning", "endpoint": "ops"}
    return as_message("01N", kind, "endpoint:ops", {"type": kind, "data": data}, "hook")


TABLE = {
    "value": ("{{ alert.value }}", "0.41"),
    "value-in-a-string": ('"KL {{ alert.value }}"', '"KL 0.41"'),
    "text": ("{{ check }}", '"nightly"'),
    "text-in-a-string": ('"{{ check }}/{{candidate}}"', '"nightly/int4"'),
    "quotes-and-line-ends": (
        '"<{{ alert.words }}>"',
        '"<sample: \\"lens KL\\" 0.41 > 0.15\\nat layers.17>"',
    ),
    "missing": ("{{ alert.resolve_reason }}", "null"),
    "missing-in-a-string": ('"[{{ alert.resolve_reason }}]"', '"[]"'),
    "list": ("{{ alert.interval }}", "[0.38, 0.44]"),
    "list-in-a-string": ('"{{ alert.interval }}"', '"[0.38, 0.44]"'),
    "truth": ('[{{ alert.flapping }}, "{{ alert.flapping }}"]', '[false, "false"]'),
    "number": ('[{{ num_alerts }}, "{{ num_alerts }}"]', '[2, "2"]'),
    "as-key": ('{"{{ check }}": 1}', '{"nightly": 1}'),
    "nested-ends": ('{"a":{"b":{{ open_alerts }}}}', '{"a":{"b":2}}'),
    "escaped-quote-before": ('{"a\\"": {{ check }}}', '{"a\\"": "nightly"}'),
    "escaped-backslash-before": ('{"a\\\\": {{ check }}}', '{"a\\\\": "nightly"}'),
    "worst-place": ("{{ worst.scope }}", '"layers.17"'),
    "no-placeholder": ('{"a": 1}', '{"a": 1}'),
    "state": ('["{{ state }}", {{ reason }}]', '["firing", "first"]'),
}


@pytest.mark.parametrize(("body", "wanted"), TABLE.values(), ids=TABLE)
def test_filled(body: str, wanted: str) -> None:
    """Catches a placeholder that is filled by another rule than the page says."""
    assert filled(body, sample("firing", "hook", None)) == wanted


def test_a_number_that_is_not_finite_is_missing() -> None:
    """Catches NaN in a body, and a kind that does not say so."""
    broken = {"rule": "non-finite", "value": None, "value_kind": "nan"}
    found = filled('[{{ alert.value }}, "{{ alert.value_kind }}"]', firing(alerts=[broken]))
    assert found == '[null, "nan"]'
    never = templates.parse("k", "[{{ alert.value }}]", "application/json")
    assert never.filled({"alert.value": float("nan")}) == b"[null]"


@settings(max_examples=150)
@given(st.text(), st.text(min_size=1))
@example('"}, {{ check }} \\', "{{ title }}")
@example("\r\n\x00\u2028", "\\u0041\\")
def test_any_text_arrives_as_it_is(one: str, other: str) -> None:
    """Law: whatever a field holds, the body is valid JSON and carries exactly that text."""
    alert = {"rule": one, "words": other}
    message = firing(culprit=one, command=other, alerts=[alert])
    body = (
        '{"whole": {{ culprit }}, "part": "<{{ culprit }}|{{ command }}>", "w": {{ alert.words }},'
        ' "{{ alert.rule }}-key": {{ alerts }}}'
    )
    assert json.loads(filled(body, message)) == {
        "whole": one,
        "part": f"<{one}|{other}>",
        "w": other,
        f"{one}-key": [alert],
    }
    plain = filled("<{{ culprit }}|{{ command }}>", message, "text/plain")
    assert plain == f"<{one}|{other}>"


def test_half_a_surrogate_pair_is_sent() -> None:
    """Catches a token piece that no UTF-8 can hold: a message that dies in every attempt."""
    message = firing(culprit="layers \ud83d")
    assert json.loads(filled('["{{ culprit }}", {{ culprit }}]', message)) == ["layers \ud83d"] * 2
    assert filled("{{ culprit }}", message, "text/plain") == "layers \\ud83d"


@pytest.mark.parametrize("body", [EVERYTHING, EVERY_VALUE], ids=["in-strings", "as-values"])
@pytest.mark.parametrize("kind", [*KINDS, "endpoint.failing", "endpoint.recovered"])
def test_every_message_fills_every_variable(kind: Any, body: str) -> None:
    """Catches a message that a template can't show, and a body that differs between attempts."""
    message = sample(kind, "hook", None) if kind in KINDS else notice(kind)
    assert set(json.loads(filled(body, message))) == set(VARIABLES)
    assert filled(body, message) == filled(body, message)


def test_no_variable_is_always_missing() -> None:
    """Catches a name that is documented and never filled in."""
    messages = [sample(kind, "hook", "https://watch.example") for kind in KINDS]
    known = [variables(content_of(one)) for one in (*messages, notice("endpoint.failing"))]
    assert all(set(one) == set(VARIABLES) for one in known)
    assert [name for name in VARIABLES if all(one[name] in (None, []) for one in known)] == []


STATES = {
    "firing": (sample("firing", "hook", None), "firing"),
    "resolved": (sample("resolved", "hook", None), "resolved"),
    "some-resolved": (
        replace(firing(reason="resolved_some"), type="alert.resolved"), "firing",
    ),
    "digest": (sample("digest", "hook", None), "firing"),
    "test": (sample("test", "hook", None), "test"),
    "failing": (notice("endpoint.failing"), "firing"),
    "recovered": (notice("endpoint.recovered"), "resolved"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "state"), STATES.values(), ids=STATES)
def test_state(message: Message, state: str) -> None:
    """Catches an incident that is closed while something still fires, or never."""
    assert json.loads(filled("{{ state }}", message)) == state


DIGESTS = {
    "text": ('{"text": {{ text }}}', 50),
    "messages": ("{{ messages }}", 50),
    "document": ("{{ document }}", 50),
    "title": ('{"text": {{ title }}}', 1),
}


@pytest.mark.parametrize(("body", "most"), DIGESTS.values(), ids=DIGESTS)
def test_a_digest_only_where_it_is_told(body: str, most: int) -> None:
    """Law: what is marked as delivered is told, so a template without a list gets no digest."""
    assert most_in_digest(with_body(body)) == most
    if most > 1:
        shown = filled(body, sample("digest", "hook", None))
        assert "nightly / int4: critical, firing" in shown
        assert "nightly / int4: resolved" in shown


def test_the_page_lists_every_variable() -> None:
    """Catches a variable that nobody can know of."""
    section = PAGE.read_text("utf-8").split("## Your own format")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", section, re.MULTILINE)
    assert dict(listed) == VARIABLES
    assert [name for name, _ in listed] == list(VARIABLES)


def test_the_page_s_example_is_valid() -> None:
    """Catches an example that nobody can start from."""
    import tomllib

    section = PAGE.read_text("utf-8").split("## Your own format")[1]
    [toml] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    [endpoint] = tomllib.loads(toml)["endpoints"].values()
    for kind in KINDS:
        assert json.loads(filled(endpoint["body"], sample(kind, "hook", None)))


def test_sent_signed_and_the_same_again(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a template that is signed as another text, loses its id, or drops its headers."""
    headers = (("authorization", Secret("Bearer canary-4711")), ("x-team", "ml"))
    endpoint = with_body(
        "KL: {{ title }} ✓", "text/plain", port=receiver.port, headers=headers
    )  # fmt: skip
    receiver.answer = lambda one: Reply(500 if one.number == 0 else 200)
    lane = lane_to(sqlite_db, endpoint)
    event = tell(sqlite_db)
    lane.drain(5)
    to_next(sqlite_db)
    lane.drain(5)
    first, second = receiver.requests
    assert states(sqlite_db) == ["delivered"]
    assert first.body == second.body == "KL: KL up ✓".encode()
    assert first.id == second.id == event
    assert second.headers["content-type"] == "text/plain; charset=utf-8"
    assert second.headers["authorization"] == "Bearer canary-4711"
    assert second.headers["x-team"] == "ml"
    # It returns what it read as JSON, which this isn't: it is only asked to compare.
    with pytest.raises(json.JSONDecodeError):
        Webhook(SECRET).verify(second.body, second.headers)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(SECRET).verify(second.body + b" ", second.headers)


def test_our_headers_win(sqlite_db: Database, receiver: Receiver) -> None:
    """Catches a header of a configuration in the place of the signature, if a check missed it."""
    headers = (("webhook-id", "forged"), ("content-type", "text/html"))
    endpoint = with_body("{{ title }}", port=receiver.port, headers=headers)
    event = tell(sqlite_db)
    lane_to(sqlite_db, endpoint).drain(5)
    [request] = receiver.requests
    assert (request.id, request.headers["content-type"]) == (event, "application/json")
    assert Webhook(SECRET).verify(request.body, request.headers) == "KL up"


def test_samples_are_the_same_each_time() -> None:
    """Catches a preview that differs from the one that somebody compares it with."""
    for kind in KINDS:
        one = sample(kind, "hook", None)
        assert (one, one.at) == (sample(kind, "hook", None), AT)
