"""One episode of an alert: what happened, who was notified, and what can be done about it."""

import streamlit as st

from quantwatch.domain import UNDECIDED
from quantwatch.metrics.registry import METRICS
from quantwatch_dashboard import actions, clock
from quantwatch_dashboard.charts.judged import judged_chart
from quantwatch_dashboard.components import asking, episode_page, facts, page, picture
from quantwatch_dashboard.components.episodes import ended_table
from quantwatch_dashboard.components.markup import link, tag
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.episodes import ShownEpisode
from quantwatch_dashboard.queries import alerts as alert_queries
from quantwatch_dashboard.queries import connection
from quantwatch_dashboard.views import alerts_silences

_FEWEST = 3
"""Runs below which a line says nothing."""
_REPLACED = "This episode is over; a newer one of the same alert is open."


def show(url: str, episode_id: str) -> None:
    """Show an episode. Raises UserError when there is none of that id."""
    one = alert_queries.episode(url, episode_id)
    now, zone = clock.now(), clock.zone()
    page.head(one.listed.rule, f"{one.listed.check} · {one.listed.candidate or 'the check itself'}")
    st.html(tag("p", link("← All alerts", "alerts"), class_="qw-small"))
    st.html(episode_page.card(one, now, zone))
    left, right = st.columns([3, 2], gap="large")
    with left:
        _values(url, one)
        page.section("What happened", "Oldest first: judged, notified, acknowledged, silenced.")
        st.html(episode_page.timeline(alert_queries.told_story(url, one.listed), now, zone))
    with right:
        _actions(url, one)
    _found(one)
    _others(url, one)


def _values(url: str, one: ShownEpisode) -> None:
    """Draw the rule's value over the runs around the episode, where there are several."""
    judged = alert_queries.judged(url, one.listed)
    if sum(each.value_kind not in UNDECIDED for each in judged) < _FEWEST:
        return
    episode = one.listed.episode
    metric = METRICS.get(str(episode.evidence.get("metric")))
    unit = one.listed.rule if metric is None else naming.axis(metric.slug)
    figure = judged_chart(
        judged,
        (episode.opened_at, episode.resolved_at or clock.now()),
        unit=unit,
        is_log=metric is not None and metric.log_scale,
        zone=clock.zone(),
    )
    page.section("Value by run", "Dashed: the limit. Crosses breach it; the episode is shaded.")
    alt = "Value of the rule by run, against its limit"
    picture.show(figure, "judged", alt, f"{one.listed.check}-{one.listed.rule}")


def _actions(url: str, one: ShownEpisode) -> None:
    page.section("What to do", "Everything here is written down with your name.")
    if not one.is_open:
        newer = [
            each
            for each in alert_queries.episodes_of(url, one.listed.alert_id)
            if each.state != "ended"
        ]
        said = _REPLACED if newer else "This episode is over: there is nothing to do any more."
        page.say(said)
        return
    _acknowledge(one)
    with st.expander("Silence …", expanded=False):
        alerts_silences.form(url, one.listed.labels, f"alert-{one.listed.alert_id}")
    alerts_silences.matching(url, one)
    again = one.listed.episode.evidence.get("command")
    if again:
        _command(*episode_page.repeated(connection.addressed(str(again))))
    close = f"{connection.program()} alerts close {one.listed.alert_id} --reason WHY"
    _command("Close it by hand, where it will never recover by itself:", close)


def _command(words: str, line: str) -> None:
    st.html(tag("div", tag("span", words, class_="qw-soft qw-small"), facts.command(line)))


def _acknowledge(one: ShownEpisode) -> None:
    number, seen = one.listed.alert_id, one.listed.episode.id
    if one.listed.episode.fired_at is None:
        words = "It has not fired yet: there is nothing to acknowledge before it is confirmed."
        page.say(words)
        return
    asking.worded(
        "Acknowledge",
        lambda who, comment: actions.acknowledge(who, number, seen, comment),
        key=f"ack-{seen}",
        wants="What is being done",
        done="Acknowledged.",
    )


def _found(one: ShownEpisode) -> None:
    where = episode_page.places(one)
    if where:
        page.section("Places", "The places that breached the rule in its last run, worst first.")
        st.html(where)


def _others(url: str, one: ShownEpisode) -> None:
    """Show the other times that the same alert was true."""
    listed = alert_queries.episodes_of(url, one.listed.alert_id)
    past = [
        ShownEpisode(each)
        for each in listed
        if each.state == "ended" and each.episode.id != one.listed.episode.id
    ]
    if past:
        page.section("Before", "Other episodes of the same rule, candidate and check.")
        st.html(ended_table(past, clock.now(), clock.zone()))
