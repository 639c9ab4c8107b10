"""Words of markup that many parts use: when something was, a candidate's color, a ratio."""

from datetime import datetime, tzinfo

from quantwatch_dashboard import text
from quantwatch_dashboard.charts import palette
from quantwatch_dashboard.components.markup import Html, tag


def moment(when: datetime, now: datetime, zone: tzinfo) -> Html:
    """Return how long ago or how far ahead; the time in the reader's zone shows on hover."""
    words = text.age(when, now) if when <= now else text.until(when, now)
    return tag("time", words, datetime=when.isoformat(), title=text.instant(when, zone))


def swatch(index: int) -> Html:
    """Return the small square in a candidate's chart color."""
    return tag("span", class_="qw-swatch", style=f"--series: {palette.series_style(index)[0]}")


def times(change: float) -> str:
    """Return a ratio: ``1.52 ×``, ``0.97 ×``; a value that is not finite has none."""
    return f"{text.number(change)} ×"
