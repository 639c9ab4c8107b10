"""`check run --queue`, `check release`, `runs cancel`: asking for runs and stopping them."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantwatch.domain import RunEvent, RunResult, RunStatus, Suite
from quantwatch.store import clock, endings, leases
from quantwatch.store.attempts import Failure, WorkerId
from quantwatch.store.runs import finish_run, list_runs
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import CheckRow

CONFIG = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = { model = "smollm2-135m" }
candidates = [{ name = "int8", model = "smollm2-135m", recipe = "int8-channel" }]
schedule = { cron = "0 2 * * *", attempts = 2 }
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Command:
    """Call `quantwatch` in an empty folder with one check; return exit code, stdout, stderr."""
    from quantwatch.cli import main

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", f"sqlite:///{tmp_path / 'q.db'}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quantwatch.toml").write_text(CONFIG)

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def opened(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    database = open_database(f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'q.db')}")
    yield database
    database.close()


def claim_next(database: Database) -> leases.Claim:
    with database.writer() as session:
        claim = leases.claim(session, WorkerId("w", "here", 1), ["cpu"])
    assert claim is not None
    return claim


def test_queueing_prints_the_id(command: Command, opened: Database) -> None:
    """Catches a command that measures here, or that gives nothing to hold on to (X7)."""
    code, out, _ = command("check", "run", "nightly", "--queue", "--limit", "3")
    (run,) = list_runs(opened)

    assert (code, out) == (0, f"{run.run_id}\n")
    assert run.status is RunStatus.QUEUED
    claim = claim_next(opened)
    assert claim.config["suite"]["limit"] == 3
    assert (claim.max_attempts, claim.base_dir) == (2, str(Path.cwd()))


def test_a_key_queues_once(command: Command, opened: Database) -> None:
    """Catches a CI job that is retried and measures twice."""
    words = ("check", "run", "nightly", "--queue", "--key", "build-4711", "--json")
    first, again = json.loads(command(*words)[1]), json.loads(command(*words)[1])

    assert (first["is_new"], again["is_new"]) == (True, False)
    assert first["run_id"] == again["run_id"]
    code, _, err = command(*words[:-1], "--limit", "2")
    assert (code, "another request" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--key", "build-4711"], "belong to --queue"),
        (["--wait"], "belong to --queue"),
        (["--queue", "--no-store"], "for a run here"),
        (["--queue", "--yes"], "for a run here"),
        (["--queue", "--format", "md"], "need --wait"),
        (["--queue", "--key", "short"], "8 to 255 printable ASCII"),
    ],
)
def test_options_that_contradict_each_other(
    command: Command, opened: Database, words: list[str], said: str
) -> None:
    """Catches an option that is silently ignored."""
    code, _, err = command("check", "run", "nightly", *words)
    assert code == 2
    assert said in err
    assert list_runs(opened) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("succeeds", "expected"),
    [pytest.param(True, 1, id="regression"), pytest.param(False, 3, id="failed")],
)
def test_waiting_ends_with_the_verdict(
    command: Command,
    opened: Database,
    make_result: Callable[..., RunResult],
    suite: Suite,
    *,
    succeeds: bool,
    expected: int,
) -> None:
    """Catches a CI job that passes because its run failed, or is still running (X34)."""

    def work() -> None:
        while not list_runs(opened):
            threading.Event().wait(0.02)
        claim = claim_next(opened)
        if not succeeds:
            endings.fail(
                opened, claim, Failure("weights_missing", "weights are gone", "ModelError")
            )
            return
        for event in ("prepare", "measure", "finalize"):
            leases.advance(opened, claim, RunEvent(event))
        finish_run(opened, make_result(run_id=claim.run_id), suite, (), lease=claim.token)

    service = threading.Thread(target=work)
    service.start()
    code, out, err = command("check", "run", "nightly", "--queue", "--wait")
    service.join()

    assert code == expected
    assert "queued: " in err
    assert ("weights are gone" in out) is not succeeds


def test_cancelling_a_waiting_run(command: Command, opened: Database) -> None:
    """Catches a run that can't be stopped, and one that was stopped without a name (X13)."""
    run_id = command("check", "run", "nightly", "--queue")[1].strip()
    code, out, _ = command("runs", "cancel", run_id[:20], "--reason", "wrong model")

    assert (code, out) == (0, f"{run_id}: cancelled\n")
    (run,) = list_runs(opened)
    assert run.reason is not None
    assert run.reason.startswith("cancelled by ")
    assert run.reason.endswith(": wrong model")
    code, _, err = command("runs", "cancel", run_id, "--reason", "again")
    assert (code, "cancelled already" in err) == (2, True)


def test_cancelling_an_active_run(command: Command, opened: Database) -> None:
    command("check", "run", "nightly", "--queue")
    claim = claim_next(opened)
    assert command("runs", "cancel", claim.run_id, "--reason", "x")[:2] == (
        0,
        f"{claim.run_id}: stops soon\n",
    )
    assert leases.standing(opened, claim).cancelled_for_s is not None


def test_a_check_is_released_from_quarantine(command: Command, opened: Database) -> None:
    """Catches a quarantine that nobody can end, and one that isn't told of."""
    with opened.writer() as session:
        session.add(CheckRow(name="nightly", quarantined_at=clock.now(session)))
    code, _, err = command("check", "run", "nightly", "--queue")
    assert (code, "check release nightly" in err) == (2, True)
    assert command("check", "release", "nightly")[:2] == (0, "nightly: may run again\n")
    assert command("check", "run", "nightly", "--queue")[0] == 0
