"""`quantwatch alerts` as it is typed, on a real database."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from quantwatch.cli import main
from quantwatch.domain import RuleOutcome
from quantwatch.store.tables import AuditRow

Say = Callable[..., RuleOutcome]
Service = Any

CONFIG = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = { model = "smollm2-135m" }
candidates = [{ name = "int8", model = "smollm2-135m" }]
alerting = { confirm = false }
[endpoints.ops]
url = "https://ops.example/hook"
"""


@pytest.fixture
def typed(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; return exit code, stdout, stderr."""
    file = tmp_path / "quantwatch.toml"
    file.write_text(CONFIG)

    def run(*words: str) -> tuple[int, str, str]:
        arguments = ["--config", str(file), "--database", service.db.url, "alerts", *words]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def audited(service: Service) -> list[tuple[str, str]]:
    with service.db.reader() as session:
        rows = session.execute(select(AuditRow.action, AuditRow.subject).order_by(AuditRow.id))
        return [(action, subject) for action, subject in rows]


def test_an_alert_from_the_list_to_its_end(service: Service, say: Say, typed: Any) -> None:
    """Catches a command that changes nothing, tells nobody, or leaves no trace."""
    run_id = service.run(say("breach"))
    [row] = json.loads(typed("list", "--json")[1])
    number = str(row["id"])
    assert (row["rule"], row["state"], row["value"], row["first_run"]) == (
        "layer-kl", "firing", 0.2, run_id,
    )  # fmt: skip
    assert row["told"] == ["ops", "pager"]
    assert typed("ack", number, "--comment", "looking") == (
        0, f"alert {number}: nightly int8 layer-kl is acknowledged\n", "",
    )  # fmt: skip
    assert "acknowledged by" in typed("list")[1]
    assert typed("close", number, "--reason", "as expected")[0] == 0
    assert json.loads(typed("list", "--json")[1]) == []
    assert json.loads(typed("list", "--all", "--json")[1])[0]["state"] == "inactive"
    assert service.heard() == [("alert.firing", "first"), ("alert.resolved", "resolved_all")]
    assert audited(service) == [("acknowledge", f"alert {number}"), ("close", f"alert {number}")]


def test_a_silence_from_its_beginning_to_its_end(service: Service, say: Say, typed: Any) -> None:
    """Catches a silence that can't be found again, or that nobody signed."""
    code, out, _ = typed("silence", "--rule", "layer-*", "--for", "2h", "--comment", "new driver")
    assert (code, out[:11]) == (0, "silence 1: ")
    [row] = json.loads(typed("silences", "--json")[1])
    assert (row["matcher"], row["comment"]) == ({"rule": "layer-*"}, "new driver")
    assert re.fullmatch(r".+@.+", row["author"])
    assert "rule=layer-*" in typed("silences")[1]
    service.run(say("breach"))
    assert json.loads(typed("list", "--json")[1])[0]["silenced_by"] == 1
    assert service.heard() == []
    assert typed("unsilence", "1") == (0, "silence 1: ended\n", "")
    assert json.loads(typed("silences", "--json")[1]) == []
    service.watch(timedelta())
    assert service.heard() == [("alert.firing", "silence_expired")]
    assert audited(service) == [("silence", "silence 1"), ("unsilence", "silence 1")]


WRONG = [
    (["ack", "99", "--comment", "x"], "there is no alert 99"),
    (["close", "99", "--reason", "x"], "there is no alert 99"),
    (["unsilence", "7"], "no silence 7 holds now; those that do: none"),
    (["silence", "--for", "2h", "--comment", "x"], "a silence needs at least one of --check"),
    (["silence", "--rule", "*", "--for", "2", "--comment", "x"], "--for: '2' is no length of time"),
    (["silence", "--rule", "*", "--for", "0h", "--comment", "x"], "must be longer than nothing"),
]


@pytest.mark.parametrize(("words", "line"), WRONG, ids=[" ".join(words[:3]) for words, _ in WRONG])
def test_what_is_wrong_is_said_in_one_line(
    service: Service, typed: Any, words: list[str], line: str
) -> None:
    """Catches a traceback, and a wrong word that is taken."""
    code, out, err = typed(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err


def test_only_what_fires_is_acknowledged(service: Service, say: Say, typed: Any) -> None:
    """Catches an acknowledgement that hides an alert before it fires."""
    service.run(say("breach", enter_runs=2))
    number = str(service.alert().id)
    code, _, err = typed("ack", number, "--comment", "x")
    assert (code, err) == (
        2,
        f"error: alert {number} is pending; only one that fires is acknowledged\n",
    )


def test_an_episode_that_is_over_is_not_acknowledged(
    service: Service, say: Say, typed: Any
) -> None:
    """Catches an acknowledgement of what nobody has looked at yet, which ends its reminders."""
    service.run(say("breach"))
    [seen] = json.loads(typed("list", "--json")[1])
    number = str(seen["id"])
    service.run(say("clear", leave_runs=1))
    service.run(say("breach"))
    [now] = json.loads(typed("list", "--json")[1])
    assert now["episode"] != seen["episode"]
    code, _, err = typed("ack", number, "--comment", "x", "--episode", seen["episode"])
    assert code == 2
    assert "is over and another one is open" in err
    assert json.loads(typed("list", "--json")[1])[0]["acked_by"] is None
    assert typed("ack", number, "--comment", "x", "--episode", now["episode"])[0] == 0
    assert json.loads(typed("list", "--json")[1])[0]["acked_by"] is not None


def test_the_list_shows_what_flaps_as_the_check_was_applied(
    service: Service, say: Say, typed: Any
) -> None:
    """Catches a list that counts by another rule than the messages."""
    for _ in range(2):
        service.run(say("breach"))
        service.run(say("clear", leave_runs=1))
    assert [row["flapping"] for row in json.loads(typed("list", "--all", "--json")[1])] == [
        False, False, False,
    ]  # fmt: skip
    service.alerting = {"confirm": False, "flapping": {"firings": 1}}
    service.change_check(config_sha="sha")
    service.apply()
    rows = json.loads(typed("list", "--all", "--json")[1])
    assert {row["rule"]: row["flapping"] for row in rows} == {
        "dead-man": False, "health": False, "layer-kl": True,
    }  # fmt: skip
