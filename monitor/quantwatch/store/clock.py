"""The database's clock: the one clock that all processes of a service share."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

SHIFT = "clock shift"
"""Key in `Session.info`: how far a test has moved the clock."""


def now(session: Session) -> datetime:
    """Return the time in UTC by the database's clock, when this statement runs."""
    if session.get_bind().dialect.name == "postgresql":
        found: datetime = session.execute(text("SELECT clock_timestamp()")).scalar_one()
        moment = found.astimezone(UTC)
    else:
        words = session.execute(text("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")).scalar_one()
        moment = datetime.fromisoformat(words).replace(tzinfo=UTC)
    shift: timedelta = session.info.get(SHIFT, timedelta())
    return moment + shift
