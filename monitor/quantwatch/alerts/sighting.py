"""Did the monitor see a planted fault, and where does it say that it is? Pure.

Only what the fault has changed counts: a breach that is there without it, at the same scope by the
same rule, shows nothing. The control is the same candidate on the same prompts without the fault;
isolated errors are measured on the reference's own input, so that they are equal bit for bit in
both wherever nothing was planted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantwatch.domain import Alert, CandidateResult, Scope

ISOLATED = "isolated_error"


@dataclass(frozen=True, slots=True)
class Seen:
    """A candidate and what its rules say of it."""

    result: CandidateResult
    alerts: Sequence[Alert]

    def isolated(self, scope: str | None) -> float | None:
        """Return the mean isolated error at a scope."""
        row = None if scope is None else self.result.find(ISOLATED, scope)
        return None if row is None else row.mean


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of a fault. `masked` names the breach behind which it could not be seen."""

    alert: Alert | None = None
    """The breach that shows it best; None: no rule breaches because of it."""
    named: Scope | None = None
    located: bool = False
    masked: Alert | None = None
    before: float = 0.0
    after: float | None = None
    """Mean isolated error at the place, without the fault and with it."""


def sighting(
    place: Scope, planted: Seen, control: Seen | None, counts: Callable[[Alert], bool]
) -> Sighting:
    """Return what was seen of a fault at `place`.

    Without a control everything else is equal to the reference. `counts` tells which breaches can
    be compared at all.
    """
    known = [] if control is None else [each for each in control.alerts if each.is_decided]
    told = {(each.rule, each.scope) for each in known}
    new = [
        each
        for each in planted.alerts
        if each.is_decided and counts(each) and (each.rule, each.scope) not in told
    ]
    before = 0.0 if control is None else control.isolated(place) or 0.0
    after = planted.isolated(place)
    if not new:
        masked = next((each for each in known if _encloses(each.scope, place)), None)
        return Sighting(masked=masked, before=before, after=after)
    named = _named(planted, control, new)
    near = named is not None and (_encloses(named, place) or _encloses(place, named))
    return Sighting(max(new, key=_clarity), named, near, before=before, after=after)


def _named(planted: Seen, control: Seen | None, new: Sequence[Alert]) -> Scope | None:
    """Return where the monitor says it is: its culprit, if that is another or worse than before.

    Else the new breach of an isolated error that has grown most.
    """
    culprit = planted.result.culprit
    scope = None if culprit is None else culprit.scope
    if scope is not None and _growth(scope, planted, control) > 0:
        return scope
    grown = [each.scope for each in new if each.metric == ISOLATED]
    return max(grown, key=lambda each: _growth(each, planted, control), default=None)


def _growth(scope: str, planted: Seen, control: Seen | None) -> float:
    """Return by how much a scope's isolated error has grown; one that is not finite leads."""
    now = planted.isolated(scope)
    before = 0.0 if control is None else control.isolated(scope)
    if now is None:
        return 0.0 if before is None else math.inf
    return now - (before or 0.0)


def _clarity(alert: Alert) -> tuple[bool, float]:
    """Isolated errors show a fault best; among them the one farthest beyond its limit."""
    if alert.value is None:
        return alert.metric == ISOLATED, math.inf
    ratio = abs(alert.value / alert.threshold) if alert.threshold else math.inf
    return alert.metric == ISOLATED, ratio


def _encloses(outer: str, inner: str) -> bool:
    return inner == outer or inner.startswith(f"{outer}.")
