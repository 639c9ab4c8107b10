"""Detection power as tables: the smallest change per rule, and what became of planted faults."""

from collections.abc import Iterable, Sequence
from datetime import tzinfo

from quantwatch.alerts.blindness import fault_words
from quantwatch.config.rules import DERIVED
from quantwatch.domain import Canary, Detectable
from quantwatch.metrics.registry import METRICS
from quantwatch.store.canaries import Flown
from quantwatch_dashboard import text
from quantwatch_dashboard.components.markup import (
    Html,
    link,
    numbers,
    run_link,
    soft,
    sub,
    table,
    tag,
)
from quantwatch_dashboard.components.words import swatch

_EFFORT = ("Smallest change", "Unchanged it reads", "Limit")


def changes(found: Sequence[tuple[str, tuple[Detectable, ...]]], names: Sequence[str]) -> Html:
    """Return one row per candidate and rule; `names` has the colours' order."""
    rows = (_change(name, each, names) for name, own in found for each in own)
    return table(["Candidate", "Rule", "Hardest at", *numbers(*_EFFORT)], rows, "qw-ops")


def flights(found: Iterable[Flown], zone: tzinfo, *, with_check: bool = False) -> Html:
    """Return one row per canary: when, what was planted, what the monitor said of it."""
    first = ["Check"] if with_check else []
    heads = [*first, "When", "Planted", "Seen", "By rule", *numbers("Value", "Limit")]
    return table(heads, (_flight(each, zone, with_check) for each in found), "qw-ops")


def outcome(canary: Canary) -> Html:
    """Return in two words what became of a canary."""
    if canary.state != "measured":
        return soft("not measurable")
    if not canary.found:
        return tag("span", "not found", class_="qw-hot")
    if not canary.located:
        return tag("span", "found, not located", class_="qw-hot")
    return tag("span", "found and located")


def _change(name: str, each: Detectable, names: Sequence[str]) -> list[object]:
    derived = DERIVED.get(each.metric)
    metric = METRICS[each.metric].title if derived is None else derived.title
    read = metric if each.statistic == "mean" else f"{metric}, {each.statistic}"
    scopes = f"of {text.plural(each.num_scopes, 'scope')}"
    where = text.scope(each.scope) if each.scope else text.NONE
    never = each.value is None
    change = tag("span", "none is found", class_="qw-hot") if never else text.number(each.value)
    place = names.index(name) if name in names else 0
    return [
        tag("td", swatch(place), name, class_="qw-name"),
        tag("td", tag("b", each.rule), sub(read), class_="qw-text"),
        tag("td", where, sub(scopes if each.num_scopes > 1 else ""), class_="qw-text"),
        tag("td", change, sub(each.reason) if each.reason else "", class_="qw-n"),
        tag("td", text.or_dash(each.expected), class_="qw-n"),
        tag("td", text.or_dash(each.limit), class_="qw-n"),
    ]


def _flight(flown: Flown, zone: tzinfo, with_check: bool) -> list[object]:
    canary = flown.canary
    check = tag("td", link(flown.check, "check", check=flown.check), class_="qw-name")
    said = canary.named or ""
    if canary.reason:
        said = canary.reason
    return [
        *([check] if with_check else []),
        tag("td", text.minute(canary.made_at, zone), sub(run_link(flown.run_id))),
        tag("td", f"× {1 + canary.size:g}", sub(fault_words(canary)), class_="qw-text"),
        tag("td", outcome(canary), sub(said), class_="qw-text"),
        tag("td", canary.rule or text.NONE, sub(canary.scope or ""), class_="qw-text"),
        tag("td", text.or_dash(canary.value), class_="qw-n"),
        tag("td", text.or_dash(canary.threshold), class_="qw-n"),
    ]
