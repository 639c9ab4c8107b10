"""What the global options chose, and the few things every command needs of it."""

import difflib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quantwatch.cli.streams import whisper
from quantwatch.errors import ConfigError, UserError

if TYPE_CHECKING:
    from quantwatch.config.schema import CacheConfig, CheckConfig, Config
    from quantwatch.domain import RunResult
    from quantwatch.store.session import Database


@dataclass
class Session:
    """The global options of one command."""

    config_path: Path | None = None
    database: str | None = None
    debug: bool = False
    json: bool = False

    @classmethod
    def of(cls, context: typer.Context, *, json: bool = False) -> "Session":
        """Return the session of a command; with `json` errors become JSON documents, too."""
        session = context.obj
        assert isinstance(session, Session)
        session.json = json
        return session

    def find_config(self) -> Path | None:
        """Return the quantwatch.toml in use, None when there is none."""
        from quantwatch.config.load import find_config

        return self.config_path or find_config(Path.cwd())

    def config(self) -> "tuple[Config, Path]":
        """Return the configuration and its folder. Raises ConfigError when there is none."""
        from quantwatch.config.load import load_config

        path = self.find_config()
        if path is None:
            where = Path.cwd()
            raise ConfigError(f"no quantwatch.toml in {where} or above; name one with --config")
        return load_config(path), path.resolve().parent

    def check(self, name: str) -> "tuple[CheckConfig, Path]":
        """Return a check and the folder its paths start from."""
        config, folder = self.config()
        if name not in config.checks:
            known = ", ".join(config.checks) or "none"
            close = difflib.get_close_matches(name, config.checks, n=1)
            hint = "".join(f"did you mean {other}? " for other in close)
            raise UserError(f"no check {name!r} in {self.find_config()}; {hint}it has: {known}")
        return config.checks[name], folder

    def cache(self) -> "CacheConfig":
        """Return the limits of caches, the defaults where there is no configuration."""
        from quantwatch.config.schema import CacheConfig

        return CacheConfig() if self.find_config() is None else self.config()[0].cache

    def database_url(self) -> str:
        """Return the URL of --database, else of the environment, the configuration, the default."""
        from quantwatch.config.load import database_url

        if self.database is not None:
            return self.database
        if self.find_config() is None:
            return database_url(None, os.environ)
        config, folder = self.config()
        return database_url(config, os.environ, base_dir=folder)

    @property
    def program(self) -> str:
        """The command with the global options that choose a database, to be typed again."""
        words = ["quantwatch"]
        if self.config_path is not None:
            words += ["--config", str(self.config_path)]
        if self.database is not None:
            words += ["--database", shown(self.database)]
        return shlex.join(words)

    def addressed(self, line: str) -> str:
        """Return a line whose hints speak of the database that this command does."""
        return line.replace("`quantwatch db ", f"`{self.program} db ")

    @contextmanager
    def reader(self) -> "Iterator[Database]":
        """Open the database for reading. Raises StoreError when there is none yet."""
        from quantwatch.store.session import open_database

        database = open_database(self.database_url(), read_only=True)
        try:
            yield database
        finally:
            database.close()

    @contextmanager
    def writer(self) -> "Iterator[Database]":
        """Open the database for writing; an SQLite file that doesn't exist yet is created."""
        from quantwatch.store.session import open_database
        from quantwatch.store.upgrade import schema_state, upgrade

        url = self.database_url()
        if url.startswith("sqlite") and schema_state(url) == "empty":
            upgrade(url)
            whisper(f"note: created the database {url}")
        database = open_database(url)
        try:
            yield database
        finally:
            database.close()

    def stored(self, run: str) -> "RunResult":
        """Return a stored run by its id, a unique start of it, a check's name, or "latest"."""
        from quantwatch.store.runs import get_result, resolve_run_id

        with self.reader() as database:
            return get_result(database, resolve_run_id(database, run))


def shown(url: str) -> str:
    """Return a database URL without its password."""
    from quantwatch.store import urls

    return urls.shown(urls.parse_url(url))


def cache_dir() -> Path:
    """Return the folder of converted models and digests, per user."""
    from platformdirs import user_cache_path

    return user_cache_path("quantwatch")
