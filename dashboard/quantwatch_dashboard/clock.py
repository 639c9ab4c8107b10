"""The reader's clock: now, and the time zone of the browser."""

from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st


def now() -> datetime:
    """Return the present instant, aware."""
    return datetime.now(UTC)


def zone() -> tzinfo:
    """Return the browser's time zone, UTC when it tells none that is known here."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # The browser's word is looked up as a file: it may name a folder, or be too long.
        return UTC
