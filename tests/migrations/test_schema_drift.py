"""What `make lint` asks: do the migrations build the tables that Python knows?"""

from collections.abc import Sequence

import pytest
from sqlalchemy import text

from quantwatch.errors import StoreError
from quantwatch.store.session import open_database
from quantwatch.store.upgrade import schema_drift, upgrade

_OTHER_TYPES = (
    "DROP TABLE vocabulary",
    "CREATE TABLE vocabulary (tokenizer_sha VARCHAR(64) NOT NULL CONSTRAINT pk_vocabulary "
    "PRIMARY KEY, num_tokens VARCHAR, sha256 VARCHAR NOT NULL, data {bytes} NOT NULL)",
)

CASES: dict[str, tuple[Sequence[str], set[str]]] = {
    "table missing": (["DROP TABLE vocabulary"], {"table vocabulary is in Python only"}),
    "table too many": (
        ["CREATE TABLE extra (id INTEGER PRIMARY KEY)"],
        {"table extra is in the database only"},
    ),
    "column missing": (
        ["ALTER TABLE suite_prompt DROP COLUMN token_hash"],
        {"column suite_prompt.token_hash is in Python only"},
    ),
    "column too many": (
        ["ALTER TABLE metric ADD COLUMN unit VARCHAR"],
        {"column metric.unit is in the database only"},
    ),
    "type and NULL": (
        _OTHER_TYPES,
        {
            "column vocabulary.num_tokens: type is VARCHAR in the database, BIGINT in Python",
            "column vocabulary.num_tokens: nullable is True in the database, False in Python",
        },
    ),
    "index": (
        ["DROP INDEX ix_run_started_at_id", "CREATE INDEX ix_run_verdict ON run (verdict)"],
        {
            "index ix_run_started_at_id of table run is in Python only",
            "index ix_run_verdict of table run is in the database only",
        },
    ),
}


def _execute(url: str, statements: Sequence[str]) -> None:
    database = open_database(url)
    binary = "BYTEA" if database.engine.dialect.name == "postgresql" else "BLOB"
    with database.writer() as session:
        for statement in statements:
            session.execute(text(statement.format(bytes=binary)))
    database.close()


def test_a_migrated_database_has_no_drift(database_url: str) -> None:
    """Catches a column that exists in Python only, or has another type or index."""
    upgrade(database_url)
    assert schema_drift(database_url) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("statements", "words"), CASES.values(), ids=CASES)
def test_drift_is_named(database_url: str, statements: Sequence[str], words: set[str]) -> None:
    """Catches a difference that passes, or is reported as a tuple nobody can read."""
    upgrade(database_url)
    _execute(database_url, statements)
    assert set(schema_drift(database_url)) == words


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_lost_keys_are_named(database_url: str) -> None:
    """Catches a lost unique or foreign key. SQLite can't drop one without building a new table."""
    upgrade(database_url)
    constraints = ("uq_metric_slug", "metric"), ("fk_run_check_id_check", "run")
    drops = [f"ALTER TABLE {table} DROP CONSTRAINT {name} CASCADE" for name, table in constraints]
    _execute(database_url, drops)
    assert set(schema_drift(database_url)) == {
        "constraint uq_metric_slug of table metric is in Python only",
        "foreign key fk_run_check_id_check of table run is in Python only",
    }


def test_a_database_without_tables_lacks_all(database_url: str) -> None:
    """Catches "no drift" on a database nobody has upgraded."""
    if database_url.startswith("sqlite"):
        with pytest.raises(StoreError, match="does not exist yet"):
            schema_drift(database_url)
    else:
        assert "table run is in Python only" in schema_drift(database_url)
