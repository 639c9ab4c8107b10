"""What a check would measure if it were run now."""

import os
from pathlib import Path

import streamlit as st

from quantwatch.config.load import find_config, load_config
from quantwatch.config.parsing import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.errors import UserError
from quantwatch.store import applied
from quantwatch_dashboard.queries.connection import SHORT_S, database


def configured(url: str, check: str) -> tuple[CheckConfig, str]:
    """Return a check and its folder: as the service applied them, else as the file has them.

    Never cached: a run is queued with it. Raises UserError when neither knows the check: nobody
    could say what to measure.
    """
    with database(url).reader() as session:
        known = applied.applied_checks(session).get(check)
    if known is not None:
        return parse(CheckConfig, known.config, f"check {check} as it was applied"), known.folder
    path = find_config(Path.cwd(), os.environ)
    in_file = load_config(path).checks if path is not None else {}
    if path is None or check not in in_file:
        where = f"nor in {path}" if path is not None else "and this page knows no quantwatch.toml"
        raise UserError(
            f"Check {check!r} is not among those that the service works with, {where}: nobody "
            "could say what to measure."
        )
    return in_file[check], str(path.resolve().parent)


@st.cache_resource(ttl=SHORT_S, max_entries=64, show_spinner=False)
def why_not(url: str, check: str) -> str:
    """Say why a check can't be run from here, "" when it can."""
    try:
        configured(url, check)
    except UserError as error:
        return str(error)
    return ""
