"""`quantwatch endpoints preview`: what would be sent, without sending it and without secrets."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.delivery.loopback import Receiver, tell

from quantwatch.baselines.drift import part_of
from quantwatch.cli import main
from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.config.scopes import matches
from quantwatch.delivery.samples import sample
from quantwatch.store import clock
from quantwatch.store.runs import begin_run
from quantwatch.store.session import Database
from quantwatch.store.told import told_on

CANARY = "canary0T0KEN9secret"
SIGNING = "whsec_Y2FuYXJ5U0lHTklOR3NlY3JldDEyMzQ1Njc4OTA="
CONFIG = """
schema_version = 1
[service]
dashboard_url = "https://watch.example"
[endpoints.own]
url_env = "HOOK"
secret_env = "KEY"
allow_http = true
allow_networks = ["127.0.0.0/8"]
format = "template"
body = '{"text": "{{ title }}", "link": {{ link }}, "value": {{ alert.value }}}'
headers = { X-Team = "ml" }
headers_env = { Authorization = "AUTH" }
[endpoints.duty]
url_env = "HOOK"
secret_env = "ROUTING"
allow_http = true
format = "pagerduty"
[endpoints.ours]
url_env = "HOOK"
secret_env = "KEY"
allow_http = true
[endpoints.many]
url_env = "HOOK"
allow_http = true
format = "apprise"
"""


@pytest.fixture(autouse=True)
def place(
    sqlite_db: Database, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{receiver.port}/services/{CANARY}")
    monkeypatch.setenv("KEY", SIGNING)
    monkeypatch.setenv("ROUTING", f"routing-{CANARY}")
    monkeypatch.setenv("AUTH", f"Bearer {CANARY}")
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", sqlite_db.url)
    (tmp_path / "quantwatch.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def run(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["endpoints", "preview", *words])
        said = capsys.readouterr()
        assert CANARY not in said.out + said.err
        assert SIGNING not in said.out + said.err
        assert receiver.requests == [], "something was sent"
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return call


def test_headers_a_blank_line_and_the_body(run: Any) -> None:
    """Catches a preview that leaves out a header, shows a secret, or another body."""
    code, out, err = run("own")
    head, _, body = out.partition("\n\n")
    assert (code, err) == (0, "")
    headers = dict(line.split(": ", 1) for line in head.splitlines())
    assert headers["authorization"] == headers["webhook-signature"] == "[redacted]"
    assert (headers["x-team"], headers["content-type"]) == ("ml", "application/json")
    assert set(headers) - {"authorization", "x-team"} == {
        *("content-type", "webhook-id", "webhook-timestamp", "webhook-signature")
    }
    document = json.loads(body)
    assert document["text"].startswith("nightly / int4: critical, firing: layer-kl, nonfinite")
    assert document["link"].startswith("https://watch.example/run?run=")
    assert document["value"] == 0.41


@pytest.mark.parametrize("kind", ["firing", "resolved", "digest", "test"])
@pytest.mark.parametrize("name", ["own", "duty", "ours", "many"])
def test_every_kind_in_every_format(run: Any, name: str, kind: str) -> None:
    """Catches a kind of message that nobody can look at before it comes."""
    code, out, _ = run(name, "--event", kind, "--json")
    [shown] = json.loads(out)
    assert code == 0
    assert set(shown) == {"event", "headers", "body"}
    if name == "many":
        assert shown["headers"] == {}
    else:
        document = json.loads(shown["body"])
        assert shown["headers"]["content-type"] == "application/json"
        assert name != "duty" or document["routing_key"] == "[redacted]"
        assert name != "ours" or document["type"] == (
            f"alert.{kind}" if kind in ("firing", "resolved") else kind
        )


def test_whoever_gets_no_digest_is_told_so(run: Any) -> None:
    """Catches a preview of what is never sent."""
    for name in ("own", "duty"):
        assert f"{name} gets no digests" in run(name, "--event", "digest")[2]
    assert run("ours", "--event", "digest")[2] == ""


def add_run(db: Database, run_id: str) -> None:
    with db.reader() as session:
        began = clock.now(session) - timedelta(hours=1)
    begin_run(db, run_id=run_id, check="nightly", config={}, started_at=began)


def test_what_a_run_led_to(run: Any, sqlite_db: Database) -> None:
    """Catches the message of another run, and a second one that is left out."""
    for run_id in ("01RUNA", "01RUNB"):
        add_run(sqlite_db, run_id)
    first = tell(sqlite_db, run="01RUNA", title="one", subject="nightly/a")
    tell(sqlite_db, run="01OTHER", title="other")
    second = tell(sqlite_db, "alert.resolved", run="01RUNA", title="two", subject="nightly/b")
    code, out, _ = run("own", "--run", "01RUNA", "--json")
    assert code == 0
    found = json.loads(out)
    assert [one["event"] for one in found] == [first, second]
    assert [one["headers"]["webhook-id"] for one in found] == [first, second]
    assert [json.loads(one["body"])["text"] for one in found] == ["one", "two"]
    code, out, err = run("own", "--run", "01RUNB")
    assert (code, out) == (2, "")
    assert "Run 01RUNB has no message" in err


def test_what_was_told_on_a_run(db: Database) -> None:
    """Catches a query that one of the databases reads in another way."""
    add_run(db, "01RUNA")
    wanted = [tell(db, run="01RUNA"), tell(db, "alert.resolved", run="01RUNA")]
    tell(db, "endpoint.failing", run="01RUNA")
    tell(db, run="01RUNB")
    assert [one.event_id for one in told_on(db, "01RUNA")] == wanted


WRONG = {
    "endpoint": (["nope"], "no endpoint 'nope'; known: own, duty, ours, many"),
    "event": (["own", "--event", "fire"], "'--event'"),
    "both": (["own", "--event", "test", "--run", "latest"], "give one of them"),
    "run": (["own", "--run", "01GONE"], "There is no run or check '01GONE'."),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line(run: Any, words: list[str], said: str) -> None:
    """Catches a traceback, or an exit code that reads as a regression."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_mistake_in_a_template_is_found_by_validate(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a template that nobody checked before the first alert."""
    file = place / "quantwatch.toml"
    file.write_text(CONFIG.replace("{{ title }}", "{{ titel }}"))
    with pytest.raises(SystemExit) as ended:
        main(["config", "validate"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "endpoints.own.body: unknown: 'titel'; did you mean title? known: " in said


def test_the_sample_speaks_of_what_there_is() -> None:
    """Catches a preview that teaches names of rules, settings and places that don't exist."""
    document = json.loads(sample("firing", "own", None).body)
    rules = {rule.name: rule for rule in DEFAULT_RULES}
    for alert in document["data"]["alerts"]:
        rule = rules[alert["rule"]]
        if alert.get("metric") is not None:
            assert alert["metric"] == rule.metric
            assert matches(rule.scope, alert["scope"])
    for changed in document["data"]["changed"]:
        assert part_of(changed["name"]) == changed["part"]
