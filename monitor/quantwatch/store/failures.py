"""Database errors as one clear line each: which database, what is wrong, what to do."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from quantwatch.errors import ConflictError, StoreError

_SQLITE = {
    "SQLITE_BUSY": "is locked by another process; wait for it to finish, or stop it",
    "SQLITE_LOCKED": "is locked by another process; wait for it to finish, or stop it",
    "SQLITE_FULL": "is full: no space left on its disk (or its page limit is reached); free some",
    "SQLITE_READONLY": "is read-only; make the file and its folder writable",
    "SQLITE_CANTOPEN": "can't be opened; check that the folder exists and may be written to",
    "SQLITE_NOTADB": "is not a database file; name another path",
    "SQLITE_CORRUPT": "is corrupt; restore it from a backup (`quantwatch db backup` makes them)",
    "SQLITE_IOERR": "can't be read or written: the disk reports an error",
    "SQLITE_PERM": "may not be read by this user; check the file's permissions",
    "SQLITE_AUTH": "may not be read by this user; check the file's permissions",
}
_SQLITE_WORDS = {"no such table": "SCHEMA", "no such column": "SCHEMA"}
_POSTGRES = {
    "55P03": "is locked by another session; wait for it to finish, or end it",
    "40P01": "ended this transaction because of a deadlock; run again",
    "40001": "ended this transaction because of a concurrent one; run again",
    "53100": "is full: no space left on the server's disk; free some",
    "53300": "takes no more connections; close some or raise max_connections",
    "25006": "is read-only; connect to the primary server",
    "42501": "does not permit this to the user; grant the rights on schema and tables",
    "57014": "cancelled the statement; run again",
    "57P01": "shut the connection down; start the server and run again",
    "57P03": "is starting up or shutting down; try again in a moment",
    "28P01": "refuses the password; correct it in the database URL",
    "28000": "refuses this user; correct the database URL or pg_hba.conf",
    "3D000": "does not exist; create it with createdb",
}
_CONFLICTS = ("40P01", "40001")
_POSTGRES_WORDS = {
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "no pg_hba.conf entry": "28000",
    'database "': "3D000",
    "too many clients": "53300",
}
_SCHEMA = "has a schema this program doesn't know; run `quantwatch db check`"
_UNREACHABLE = "can't be reached; start the server or correct host and port in the database URL"


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn database errors in the body into StoreError. `name` is the URL without its password."""
    try:
        yield
    except DBAPIError as error:
        kind = ConflictError if _is_conflict(error.orig) else StoreError
        raise kind(_line(name, error.orig or error)) from error
    except StatementError as error:
        if not isinstance(error.orig, ValueError | TypeError):
            raise
        # A column type refused the value before it reached the database.
        raise StoreError(f"Database {name}: {error.orig or error}.") from error
    except SQLAlchemyError as error:
        raise StoreError(f"Database {name}: {error}.") from error
    except (sqlite3.Error, psycopg.Error) as error:
        raise StoreError(_line(name, error)) from error


def _is_conflict(error: BaseException | None) -> bool:
    return getattr(error, "sqlstate", None) in _CONFLICTS


def _line(name: str, error: BaseException) -> str:
    known = _sqlite_words(error) if isinstance(error, sqlite3.Error) else _postgres_words(error)
    detail = str(error).strip().split("\n")[0]
    if known is None:
        return f"Database {name}: {detail}."
    return f"Database {name} {known} ({detail})."


def _sqlite_words(error: sqlite3.Error) -> str | None:
    code: str = getattr(error, "sqlite_errorname", "")
    found = next((words for key, words in _SQLITE.items() if code.startswith(key)), None)
    if found is None and any(words in str(error) for words in _SQLITE_WORDS):
        return _SCHEMA
    return found


def _postgres_words(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None)
    if state in ("42P01", "42703"):
        return _SCHEMA
    if state in _POSTGRES:
        return _POSTGRES[state]
    text = str(error)
    if state is None and isinstance(error, psycopg.OperationalError):
        found = next((key for words, key in _POSTGRES_WORDS.items() if words in text), None)
        return _POSTGRES[found] if found else _UNREACHABLE
    return None
