"""Database URLs: what is understood, and that no password is ever shown."""

from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from quantwatch.errors import StoreError, UserError
from quantwatch.store.runs import list_runs
from quantwatch.store.session import open_database
from quantwatch.store.upgrade import upgrade
from quantwatch.store.urls import SqliteFile, parse_url, shown

SECRET = "s3cret-canary"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("not a url", "can't be read; allowed is sqlite", id="no url"),
        pytest.param("mysql://u:s3cret-canary@h/d", "'mysql' is not supported", id="mysql"),
        pytest.param("sqlite://", "in memory keeps nothing", id="memory"),
        pytest.param("sqlite:///:memory:", "in memory keeps nothing", id="memory by name"),
        pytest.param("sqlite:///a.db?cache=shared", "only options are", id="option"),
        pytest.param("sqlite:///a.db?mode=memory", "only options are", id="mode"),
        pytest.param("postgresql://u:s3cret-canary@h:port/d", "can't be read", id="port"),
    ],
)
def test_a_wrong_url_is_the_users_error(url: str, words: str) -> None:
    """Catches a typo that is taken for a failure of the monitor, or printed with its password."""
    with pytest.raises(UserError, match=words) as caught:
        open_database(url)
    assert SECRET not in str(caught.value)


def test_relative_paths_are_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `sqlite:///relative.db` taken for an absolute path."""
    monkeypatch.chdir(tmp_path)
    upgrade("sqlite:///relative name.db")
    assert (tmp_path / "relative name.db").is_file()
    open_database("sqlite:///relative name.db").close()
    assert SqliteFile.of(parse_url("sqlite:///file:a%20b.db?uri=true")).path == tmp_path / "a b.db"


def test_passwords_are_never_shown() -> None:
    """Catches a password in a message, in repr, or in the list of options (B29)."""
    url = f"postgresql://user:{SECRET}@127.0.0.1:1/quantwatch?sslpassword={SECRET}"
    assert shown(parse_url(url)) == "postgresql://user@127.0.0.1:1/quantwatch"
    database = open_database(url, check_schema=False, wait_s=0.5)
    assert SECRET not in repr(database)
    with pytest.raises(StoreError, match="can't be reached; start the server") as caught:
        list_runs(database)
    assert SECRET not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    database.close()


@pytest.mark.postgres
def test_a_refused_login_is_named(postgres_server: URL) -> None:
    """Catches a wrong password that is printed, or reported as a server that is down."""
    admin = create_engine(postgres_server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE ROLE guest LOGIN PASSWORD 'right'"))
        file = Path(connection.execute(text("SHOW hba_file")).scalar_one())
        rules = file.read_text()
        file.write_text(f"local all guest scram-sha-256\n{rules}")
        connection.execute(text("SELECT pg_reload_conf()"))
    url = postgres_server.set(username="guest", password=SECRET)
    try:
        _require_refusal(url, "refuses the password; correct it in the database URL")
        _require_refusal(url.set(password=None), "refuses the password")
        missing = postgres_server.set(database="nowhere")
        _require_refusal(missing, "does not exist; create it with createdb")
    finally:
        file.write_text(rules)
        with admin.connect() as connection:
            connection.execute(text("SELECT pg_reload_conf()"))
            connection.execute(text("DROP ROLE guest"))
        admin.dispose()


def _require_refusal(url: URL, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        open_database(url.render_as_string(hide_password=False), wait_s=2)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
