"""A migrated database per test, open: on both kinds, or on SQLite for what the kind doesn't change."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url
from tests.conftest import postgres_database

from quantwatch.store.session import Database, open_database
from quantwatch.store.upgrade import upgrade


@pytest.fixture(scope="session")
def migrated_name(postgres_server: URL) -> Iterator[str]:
    """A database of the server with the schema that the migrations build, to be copied.

    As for SQLite: building it takes longer than most tests that need one.
    """
    with postgres_database(postgres_server) as url:
        upgrade(url)
        yield str(make_url(url).database)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, migrated_file: Path
) -> Iterator[str]:
    """A database of each kind, with the schema that the migrations build."""
    if request.param == "sqlite":
        yield f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'quantwatch.db')}"
        return
    server = request.getfixturevalue("postgres_server")
    with postgres_database(server, request.getfixturevalue("migrated_name")) as url:
        yield url


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """The database of each kind, open."""
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
