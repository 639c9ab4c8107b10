"""The database that this process watches: where it is, and one engine per address.

Engines are cached and shared, sessions never are. What queries return is frozen, so it is cached as
shared objects, without a copy per rerun; every cache forgets by time and by number.
"""

import os
import shlex

import streamlit as st

from quantwatch.config.load import database_url
from quantwatch.errors import UserError
from quantwatch.store.session import Database, open_database
from quantwatch.store.urls import parse_url, shown

SHORT_S, LONG_S = 5, 60
"""How long the newest state is kept, and what a run that has ended holds."""


def url() -> str:
    """Return the database that this process watches: QUANTWATCH_DATABASE_URL or the default."""
    return database_url(None, os.environ)


def shown_url(given: str) -> str:
    """Return a URL for people: without its password."""
    try:
        return shown(parse_url(given))
    except UserError as error:
        return str(error)


def program() -> str:
    """Return how a command line starts that uses this database, without its password."""
    given = url()
    own = given == database_url(None, {})
    return "quantwatch" if own else f"quantwatch --database {shlex.quote(shown_url(given))}"


def addressed(line: str) -> str:
    """Return a command line of ours so that it uses this database."""
    return (
        f"{program()}{line.removeprefix('quantwatch')}" if line.startswith("quantwatch ") else line
    )


@st.cache_resource(max_entries=8, show_spinner=False, on_release=lambda db: db.close())
def database(given: str) -> Database:
    """Return the open database, for reading only."""
    return open_database(given, read_only=True)


@st.cache_resource(max_entries=8, show_spinner=False, on_release=lambda db: db.close())
def writable(given: str) -> Database:
    """Return the open database for `actions`, which are all that writes."""
    return open_database(given)
