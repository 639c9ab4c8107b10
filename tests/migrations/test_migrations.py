"""The schema, as the migrations build it, on both databases."""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from subprocess import PIPE

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, event, inspect, text
from sqlalchemy.orm import Session

from quantwatch.errors import StoreError
from quantwatch.store import upgrade as upgrades
from quantwatch.store import urls
from quantwatch.store.schema import REVISIONS
from quantwatch.store.session import open_database
from quantwatch.store.tables import Base
from quantwatch.store.upgrade import migrate, migrations_folder, schema_state, upgrade


def _tables(url: str) -> set[str]:
    database = open_database(url, check_schema=False)
    with database.reader() as session:
        names = set(inspect(session.connection()).get_table_names())
    database.close()
    return names - {"alembic_version"}


def test_empty_to_head_to_base_to_head(database_url: str) -> None:
    """Catches a downgrade that leaves tables, and a schema that can't be built twice."""
    assert schema_state(database_url) == "empty"
    upgrade(database_url)
    assert schema_state(database_url) == "current"
    assert _tables(database_url) == set(Base.metadata.tables)
    migrate(database_url, "base")
    assert schema_state(database_url) == "empty"
    assert _tables(database_url) == set()
    upgrade(database_url)
    assert _tables(database_url) == set(Base.metadata.tables)


def test_constraints_agree_too(database_url: str) -> None:
    """Catches what autogenerate does not compare: checks, cascades, names that can't be dropped."""
    upgrade(database_url)
    database = open_database(database_url)
    with database.reader() as session:
        found = inspect(session.connection())
        for name, table in Base.metadata.tables.items():
            expected = {str(c.name) for c in table.constraints}
            assert {
                *(str(c["name"]) for c in found.get_check_constraints(name)),
                *(str(c["name"]) for c in found.get_unique_constraints(name)),
                *(str(c["name"]) for c in found.get_foreign_keys(name)),
                str(found.get_pk_constraint(name)["name"]),
            } == expected
            cascades = {
                key["name"]: key["options"].get("ondelete") for key in found.get_foreign_keys(name)
            }
            assert cascades == {key.name: key.ondelete for key in table.foreign_key_constraints}
    database.close()


def test_an_upgrade_of_a_current_schema_changes_nothing(database_url: str) -> None:
    """Catches an upgrade at every start that waits for a lock although nothing is to do."""
    upgrade(database_url)
    database = open_database(database_url)
    with database.writer() as session:
        session.execute(text("INSERT INTO metric (slug) VALUES ('kept')"))
        upgrade(database_url, wait_s=1)
    with database.reader() as session:
        assert session.scalar(text("SELECT slug FROM metric")) == "kept"
    database.close()


_UPGRADE = """
import sys
from quantwatch.store.session import open_database
from quantwatch.store.upgrade import upgrade
print("ready", flush=True)
sys.stdin.readline()
upgrade(sys.argv[1])
open_database(sys.argv[1]).close()
"""


