"""runs, report, baseline and db on a real SQLite database."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quantwatch.cli.actor import who

Run = Callable[..., Any]


@pytest.fixture
def stored(run: Run, fake: Any, make: Any) -> list[str]:
    """Two runs of `nightly`: one passes, then one with a fault. Ids, oldest first."""
    run("check", "run", "nightly")
    fake.candidates = (make.candidate(), make.faulty())
    fake.changes = {"alerts": (make.alert(),)}
    run("check", "run", "nightly")
    rows = json.loads(run("runs", "list", "--json").out)
    return [row["run_id"] for row in reversed(rows)]


def test_runs_list(run: Run, stored: list[str]) -> None:
    """Newest first, with status and verdict apart."""
    rows = json.loads(run("runs", "list", "--json", "--limit", "1").out)
    assert [row["run_id"] for row in rows] == stored[1:]
    assert (rows[0]["status"], rows[0]["verdict"]) == ("succeeded", "regression")
    table = run("runs", "list", "--check", "nightly").out
    assert all(run_id in table for run_id in stored)
    assert "int8 pass, int8-fault regression" in table


def test_runs_show_is_the_document_of_the_run(run: Run, stored: list[str]) -> None:
    """What is stored must come back as it was printed, down to the last digit."""
    shown = json.loads(run("runs", "show", stored[1], "--json").out)
    reported = json.loads(run("report", stored[1], "--format", "json").out)
    assert shown == reported
    assert shown["candidates"][1]["culprit"] == "layers.2.mlp.down_proj"
    assert shown["alerts"][0]["value"] == 0.048


@pytest.mark.parametrize("name", ["latest", "nightly"])
def test_a_run_can_be_named(run: Run, stored: list[str], name: str) -> None:
    """`latest` and a check's name mean the newest run."""
    assert stored[1] in run("runs", "show", name).out


def test_unknown_run_names_those_that_exist(run: Run, stored: list[str]) -> None:
    """A wrong id is exit 2 and shows the ids there are."""
    outcome = run("runs", "show", "zzz")
    assert outcome.code == 2
    assert stored[1] in outcome.err


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ((), "# REGRESSION"),
        (("--format", "md"), "# REGRESSION"),
        (("--format", "html"), "<!DOCTYPE html>"),
        (("--format", "junit"), "<?xml"),
        (("--format", "json"), "{"),
    ],
    ids=["default", "md", "html", "junit", "json"],
)
def test_report_formats(run: Run, stored: list[str], words: tuple[str, ...], start: str) -> None:
    """Reading a report of a regression is no failure: exit 0."""
    outcome = run("report", "latest", *words)
    assert outcome.code == 0
    assert outcome.out.startswith(start)


def test_report_to_a_file(run: Run, stored: list[str], place: Path) -> None:
    """The format follows the suffix; stdout stays empty."""
    outcome = run("report", stored[0], "--output", "r.xml")
    assert outcome.out == ""
    assert (place / "r.xml").read_text().startswith("<?xml")


def test_runs_diff(run: Run, stored: list[str]) -> None:
    """Side by side, with the change; a candidate that only one run has is shown, not dropped."""
    rows = json.loads(run("runs", "diff", *stored, "--json").out)["rows"]
    found = {(row["candidate"], row["figure"]): row for row in rows}
    kl = found["int8", "logit_kl.mean"]
    assert (kl["before"], kl["after"], kl["change"]) == (0.01, 0.01, 0.0)
    new = found["int8-fault", "verdict"]
    assert (new["before"], new["after"]) == (None, "regression")
    assert found["int8-fault", "logit_kl.mean"]["before"] is None
    table = run("runs", "diff", *stored).out
    assert "layers.2.mlp.down_proj" in table


def test_runs_diff_refuses_what_measured_something_else(
    run: Run, fake: Any, stored: list[str]
) -> None:
    """Other prompts are no regression: exit 4 naming the digest."""
    fake.changes = {"suite_hash": "f" * 64, "capture_sha": "0" * 64}
    run("check", "run", "nightly")
    outcome = run("runs", "diff", stored[0], "latest")
    assert outcome.code == 4
    assert "suite hash" in outcome.err
    assert "capture_sha" in outcome.err


def test_baseline_pin_show_unpin(run: Run, stored: list[str]) -> None:
    """Pin by run; the check follows from the run. `show` says since when and by whom."""
    assert run("baseline", "pin", stored[0]).out == f"nightly: baseline is {stored[0]}\n"
    shown = json.loads(run("baseline", "show", "--json").out)["nightly"]
    assert (shown["kind"], shown["run"]) == ("pinned", stored[0])
    assert shown["since"]
    assert shown["by"]
    assert shown["by"] in run("baseline", "show").out
    assert run("baseline", "unpin", "nightly").code == 0
    nothing = {"kind": "pinned", "run": None, "since": None, "by": None}
    assert json.loads(run("baseline", "show", "--json").out) == {"nightly": nothing}
    assert run("baseline", "unpin", "nightly").code == 2


def test_baseline_export_and_import(run: Run, stored: list[str], place: Path) -> None:
    """A run goes through a file into another database unchanged, and is pinned there."""
    run("baseline", "export", stored[1], "base.json")
    before = run("report", stored[1], "--format", "json").out
    other = ("--database", f"sqlite:///{place}/other.db")
    for _ in range(2):
        assert run(*other, "baseline", "import", "base.json").code == 0
    assert run(*other, "report", stored[1], "--format", "json").out == before
    assert json.loads(run(*other, "baseline", "show", "--json").out)["nightly"]["run"] == stored[1]


