"""`quantwatch schedule`: next instants before anything is saved, and pausing."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quantwatch.cli import main
from quantwatch.schedules import Cron, next_three
from quantwatch.store import checks
from quantwatch.store.session import open_database

CONFIG = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = {{ model = "m" }}
candidates = [{{ name = "x", model = "m" }}]
schedule = {{ {nightly}, jitter = "0s" }}
[checks.by-hand]
suite = "core-v1:demo"
reference = {{ model = "m" }}
candidates = [{{ name = "x", model = "m" }}]
"""
NIGHTLY = 'cron = "30 2 * * *", zone = "Europe/Berlin"'


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(
    sqlite_place: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Run:
    """Call `quantwatch` in a folder with a file and a database."""
    (tmp_path / "quantwatch.toml").write_text(CONFIG.format(nightly=NIGHTLY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", sqlite_place.db.url)

    def call(*words: str) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capfd.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return call


def row(run: Run) -> dict[str, Any]:
    """The one schedule of the list."""
    (found,) = json.loads(run("schedule", "list", "--json").out)
    return dict(found)


def test_next_three_before_anything_is_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """X1: the next three instants are shown in the zone and in UTC without any database."""
    missing = tmp_path / "none.db"
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", f"sqlite:///{missing}")
    expected = next_three(Cron("30 2 * * *", "Europe/Berlin"), datetime.now(UTC))
    found = row(run)
    assert (found["check"], found["schedule"], found["zone"]) == (
        "nightly",
        "30 2 * * *",
        "Europe/Berlin",
    )
    assert found["state"] == "not applied"
    assert [at["utc"] for at in found["next"]] == [f"{at:%Y-%m-%dT%H:%M:%SZ}" for at in expected]
    assert all(" 02:30 CE" in at["local"] for at in found["next"])
    text = run("schedule", "list").out
    assert all(at["local"] in text and at["utc"] in text for at in found["next"])
    assert "by-hand" not in text
    assert not missing.exists()


def test_states(run: Run, sqlite_place: Any, tmp_path: Path) -> None:
    """Catches a list that says all is well while the service does something else."""
    assert row(run)["state"] == "not applied"
    berlin = {"cron": "30 2 * * *", "zone": "Europe/Berlin"}
    sqlite_place.apply(nightly=berlin)
    assert row(run)["state"] == "scheduled"
    (tmp_path / "quantwatch.toml").write_text(CONFIG.format(nightly='cron = "0 3 * * *"'))
    assert row(run)["state"] == "changed, not applied"
    sqlite_place.change_schedule(trouble="no such zone")
    assert (row(run)["state"], row(run)["reason"]) == ("in trouble", "no such zone")
    (tmp_path / "quantwatch.toml").write_text("schema_version = 1\n")
    sqlite_place.apply(nightly={**berlin, "grace": "1h"})
    found = row(run)
    assert (found["state"], found["schedule"], found["grace_s"]) == (
        "not in the file",
        "30 2 * * *",
        3600,
    )
    sqlite_place.change_schedule(settings={"cron": "0 0 2 * * *"})
    broken = row(run)
    assert (broken["next"], broken["zone"]) == ([], None)
    assert "has 6 fields" in broken["reason"]
    assert run("schedule", "list").code == 0


def test_pause_and_resume(run: Run) -> None:
    """F8: the pause, its author and its reason are seen by everybody who asks."""
    assert run("schedule", "pause", "nightly", "--reason", "new weights").out == "nightly: paused\n"
    assert (
        run("schedule", "pause", "nightly", "--reason", "x").out == "nightly: was paused already\n"
    )
    found = row(run)
    assert found["state"] == "paused"
    assert found["reason"].endswith(": new weights")
    assert "new weights" in run("schedule", "show", "nightly").out
    assert run("schedule", "resume", "nightly").out == "nightly: resumed\n"
    assert run("schedule", "resume", "nightly").out == "nightly: was not paused\n"


def test_a_check_of_the_database_alone_is_known(run: Run, sqlite_place: Any) -> None:
    """Catches a check that can't be paused where its file isn't."""
    sqlite_place.apply(elsewhere={"every": "6h"})
    assert run("schedule", "pause", "elsewhere", "--reason", "x").code == 0
    database = open_database(sqlite_place.db.url)
    with database.reader() as session:
        assert list(checks.pauses(session)) == ["elsewhere"]
    database.close()
    shown = json.loads(run("schedule", "show", "elsewhere", "--json").out)
    assert (shown["schedule"], shown["state"], len(shown["next"])) == ("every 6h", "paused", 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "by-hand"], "check 'by-hand' has no schedule; checks with one: nightly"),
        (["show", "nope"], "check 'nope' has no schedule"),
        (
            ["pause", "nope", "--reason", "x"],
            "no check 'nope' in the file or the database; there are: ",
        ),
        (["resume", "nope"], "no check 'nope' in the file or the database; there are: "),
        (["pause", "nightly", "--reason", " "], "is not paused without a reason"),
    ],
)
def test_mistakes(words: list[str], message: str, run: Run) -> None:
    """Catches a typing error that pauses nothing and says nothing."""
    code, _, err = run("schedule", *words)
    assert code == 2
    assert message in err