@pytest.mark.slow
def test_four_processes_upgrade_at_once(database_url: str) -> None:
    """Catches DuplicateTable and "database is locked" when replicas start together (B32)."""
    command = [sys.executable, "-c", _UPGRADE, database_url]
    workers = [
        subprocess.Popen(command, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE) for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert errors == ["", "", "", ""]
    assert [worker.returncode for worker in workers] == [0, 0, 0, 0]
    assert schema_state(database_url) == "current"
    assert _tables(database_url) == set(Base.metadata.tables)


def test_a_failed_migration_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches half a schema, which neither the old nor the new program understands."""
    real = upgrades.alembic_config

    def fail(*_: object) -> None:
        raise StoreError("power cut")

    monkeypatch.setattr(upgrades, "_check_foreign_keys", fail)
    with pytest.raises(StoreError, match="power cut"):
        upgrade(database_url)
    monkeypatch.undo()
    assert upgrades.alembic_config is real
    assert _tables(database_url) == set()
    upgrade(database_url)
    assert schema_state(database_url) == "current"


def test_the_program_knows_every_revision() -> None:
    """Catches a new migration that `schema.REVISIONS` forgets: databases would look ahead."""
    script = ScriptDirectory(str(migrations_folder()))
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == REVISIONS
    assert script.get_heads() == [REVISIONS[-1]]


def test_migrations_of_a_wheel_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an installed program that can't create its tables."""
    import quantwatch

    package = tmp_path / "site" / "quantwatch"
    package.mkdir(parents=True)
    source = migrations_folder()
    monkeypatch.setattr(quantwatch, "__file__", str(package / "__init__.py"))
    with pytest.raises(StoreError, match="migrations are missing"):
        migrations_folder()
    shutil.copytree(source, package / "_migrations")
    assert migrations_folder() == package / "_migrations"
    url = f"sqlite:///{tmp_path / 'wheel.db'}"
    upgrade(url)
    assert schema_state(url) == "current"


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    """Catches a mistyped path that becomes a new, empty database."""
    with pytest.raises(StoreError, match=r"folder .*typo does not exist"):
        upgrade(f"sqlite:///{tmp_path}/typo/quantwatch.db")
    assert not (tmp_path / "typo").exists()


def test_the_default_folder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a first start that fails because nobody made the data folder."""
    folder = tmp_path / "share" / "quantwatch"
    monkeypatch.setattr(urls, "user_data_path", lambda *_, **__: folder)
    upgrade(f"sqlite:///{folder}/quantwatch.db")
    assert (folder / "quantwatch.db").is_file()


def test_a_new_sqlite_file_keeps_a_log(tmp_path: Path) -> None:
    """Catches a database in which a page waits for the writer."""
    url = f"sqlite:///{tmp_path / 'new.db'}"
    upgrade(url)
    database = open_database(url)
    with database.reader() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA synchronous")) == 1
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 10_000
    database.close()


def test_a_read_only_database_is_not_upgraded(tmp_path: Path) -> None:
    """Catches a dashboard that creates tables."""
    with pytest.raises(StoreError, match="opened read-only; it can't be upgraded"):
        upgrade(f"sqlite:///{tmp_path / 'some.db'}?mode=ro")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_default_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback on a home folder that can't be written to."""
    (tmp_path / "share").write_text("a file, not a folder")
    folder = tmp_path / "share" / "quantwatch"
    monkeypatch.setattr(urls, "user_data_path", lambda *_, **__: folder)
    with pytest.raises(StoreError, match=r"can't be created: .*share"):
        upgrade(f"sqlite:///{folder}/quantwatch.db")


def test_rows_that_refer_to_nothing_stop_a_migration(tmp_path: Path) -> None:
    """Catches a rebuilt table that loses rows: keys are not enforced while SQLite migrates."""
    path = tmp_path / "orphans.db"
    upgrade(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO latest_run (check_id, run_id) VALUES (1, 'gone')")
    with pytest.raises(StoreError, match="of table latest_run would refer to nothing"):
        migrate(f"sqlite:///{path}", "head")


def _insert(session: Session, table: str, **values: object) -> None:
    """Write a row of an older schema; whatever else it needs is filled in by its type."""
    for column in inspect(session.connection()).get_columns(table):
        if column["nullable"] or column["default"] is not None or column["name"] in values:
            continue
        kind = column["type"].python_type
        now = datetime(2026, 11, 29, tzinfo=UTC)
        values[column["name"]] = now if kind is datetime else "{}" if kind is str else kind(0)
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    session.execute(text(f'INSERT INTO "{table}" ({names}) VALUES ({marks})'), values)


def test_judgements_of_before_are_the_first_version(database_url: str) -> None:
    """Catches a rebuilt table that loses evaluations, and a second judgement that has no room."""
    migrate(database_url, "0003")
    database = open_database(database_url, check_schema=False)
    with database.writer() as session:
        _insert(session, "check", id=1, name="nightly")
        _insert(session, "run", id="r", check_id=1, status="failed")
        _insert(session, "alert", id=1, check_id=1)
        _insert(session, "rule_evaluation", alert_id=1, run_id="r", outcome="breach")
    database.close()
    upgrade(database_url)
    database = open_database(database_url)
    rows = text("SELECT outcome, eval_version FROM rule_evaluation ORDER BY eval_version")
    with database.writer() as session:
        assert session.scalar(text("SELECT breach_window FROM alert")) == 0
        _insert(session, "rule_evaluation", alert_id=1, run_id="r", outcome="clear", eval_version=2)
        assert [tuple(row) for row in session.execute(rows)] == [("breach", 1), ("clear", 2)]
        session.execute(text("DELETE FROM run"))
        assert session.execute(rows).all() == [], "the evaluations of a deleted run go with it"
    database.close()


NEWEST = "SELECT check_id, run_id FROM recent_point ORDER BY check_id, run_id"
SINCE = "SELECT check_id, verdict_since FROM latest_run ORDER BY check_id"


def _end_run(session: Session, check: int, number: int, verdict: str) -> None:
    """Write an ended run as a program of before the migration does."""
    at = datetime(2026, 11, number, tzinfo=UTC)
    name = f"{check}-{number:02}"
    _insert(session, "run", id=name, check_id=check, status="succeeded", verdict=verdict, slot_key=name,
            started_at=at)  # fmt: skip
    point = "INSERT INTO latest_run (check_id, run_id, succeeded_run_id) VALUES (:check, :id, :id)"
    session.execute(text("DELETE FROM latest_run WHERE check_id = :id"), {"id": check})
    session.execute(text(point), {"check": check, "id": name})


def _two_checks(url: str) -> None:
    migrate(url, "0006")
    database = open_database(url, check_schema=False)
    with database.writer() as session:
        for check in (1, 2):
            _insert(session, "check", id=check, name=f"check-{check}")
            for number, verdict in enumerate(("pass", "warn", "warn"), start=1):
                _end_run(session, check, number, verdict)
    database.close()


def _rows(url: str, words: str) -> list[tuple[object, ...]]:
    database = open_database(url)
    with database.reader() as session:
        found = [tuple(row) for row in session.execute(text(words))]
    database.close()
    return [(row[0], str(row[1])[:10]) for row in found]


def test_points_of_old_runs_are_written(database_url: str) -> None:
    """Catches an upgraded overview that knows no run of before, or a streak of other verdicts."""
    _two_checks(database_url)
    upgrade(database_url)

    assert _rows(database_url, NEWEST) == [
        (check, f"{check}-{number:02}") for check in (1, 2) for number in (1, 2, 3)
    ]
    assert _rows(database_url, SINCE) == [(1, "2026-11-02"), (2, "2026-11-02")]


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_runs_end_while_points_are_written(database_url: str) -> None:
    """Catches workers that wait for minutes, and a run of meanwhile that the overview never has."""
    _two_checks(database_url)
    service = open_database(database_url, check_schema=False)
    written: list[str] = []

    def work(_connection: object, _cursor: object, words: str, *_: object) -> None:
        slow = words.lstrip().startswith(("INSERT INTO recent_point", "WITH told"))
        if not slow or words in written or len(written) == 2:
            return
        written.append(words)
        number = 3 + len(written)
        with service.writer() as session:
            session.execute(text("SET LOCAL lock_timeout = '2s'"))
            _end_run(session, 2, number, "pass")
            session.execute(text("DELETE FROM run WHERE id = '1-01'"))

    event.listen(Engine, "after_cursor_execute", work)
    try:
        upgrade(database_url)
    finally:
        event.remove(Engine, "after_cursor_execute", work)
        service.close()

    assert len(written) == 2
    assert _rows(database_url, NEWEST) == [
        *((1, f"1-{number:02}") for number in (2, 3)),
        *((2, f"2-{number:02}") for number in (1, 2, 3, 4, 5)),
    ]
    assert _rows(database_url, SINCE) == [(1, "2026-11-02"), (2, "2026-11-04")]
