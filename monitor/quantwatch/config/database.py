"""Which database: QUANTWATCH_DATABASE_URL (or …_FILE), else the configuration, else a SQLite file.

A password in the URL is kept out of logs and messages from the moment it is read.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

import platformdirs

from quantwatch.config.files import local_path
from quantwatch.config.schema import Config
from quantwatch.errors import ConfigError
from quantwatch.observability import redaction

VARIABLE = "QUANTWATCH_DATABASE_URL"
FILE_VARIABLE = f"{VARIABLE}_FILE"
"""Names a file with the URL: that is how secrets are mounted into containers."""
_ALLOWED = ("sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg")
_IN_MEMORY = ("", ":memory:")


def database_url(
    config: Config | None,
    env: Mapping[str, str] = os.environ,
    *,
    base_dir: Path | None = None,
) -> str:
    """Return the SQLAlchemy URL of the database.

    A relative SQLite path in the configuration starts at the configuration's folder (`base_dir`),
    one in the environment variable at the current folder. Raises ConfigError on another scheme.
    """
    if env.get(VARIABLE):
        return _checked(env[VARIABLE], VARIABLE, Path.cwd())
    if env.get(FILE_VARIABLE):
        return _checked(_read(Path(env[FILE_VARIABLE])), FILE_VARIABLE, Path.cwd())
    if config is not None and config.database.url is not None:
        return _checked(config.database.url, "database.url", base_dir or Path.cwd())
    return f"sqlite:///{platformdirs.user_data_path('quantwatch', appauthor=False)}/quantwatch.db"


def _checked(url: str, key: str, base_dir: Path) -> str:
    """Return the URL with an absolute path. The URL may hold a password: it is never printed."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _ALLOWED:
        shown = scheme if separator and re.fullmatch(r"[\w+.-]{1,32}", scheme) else "no scheme"
        raise ConfigError(
            f"{key}: {shown} is not allowed; allowed: {', '.join(_ALLOWED)}, "
            "e.g. sqlite:///quantwatch.db or postgresql+psycopg://user@host/name"
        )
    if scheme.startswith("sqlite"):
        return _absolute(scheme, rest, base_dir)
    _hide_password(rest)
    return url


def _read(path: Path) -> str:
    """Return the one line of a mounted secret. Its password is secret, the rest of it is not."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise ConfigError(f"{FILE_VARIABLE}: {path}: {why}") from None
    if not text or len(text.splitlines()) != 1:
        raise ConfigError(f"{FILE_VARIABLE}: {path}: must hold one line, the URL")
    return text


def _hide_password(rest: str) -> None:
    userinfo, at, _ = rest.partition("/")[0].rpartition("@")
    password = userinfo.partition(":")[2]
    if at and password:
        redaction.register(unquote(password))


def _absolute(scheme: str, rest: str, base_dir: Path) -> str:
    path, mark, query = rest.removeprefix("/").partition("?")
    if not rest.startswith("/") or path in _IN_MEMORY or path.startswith("file:"):
        return f"{scheme}://{rest}"
    resolved = local_path(path, base_dir).absolute()
    return f"{scheme}:///{resolved}{mark}{query}"
