"""Operations: the parts of the service, the queue, and what is to be mended."""

import streamlit as st

from quantwatch_dashboard import clock, queries
from quantwatch_dashboard.components import leftovers, page, service, trouble, upkeep
from quantwatch_dashboard.queries import operations as operation_queries
from quantwatch_dashboard.views import acts

_EVERY_S = 3
_MOST_RUNS, _MOST_CHECKS = 25, 60
_START = (
    "Checks still run from the command line. A scheduler, a worker and the delivery of alerts"
    " start together, and show themselves here:"
)


def show(url: str) -> None:
    """Show parts and queue, live; then quarantine, failed tasks and next runs."""
    _live(url)
    _quarantine(url)
    failed = operation_queries.failed(url)
    said = "What failed and has not succeeded since, once per thing."
    if (total := operation_queries.num_failed(url)) > len(failed):
        said += f" The newest {len(failed)} of {total:,}."
    page.section("Failed tasks", said)
    if failed:
        st.html(upkeep.failed(failed, clock.now(), clock.zone()))
    else:
        st.html(upkeep.nothing("Nothing has failed, or all of it has succeeded since."))
    page.section("Next runs", "Nominal times; the jitter of each check comes on top.")
    timetable = operation_queries.timetable(url)
    if timetable:
        busy = {run.check for run in queries.running(url)}
        shown = timetable[:_MOST_CHECKS]
        st.html(service.timetable(shown, busy, clock.now(), clock.zone()))
        if len(timetable) > _MOST_CHECKS:
            later = len(timetable) - _MOST_CHECKS
            st.html(upkeep.nothing(f"and {later} later ones, each on the page of its check"))
    else:
        words = "No check has a schedule: [checks.NAME.schedule] in quantwatch.toml gives it one."
        st.html(upkeep.nothing(words))


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _live(url: str) -> None:
    """Show the parts and the queue, and ask again every few seconds."""
    found = operation_queries.service(url)
    at = clock.now().astimezone(clock.zone())
    page.section("Parts of the service", f"As of {at:%H:%M:%S}; asked again every few seconds.")
    if found.parts:
        st.html(service.parts(found.parts, found.leader.holder if found.leader else None))
    else:
        title = "No part of a service has been seen for a day"
        st.html(trouble.state(title, _START, command=f"{queries.program()} start"))
    page.section("Queue", "Runs that wait for a worker or are under way, oldest first.")
    _queue(url)
    if found.slots:
        st.html(service.slots(found.slots))


def _queue(url: str) -> None:
    runs, now = queries.running(url), clock.now()
    leftovers.show("queue", [acts.cancel_key(run.run_id) for run in runs])
    if not runs:
        st.html(upkeep.nothing("Nothing waits and nothing is under way."))
    for run in runs[:_MOST_RUNS]:
        words, button = st.columns([7, 1.3], vertical_alignment="center")
        with words:
            st.html(service.run_row(run, now))
        with button:
            acts.cancel(run)
    if len(runs) > _MOST_RUNS:
        st.html(upkeep.nothing(f"and {len(runs) - _MOST_RUNS} more"))


def _quarantine(url: str) -> None:
    found = operation_queries.service(url).quarantined
    leftovers.show("quarantine", [acts.release_key(check) for check, _ in found])
    if not found:
        return
    page.section(
        "Quarantine",
        "These checks made their workers die again and again. Nothing claims them until an admin"
        " lets them run again; what they did before no longer counts then.",
    )
    for check, since in found:
        at = since.astimezone(clock.zone())
        words, button = st.columns([7, 1.3], vertical_alignment="center")
        with words:
            st.html(service.row(check, f"in quarantine since {at:%Y-%m-%d %H:%M}"))
        with button:
            acts.release(check)
