"""Designed states instead of tracebacks: nothing there yet, not readable, not found."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import streamlit as st

from quantwatch.errors import ConfigError, NotFoundError, QuantwatchError, StoreError, UserError
from quantwatch_dashboard import access
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.roles import AccessError, Role

_log = logging.getLogger(__name__)
P = ParamSpec("P")


def state(title: str, *sentences: object, command: str | None = None) -> Html:
    """Return a card that says what is the matter and what to do."""
    parts = [tag("h2", title), *(tag("p", sentence) for sentence in sentences)]
    if command is not None:
        parts.append(tag("pre", command, class_="qw-mono"))
    return tag("div", *parts, class_="qw-state", role="status")


def guarded(view: Callable[P, None]) -> Callable[P, None]:
    """Show a card instead of a traceback when the database or the address is the trouble.

    A fragment needs it, too: it is drawn anew without the page around it, so also without the
    question in `app.py` whether one may still look. Who may not any more gets that page.
    """

    @wraps(view)
    def show(*args: P.args, **kwargs: P.kwargs) -> None:
        if not access.current().may(Role.VIEWER):
            st.rerun()
        try:
            _require_text()
            view(*args, **kwargs)
        except ConfigError as error:
            st.html(state("The database is not named correctly", str(error)))
        except NotFoundError as error:
            st.html(state("That is not in this database", str(error), _where()))
        except AccessError as error:
            st.html(state("That needs another role", str(error)))
        except QuantwatchError as error:
            # A database that isn't there is a user's error in a shell; here it is one like others.
            if isinstance(error, UserError) and not isinstance(error, StoreError):
                st.html(state("That can't be shown", str(error), _where()))
                return
            _log.error("the dashboard can't read its database: %s", error)
            st.html(_unreadable(error))

    return show


def _require_text() -> None:
    """Refuse an address with a character that no name has, and that PostgreSQL takes for damage."""
    for key, value in st.query_params.items():
        if "\0" in f"{key}{value}":
            raise NotFoundError(f"The address names something in “{key}” that nothing is called.")


def empty() -> Html:
    """Return what an empty database shows: the command that fills it."""
    program = connection.program()
    return state(
        "No check has run yet",
        "This page shows what quantwatch measured, and there is nothing in the database so far.",
        _where(),
        "Run the demo (a few minutes on two cores) or a check of your own, then reload this page:",
        command=f"{program} demo --no-dashboard\n{program} check run NAME",
    )


def nothing_measured() -> Html:
    """Return what is shown where there are checks, but no run of any has succeeded yet."""
    overview = tag("a", "overview", href="./")
    return state(
        "No run has succeeded yet",
        "There is nothing to compare before a check has measured a candidate.",
        Html(f"The {overview} says what is under way, and what failed."),
        _where(),
    )


def _unreadable(error: QuantwatchError) -> Html:
    program = _program()
    return state(
        "The database can't be read",
        str(error),
        _where(),
        "The page tries again when you reload it. What helps is usually one of these:",
        command="\n".join(f"{program} {act}" for act in ("db check", "db upgrade", "doctor")),
    )


def _program() -> str:
    try:
        return connection.program()
    except ConfigError:  # the file that names the database went away in between
        return "quantwatch"


def _where() -> Html:
    try:
        found = connection.shown_url(connection.url())
    except ConfigError as error:
        found = str(error)
    return tag("span", "Database: ", found, class_="qw-soft qw-small")