def test_db_upgrade_check_backup(run: Run, place: Path) -> None:
    """`db check` fails until `db upgrade`; a backup is a database that opens."""
    database = ("--database", f"sqlite:///{place}/new.db")
    outcome = run(*database, "db", "check")
    assert outcome.code == 3
    assert f"run: quantwatch --database sqlite:///{place}/new.db db upgrade" in outcome.err
    assert run(*database, "db", "upgrade").code == 0
    assert run(*database, "db", "check").code == 0
    assert run(*database, "db", "backup", "copy.db").code == 0
    with sqlite3.connect(place / "copy.db") as copy:
        assert copy.execute("select count(*) from run").fetchone() == (0,)
    copy.close()
    assert run(*database, "db", "backup", "copy.db").code == 2


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("mysql://host/db", 2),
        ("nonsense", 2),
        ("sqlite:////nowhere/at/all.db", 2),
        ("sqlite:///junk.db", 2),
        ("sqlite:///foreign.db", 2),
        ("sqlite:///broken.db", 3),
        ("postgresql://127.0.0.1:1/db", 3),
    ],
)
def test_wrong_database(run: Run, fake: Any, place: Path, url: str, code: int) -> None:
    """A name for no database is the user's, a database that fails the monitor's trouble."""
    (place / "junk.db").write_text("not a database, but long enough for a header")
    with closing(sqlite3.connect(place / "foreign.db")) as other:
        other.execute("create table customers (id integer)")
    (place / "broken.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    outcome = run("--database", url, "check", "run", "nightly")
    assert (outcome.code, fake.requests) == (code, [])
    assert outcome.err.splitlines()[-1].startswith("error: ")


def test_a_password_is_never_printed(run: Run) -> None:
    """Error messages end in CI logs that others read."""
    url = "postgresql://user:hunter2@127.0.0.1:1/db"
    for words in (("db", "check"), ("doctor",), ("runs", "list"), ("--debug", "db", "upgrade")):
        outcome = run("--database", url, *words)
        assert outcome.code == 3
        assert "hunter2" not in outcome.out + outcome.err


def test_reading_without_a_database(run: Run) -> None:
    """Reading creates nothing; the line names the command that does."""
    outcome = run("runs", "list")
    assert outcome.code == 2
    assert "run `quantwatch db upgrade`" in outcome.err


@pytest.mark.parametrize("words", [("runs", "list"), ("doctor", "--preflight"), ("db", "check")])
def test_the_hint_is_of_the_database_that_was_named(run: Run, words: tuple[str, ...]) -> None:
    """Catches advice that, followed, makes another database than the one that was asked for."""
    outcome = run("--database", "sqlite:///own one.db", *words)
    said = "quantwatch --database 'sqlite:///own one.db' db upgrade"
    assert said in " ".join((outcome.out + outcome.err).split())


def test_runs_of_a_check_that_is_not(run: Run, stored: list[str]) -> None:
    """Catches an empty table for a typo: there may be a hundred runs of the right name."""
    outcome = run("runs", "list", "--check", "nightyl")
    assert outcome.code == 2
    assert "There is no check 'nightyl'. Did you mean nightly? Checks: nightly." in outcome.err
    assert run("runs", "list", "--check", "nightly").code == 0


@pytest.mark.parametrize(
    "words", [("report", "x", "--format", "pdf"), ("endpoints", "preview", "x", "--event", "foo")]
)
def test_choices_without_a_library_s_prefix(run: Run, words: tuple[str, ...]) -> None:
    """Catches words of a library that say nothing to a user."""
    outcome = run(*words)
    assert (outcome.code, "Value error" in outcome.err) == (2, False)


def test_one_is_not_many(run: Run) -> None:
    """Catches "1 checks"."""
    assert run("check", "validate").out.endswith(": 1 check is valid\n")
    assert ": 1 check, 0 endpoints are valid" in run("config", "validate").out


def test_read_only_database_refuses_a_run(
    run: Run, stored: list[str], place: Path, fake: Any
) -> None:
    """mode=ro: the run is refused with one line before hours are spent; reading still works."""
    (file,) = place.rglob("*.db")
    url = f"sqlite:///file:{file}?mode=ro&uri=true"
    assert run("--database", url, "runs", "list").code == 0
    outcome = run("--database", url, "check", "run", "nightly")
    assert outcome.code == 3
    assert "read-only" in outcome.err


def test_a_suffix_that_promises_another_format_is_told(run: Run, stored: list[str]) -> None:
    """Catches Markdown in out.html, unsaid."""
    assert (
        "out.html gets md" in run("report", "latest", "--output", "out.html", "--format", "md").err
    )
    assert "gets" not in run("report", "latest", "--output", "out.md", "--format", "md").err
    assert "gets" not in run("report", "latest", "--output", "out.txt", "--format", "md").err


def test_pinning_a_regression_is_told(run: Run, stored: list[str]) -> None:
    """Catches a fault that becomes what later runs are compared with, unsaid."""
    assert "that run is a regression" in run("baseline", "pin", stored[1]).err
    assert "regression" not in run("baseline", "pin", stored[0]).err


def test_every_change_names_who_and_where(run: Run, stored: list[str]) -> None:
    """Catches two names of one person in the audit log."""
    run("baseline", "pin", stored[0])
    pinned = json.loads(run("baseline", "show", "--json").out)["nightly"]
    assert pinned["by"] == who()
