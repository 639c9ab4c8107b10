"""The first thing on a run page: how it ended, whose fault it is, in words."""

from collections.abc import Iterator
from datetime import datetime, tzinfo

from quantwatch.domain import CandidateResult, RunResult, Verdict
from quantwatch.report import words as say
from quantwatch_dashboard import text
from quantwatch_dashboard.charts.strip import strip
from quantwatch_dashboard.components import hero
from quantwatch_dashboard.components.markup import Html, image, tag
from quantwatch_dashboard.components.verdict import badge, candidate_badge, tone
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.logic.series import WHOLE, fault, leading, spike


def card(result: RunResult, now: datetime, zone: tzinfo) -> Html:
    """Return the card with verdict, culprit and the run's facts."""
    lead = leading(result)
    what, said, who = _message(result, lead)
    return hero.card(
        (badge(result.status, result.verdict), tag("b", who, class_="qw-who")),
        (
            tag("div", what, class_="qw-what"),
            tag("div", said, class_="qw-words"),
            _others(result, lead),
        ),
        _facts(result, lead, now, zone),
        tone(result.verdict),
        _spike(result, lead),
    )


def _spike(result: RunResult, lead: CandidateResult | None) -> Html:
    """Show the place that broke among its peers: the eye finds it before it reads."""
    found = spike(result, lead) if lead is not None else None
    if found is None:
        return Html("")
    where = "each layer" if found.part == WHOLE else f"{found.part} in each layer"
    broken = f"{found.places[found.at]} = {text.number(found.values[found.at])}"
    alt = f"Isolated error of {where}; the largest is {broken}"
    words = tag("figcaption", f"Isolated error of {where}. Red: ", tag("b", broken))
    return tag("figure", image(strip(found.values, found.at), alt, "qw-strip"), words)


def _message(result: RunResult, lead: CandidateResult | None) -> tuple[str, str, str]:
    """Return headline, explanation and name of the candidate."""
    if result.verdict is None or lead is None:
        return (
            say.headline(result),
            "The monitor has no verdict: this says nothing about the models.",
            "",
        )
    others = [c.name for c in result.candidates if c.verdict == lead.verdict and c is not lead]
    who = lead.name if not others else f"{lead.name} (also {', '.join(others)})"
    failed = [c.name for c in result.candidates if c.failure is not None]
    also = f" Could not be measured: {', '.join(failed)}." if failed else ""
    if result.verdict in (Verdict.PASS, Verdict.IMPROVEMENT):
        return (
            "Every candidate stays within its rules",
            f"{lead.name} departs most. {_said(lead)}{also}",
            "",
        )
    return fault(result, lead), f"{_said(lead)}{also}", who


def _said(lead: CandidateResult) -> str:
    """Say why, without repeating the headline or the facts beside it."""
    said = say.explanation(lead)
    if lead.culprit is not None:
        first = f" The first tap that differs is {lead.culprit.first_difference}."
        said = said.removeprefix(f"{lead.culprit.scope}: ").replace(first, "")
    return f"{said[:1].upper()}{said[1:]}"


def _others(result: RunResult, lead: CandidateResult | None) -> Html:
    """Say how the other candidates ended, so that one fault does not hide a second one."""
    others = [c for c in result.candidates if c is not lead]
    shown = [
        tag(
            "span",
            tag("span", c.name, class_="qw-nm", title=c.name),
            candidate_badge(c.verdict),
            class_="qw-cand",
        )
        for c in others
    ]
    return tag("div", *shown, class_="qw-cands qw-others") if shown else Html("")


def _facts(
    result: RunResult, lead: CandidateResult | None, now: datetime, zone: tzinfo
) -> Iterator[tuple[str, object]]:
    yield "measured" if result.candidates else "started", moment(result.started_at, now, zone)
    yield "took", text.took(result.started_at, result.finished_at or now)
    if result.candidates:
        culprit = lead.culprit if lead is not None else None
        first = culprit.first_difference if culprit is not None else None
        yield "suite", f"{result.suite_name} · {text.plural(result.num_tokens, 'token')}"
        yield "alerts", str(len(result.alerts))
        yield "differs from", f"{first} on" if first is not None else text.NONE
        yield "baseline", say.baseline_words(result)
    yield "run", tag("span", result.run_id, class_="qw-mono qw-small")
