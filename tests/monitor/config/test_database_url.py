"""Which database."""

from pathlib import Path

import pytest

from quantwatch.config.load import database_url
from quantwatch.config.schema import Config, DatabaseConfig
from quantwatch.errors import ConfigError
from quantwatch.observability import redaction

BASE = Path("/srv/watch")


def configured(url: str) -> Config:
    return Config(schema_version=1, database=DatabaseConfig(url=url))


URLS = [
    ("sqlite:///q.db", "sqlite:////srv/watch/q.db"),
    ("sqlite:///data/q.db?timeout=5", "sqlite:////srv/watch/data/q.db?timeout=5"),
    ("sqlite+pysqlite:///q.db", "sqlite+pysqlite:////srv/watch/q.db"),
    ("sqlite:////abs/q.db", "sqlite:////abs/q.db"),
    ("sqlite://", "sqlite://"),
    ("sqlite:///:memory:", "sqlite:///:memory:"),
    ("sqlite:///file:q.db?mode=ro&uri=true", "sqlite:///file:q.db?mode=ro&uri=true"),
    ("postgresql+psycopg://u:p@h/n", "postgresql+psycopg://u:p@h/n"),
]


@pytest.mark.parametrize(("written", "meant"), URLS)
def test_relative_paths_start_at_the_configuration(written: str, meant: str) -> None:
    """Catches a second, empty database when the command runs in another folder."""
    assert database_url(configured(written), {}, base_dir=BASE) == meant


def test_environment_then_configuration_then_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches the wrong order, and a default that is not the user's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/someone/data")
    env = {"QUANTWATCH_DATABASE_URL": "sqlite:///mine.db"}
    assert database_url(configured("sqlite:///q.db"), env) == f"sqlite:///{tmp_path}/mine.db"
    assert database_url(None, {}) == "sqlite:////home/someone/data/quantwatch/quantwatch.db"
    assert database_url(Config(schema_version=1), {"QUANTWATCH_DATABASE_URL": ""}).endswith(
        "/quantwatch/quantwatch.db"
    )


@pytest.mark.parametrize(
    "url", ["postgres://u:secret@h/n", "q.db", "mysql://u:secret@h/n", "u:secret@h/n"]
)
def test_another_scheme_is_refused_and_the_password_not_printed(url: str) -> None:
    """Catches SQLAlchemy's own error, and a password in a log."""
    with pytest.raises(
        ConfigError, match=r"allowed: sqlite, sqlite\+pysqlite, postgresql"
    ) as caught:
        database_url(configured(url), {})
    assert "secret" not in str(caught.value)


def test_the_url_may_lie_in_a_file(tmp_path: Path) -> None:
    """Catches a mounted secret that is not read, and a password that is not kept out of logs."""
    file = tmp_path / "url"
    file.write_text("postgresql://quantwatch:canary-pw%40x@db/quantwatch\n")
    env = {"QUANTWATCH_DATABASE_URL_FILE": str(file)}
    assert database_url(None, env) == "postgresql://quantwatch:canary-pw%40x@db/quantwatch"
    assert "canary" not in redaction.scrub("could not connect: canary-pw@x / canary-pw%40x")
    assert redaction.scrub("db/quantwatch") == "db/quantwatch"
    redaction.forget()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"", "one line"), (b"a\nb", "one line"), (b"\xff", "no UTF-8 text")],
    ids=["missing", "empty", "two-lines", "binary"],
)
def test_a_file_without_a_url_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    """Catches a service that starts on the default database because its secret was not mounted."""
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"QUANTWATCH_DATABASE_URL_FILE: .*url: .*{words}"):
        database_url(None, {"QUANTWATCH_DATABASE_URL_FILE": str(file)})
