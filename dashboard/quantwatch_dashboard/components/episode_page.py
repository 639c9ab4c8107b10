"""One episode: its card, its timeline, where it was found."""

from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import Any

from quantwatch.report.numbers import Number
from quantwatch.store.dead_letters import DEAD
from quantwatch_dashboard import text
from quantwatch_dashboard.components import hero
from quantwatch_dashboard.components.episodes import (
    number_against,
    severity_of,
    state_badge,
    who_knows,
)
from quantwatch_dashboard.components.markup import Html, join, link, numbers, run_link, table, tag
from quantwatch_dashboard.components.verdict import severity_badge, severity_tone, tone
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic import delivery_words
from quantwatch_dashboard.logic.episode_story import Moment, value_of
from quantwatch_dashboard.logic.episodes import ShownEpisode
from quantwatch_dashboard.logic.series import place_key

_ICONS = {
    "opened": "○", "fired": "●", "told": "✉", "acked": "✓", "silenced": "–", "unsilenced": "♪",
    "recovering": "↘", "again": "●", "missing": "?", "ended": "■",
}  # fmt: skip


def card(one: ShownEpisode, now: datetime, zone: tzinfo) -> Html:
    """Return what it is, how bad, since when, and who knows."""
    evidence = one.listed.episode.evidence
    head = severity_badge(severity_of(one)), " ", state_badge(one), _flaps(one)
    what = tag("div", evidence.get("words") or one.listed.rule, class_="qw-what qw-what-small")
    knows = tag("div", tag("b", "Who knows"), who_knows(one, now, zone), class_="qw-knows")
    why = [
        tag("p", evidence[key], class_="qw-words")
        for key in ("culprit", "drift")
        if evidence.get(key)
    ]
    shade = severity_tone(severity_of(one)) if one.is_open else tone(None)
    return hero.card(head, (what, *why, knows), _facts(one, now, zone), shade)


def _flaps(one: ShownEpisode) -> Html:
    words = "It fires again and again, so it has to stay away for longer before it ends."
    return (
        tag("span", "flapping", class_="qw-chip qw-wait", title=words)
        if one.is_flapping
        else Html("")
    )


def _facts(one: ShownEpisode, now: datetime, zone: tzinfo) -> list[tuple[str, object]]:
    episode, evidence = one.listed.episode, one.listed.episode.evidence
    return [
        ("check", link(one.listed.check, "check", check=one.listed.check)),
        ("candidate", one.listed.candidate or "– (the check itself)"),
        ("value", number_against(value_of(one.listed), evidence.get("threshold"))),
        ("peak", _peak(one)),
        ("opened", moment(episode.opened_at, now, zone)),
        ("runs", str(episode.num_runs)),
        ("first run", run_link(episode.first_run_id)),
        ("last run", run_link(episode.last_run_id)),
        ("baseline", run_link(evidence.get("baseline"))),
        ("alert", f"number {one.listed.alert_id}"),
    ]


def _peak(one: ShownEpisode) -> str:
    episode = one.listed.episode
    return text.or_dash(text.plain(Number(episode.peak_value, episode.peak_kind)))


def timeline(moments: Sequence[Moment], now: datetime, zone: tzinfo) -> Html:
    """Return what happened, oldest first."""
    return tag("ol", *(_moment(each, now, zone) for each in moments), class_="qw-story")


def _moment(each: Moment, now: datetime, zone: tzinfo) -> Html:
    icon = tag("i", _ICONS.get(each.kind, "·"), aria_hidden="true")
    when = tag(
        "span", moment(each.at, now, zone), " · ", text.instant(each.at, zone), class_="qw-sub"
    )
    run = join([" ", link("run", "run", run=each.run_id)]) if each.run_id else Html("")
    detail = tag("span", each.detail, class_="qw-sub") if each.detail else Html("")
    handed = _handed(each) if each.sent is not None else Html("")
    return tag(
        "li",
        icon,
        tag("div", tag("b", each.what), run, detail, handed, when),
        class_=f"qw-story-{each.kind}",
    )


def _handed(each: Moment) -> Html:
    """Return how a message reached each endpoint."""
    assert each.sent is not None
    if not each.sent.handed:
        return tag("span", "for nobody", class_="qw-sub")
    rows = []
    for one in each.sent.handed:
        bad = one.state == DEAD
        words = f"{one.endpoint}: {delivery_words.delivery(one.state).word.casefold()}"
        tries = f", {one.attempt} tries" if one.attempt > 1 else ""
        error = (
            f", {text.clip(one.last_error, 120)}"
            if one.last_error and one.state != "delivered"
            else ""
        )
        rows.append(tag("span", words, tries, error, class_="qw-sub qw-hot" if bad else "qw-sub"))
    return join(rows)


def places(one: ShownEpisode) -> Html:
    """Return the scopes that breached, worst first, with links to the worst token of each."""
    evidence = one.listed.episode.evidence
    scopes: list[dict[str, Any]] = list(evidence.get("scopes") or ())
    if not scopes:
        return Html("")
    run = str(evidence.get("run") or "")
    rows = [_place(each, run, one.listed.candidate) for each in scopes]
    more = evidence.get("more_scopes") or 0
    headers = ["Place", "What", *numbers("Value", "Limit"), "Worst token"]
    note = tag("p", text.more(more, 0), class_="qw-soft qw-small") if more else Html("")
    return join([table(headers, rows), note])


def _place(each: dict[str, Any], run: str, candidate: str) -> Sequence[object]:
    value = text.plain(Number(each.get("value"), str(each.get("value_kind", "missing"))))
    limit = each.get("threshold")
    return [
        tag("td", each.get("scope"), class_="qw-mono"),
        f"{each.get('metric')} · {each.get('statistic')}",
        tag("td", text.or_dash(value), class_="qw-n qw-hot"),
        tag("td", text.or_dash(limit), class_="qw-n"),
        _token(each, run, candidate),
    ]


def _token(each: dict[str, Any], run: str, candidate: str) -> object:
    prompt, position = each.get("prompt"), each.get("position")
    if prompt is None or position is None or not run:
        return text.NONE
    where = {"run": run, "candidate": candidate, "prompt": str(prompt), "token": str(position)}
    where["layer"] = place_key(str(each.get("scope")))
    return link(f"prompt {prompt}, token {position}", "run", **where)


def repeated(line: str) -> tuple[str, str]:
    """Return what measuring again is called, and its command: one that can move the alert."""
    if " check run " in line:
        # By hand it would be measured, and the alert would stay as it is.
        return "Have the service measure it again:", f"{line} --queue"
    return "Measure it again:", line
