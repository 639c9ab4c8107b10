"""An alert that has ended opens again only for what has changed since it was last found good. Pure.

All nights share the noise of a pinned baseline: a series that was unlucky in it would come back as
often as its alert ends. So a scope that an ended episode told of has to be worse than the baseline,
and worse than in the runs in which it was last found good (`last_good`). These are fixed when they
have been measured and never move on, so that a slow drift adds up. The rule's verdict on the run is
not touched: what is worse than the baseline is said to be worse, it is only not told again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantwatch.alerts.readings import sign
from quantwatch.alerts.words import number
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, Comparison, Ended, Judged, RuleOutcome, Scope

_READING = ("scope", "value", "value_kind", "threshold", "words")


def good_runs(
    episodes: Sequence[Ended], judged: Sequence[Judged], leave_runs: int
) -> dict[Scope, tuple[str, ...]]:
    """Return of each scope that an ended episode told of the runs in which it was last found good.

    Episodes newest first, of one rule on one baseline; a scope's newest one counts.
    """
    good: dict[Scope, tuple[str, ...]] = {}
    for ended in episodes:
        for scope in told_scopes(ended, judged) - good.keys():
            good[scope] = last_good(scope, ended, judged, leave_runs)
    return {scope: runs for scope, runs in good.items() if runs}


def told_scopes(ended: Ended, judged: Sequence[Judged]) -> frozenset[Scope]:
    """Return where an episode's runs breached, from the one on that made it fire.

    An alert that the watch fired may have no run from then on: then all runs of the episode.
    """
    known = _breaches(ended, judged)
    fired = [each for each in known if each.moment >= ended.fired_at]
    return frozenset().union(*(each.breached for each in fired or known))


def last_good(
    scope: Scope, ended: Ended, judged: Sequence[Judged], leave_runs: int
) -> tuple[str, ...]:
    """Return the runs in which a scope that an episode told of was last found good.

    That is how it ended: by the clear runs that resolved it. Who closes an alert by hand calls good
    what is there, the runs of the episode, until the scope has stayed without a breach for
    `leave_runs` runs: then these, so that a fault that was repaired is found when it comes back.
    `judged` is in order of time. Empty where the runs are not known any more.
    """
    nights = [each for each in judged if not each.confirms]
    if not ended.by_hand:
        return _clear_at_the_end([e for e in nights if e.moment <= ended.resolved_at])
    later = (each for each in nights if each.moment > ended.resolved_at)
    row: list[str] = []
    for each in later:
        if each.outcome == "missing":
            continue
        row = [] if scope in each.breached else [*row, each.run_id]
        if len(row) == leave_runs:
            return tuple(row)
    return tuple(e.run_id for e in _breaches(ended, judged) if scope in e.breached)


def weigh_reopening(
    rule: RuleConfig,
    outcome: RuleOutcome,
    alerts: Sequence[Alert],
    since: Mapping[Scope, Comparison],
) -> tuple[RuleOutcome, list[Alert]]:
    """Return a breach, and the alerts it rests on, with what is said of the scopes told of before.

    `since` holds their comparisons with the runs in which they were last found good. If nothing has
    become worse since then, and no other scope breaches, the breach opens no alert.
    """
    said = [_said(rule, alert, since) for alert in alerts]
    decided = [alert for alert in said if alert.is_decided]
    risen = [alert for alert in decided if _counts(rule, alert, since)]
    named = next((alert for alert in decided if alert.scope == outcome.scope), None)
    if not risen:
        words = outcome.words if named is None else named.words
        return replace(outcome, opens=False, words=words), said
    worst = named if named in risen else _worst(rule, risen)
    return replace(outcome, **{name: getattr(worst, name) for name in _READING}), said


def to_closed(outcome: RuleOutcome) -> RuleOutcome:
    """Return what an outcome is to an alert that nobody was told of: one to stay closed, or not."""
    return outcome if outcome.opens else replace(outcome, outcome="between")


def _breaches(ended: Ended, judged: Sequence[Judged]) -> list[Judged]:
    return [
        each
        for each in judged
        if each.outcome == "breach" and ended.opened_at <= each.moment <= ended.resolved_at
    ]


def _clear_at_the_end(nights: Sequence[Judged]) -> tuple[str, ...]:
    row: list[str] = []
    for each in reversed(nights):
        if each.outcome in ("breach", "between"):
            break
        if each.outcome == "clear":
            row.append(each.run_id)
    return tuple(reversed(row))


def _counts(rule: RuleConfig, alert: Alert, since: Mapping[Scope, Comparison]) -> bool:
    """A value that is not finite is no matter of chance."""
    known = since.get(alert.scope)
    return known is None or alert.value is None or known.established * sign(rule) > 0


def _said(rule: RuleConfig, alert: Alert, since: Mapping[Scope, Comparison]) -> Alert:
    known = since.get(alert.scope)
    if known is None or alert.value is None:
        return alert
    where = "above" if known.difference > 0 else "below"
    change = f"{number(abs(known.difference))} {where}" if known.difference else "the same as"
    words = f"{change} what was last found good"
    if not _counts(rule, alert, since):
        words = f"an alert on it has ended, and it is not clearly worse since: {words}"
    return replace(alert, words=f"{alert.words}; {words}")


def _worst(rule: RuleConfig, risen: Sequence[Alert]) -> Alert:
    def beyond(alert: Alert) -> float:
        return math.inf if alert.value is None else sign(rule) * (alert.value - alert.threshold)

    return max(risen, key=beyond)
