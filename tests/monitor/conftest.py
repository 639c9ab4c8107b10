"""A migrated database per test, open: on both kinds, or on SQLite for what the kind doesn't change."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantwatch.store.session import Database, open_database
from quantwatch.store.upgrade import upgrade


@pytest.fixture
def db(database_url: str, migrated_file: Path) -> Iterator[Database]:
    """A database on each of the two kinds, with the schema that the migrations build."""
    if database_url.startswith("sqlite"):
        shutil.copy(migrated_file, database_url.removeprefix("sqlite:///"))
    else:
        upgrade(database_url)
    database = open_database(database_url, wait_s=5)
    yield database
    database.close()


@pytest.fixture
def sqlite_db(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """A database on SQLite alone."""
    database = open_database(
        f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'alone.db')}", wait_s=5
    )
    yield database
    database.close()
