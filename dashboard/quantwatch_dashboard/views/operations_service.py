"""Operations: the parts of the service, the queue, and what is to be mended."""

import streamlit as st

from quantwatch_dashboard import clock, text
from quantwatch_dashboard.components import (
    answers,
    detection,
    failed_tasks,
    page,
    service,
    trouble,
)
from quantwatch_dashboard.logic import service_words
from quantwatch_dashboard.queries import connection, overview
from quantwatch_dashboard.queries import detection as detection_queries
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
        st.html(failed_tasks.table_of(failed, clock.now(), clock.zone()))
    else:
        page.say("Nothing has failed, or all of it has succeeded since.")
    if flown := detection_queries.newest(url):
        said = (
            "Each check's newest planted fault. One that is not found is a monitor that is blind."
        )
        page.section("Canaries", said)
        st.html(detection.flights(flown[:_MOST_CHECKS], clock.zone(), with_check=True))
        if more := text.more(len(flown), _MOST_CHECKS, "checks"):
            page.say(more)
    page.section("Next runs", "Nominal times; the jitter of each check comes on top.")
    timetable = operation_queries.timetable(url)
    if timetable:
        busy = {run.check for run in overview.running(url)}
        shown = timetable[:_MOST_CHECKS]
        st.html(service.timetable(shown, busy, clock.now(), clock.zone()))
        if more := text.more(len(timetable), _MOST_CHECKS, "later ones, each on its check's page"):
            page.say(more)
    else:
        words = "No check has a schedule: [checks.NAME.schedule] in quantwatch.toml gives it one."
        page.say(words)


@st.fragment(run_every=_EVERY_S)
@trouble.guarded
def _live(url: str) -> None:
    """Show the parts and the queue, and ask again every few seconds."""
    found = operation_queries.service(url)
    at = text.second(clock.now(), clock.zone())
    page.section("Parts of the service", f"As of {at}; asked again every few seconds.")
    if found.parts:
        st.html(service.parts(found.parts, found.leader.holder if found.leader else None))
    else:
        title = service_words.headline((), found.leader, found.silence_s, ())
        st.html(trouble.state(title, _START, command=f"{connection.program()} start"))
    page.section("Queue", "Runs that wait for a worker or are under way, oldest first.")
    _queue(url)
    if found.slots:
        st.html(service.slots(found.slots))


def _queue(url: str) -> None:
    runs, now = overview.running(url), clock.now()
    answers.show("queue", [acts.cancel_key(run.run_id) for run in runs])
    if not runs:
        page.say("Nothing waits and nothing is under way.")
    for run in runs[:_MOST_RUNS]:
        with service.beside(service.run_row(run, now)):
            acts.cancel(run)
    if more := text.more(len(runs), _MOST_RUNS):
        page.say(more)


def _quarantine(url: str) -> None:
    found = operation_queries.service(url).quarantined
    answers.show("quarantine", [acts.release_key(check) for check, _ in found])
    if not found:
        return
    page.section(
        "Quarantine",
        "These checks made their workers die again and again. Nothing claims them until an admin"
        " lets them run again; what they did before no longer counts then.",
    )
    for check, since in found:
        at = text.minute(since, clock.zone())
        with service.beside(service.row(check, f"in quarantine since {at}")):
            acts.release(check)
