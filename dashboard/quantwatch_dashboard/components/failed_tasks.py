"""Tasks that failed and have not succeeded since."""

from collections.abc import Iterable
from datetime import datetime, tzinfo

from quantwatch.store.failed_tasks import FailedTask
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import Html, numbers, table, tag
from quantwatch_dashboard.components.words import moment


def table_of(found: Iterable[FailedTask], now: datetime, zone: tzinfo) -> Html:
    """Return one row per failed operation and thing it was about."""
    rows = (
        [
            tag("td", task.operation, class_="qw-name"),
            tag("td", task.error_code, class_="qw-mono qw-small"),
            tag("td", task.subject, class_="qw-wrap"),
            tag("td", f"{task.attempts:,}", class_="qw-n"),
            tag("td", moment(task.last_at, now, zone),
                tag("span", "since ", moment(task.first_at, now, zone), class_="qw-sub")),
            tag("td", text.readable(task.message), class_="qw-text"),
        ]
        for task in found
    )  # fmt: skip
    heads = ["Operation", "Error", "About", *numbers("Attempts"), "Last", "Message"]
    return table(heads, rows, "qw-ops")
