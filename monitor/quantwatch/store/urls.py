"""Database URLs: which are understood, how they are shown, and where a SQLite file lies."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from platformdirs import user_data_path
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from quantwatch.config.files import local_path
from quantwatch.errors import NoDatabaseError, UserError

_MAGIC = b"SQLite format 3\0"
_ALLOWED = "sqlite:///file.db or postgresql://user:password@host/database"


def parse_url(text: str) -> URL:
    """Return the URL with the driver we use. Raises UserError; never repeats a password."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise UserError(f"The database URL can't be read; allowed is {_ALLOWED}.") from error
    backend = url.get_backend_name()
    if backend == "sqlite":
        return url.set(drivername="sqlite+pysqlite")
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise UserError(f"Database {url.drivername!r} is not supported; allowed is {_ALLOWED}.")


def shown(url: URL) -> str:
    """Return the URL for messages: without driver and passwords."""
    harmless = {key: value for key, value in url.query.items() if "password" not in key}
    name = URL.create(
        url.get_backend_name(), url.username, None, url.host, url.port, url.database, harmless
    )
    return name.render_as_string()


def is_own(folder: Path) -> bool:
    """Say whether a folder is quantwatch's own for data, which is made when it is needed."""
    return folder == user_data_path("quantwatch", appauthor=False).absolute()


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A SQLite file and whether the URL itself asks for reading only (`mode=ro`)."""

    path: Path
    read_only: bool

    @classmethod
    def of(cls, url: URL) -> "SqliteFile":
        """Read `sqlite:///path` and `sqlite:///file:path?mode=ro&uri=true`.

        Raises UserError on another form, NoDatabaseError on a folder.
        """
        text = url.database or ""
        is_uri = text.startswith("file:")
        if is_uri:
            text = unquote(text.removeprefix("file://").removeprefix("file:"))
        query = {key: str(value) for key, value in url.query.items()}
        unknown = sorted(set(query) - {"mode", "uri"})
        if unknown or query.get("mode", "rwc") not in ("ro", "rw", "rwc"):
            raise UserError(
                f"Database URL {shown(url)}: the only options are uri=true and mode=ro|rw|rwc."
            )
        if text in ("", ":memory:"):
            raise UserError("A database in memory keeps nothing; name a file: sqlite:///file.db")
        path = local_path(text, Path.cwd())
        if path.is_dir():
            raise NoDatabaseError(f"Database {shown(url)} is a folder; name a file in it.")
        return cls(path, query.get("mode") == "ro")

    def require_place(self, name: str) -> None:
        """Raise NoDatabaseError unless the folder exists, and the file is a database or missing."""
        if not self.path.parent.is_dir() and not is_own(self.path.parent):
            raise NoDatabaseError(
                f"Database {name} can't be opened: folder {self.path.parent} does not exist."
            )
        try:
            with self.path.open("rb") as file:
                begin = file.read(len(_MAGIC))
        except OSError:
            # Not there yet, or locked away: SQLite says so.
            return
        if begin and begin != _MAGIC:
            raise NoDatabaseError(f"Database {name} is not a database file; name another path.")

    def uri(self, mode: str) -> str:
        """Return the URI that SQLite opens: `ro`, `rw` (never creates) or `rwc`."""
        return f"{self.path.as_uri()}?mode={mode}"
