"""One succeeded run on its way through the alerts of its check."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sqlalchemy.orm import Session

from quantwatch.alerts.episodes import Effect, Policy, Reason, RunRef, Step, close, step
from quantwatch.alerts.flapping import damped
from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.recounting import step_again
from quantwatch.alerts.reopening import to_closed
from quantwatch.config.rules import DRIFT
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RuleOutcome, RunResult
from quantwatch.pipeline import telling
from quantwatch.pipeline.evidence import evidence_of
from quantwatch.pipeline.moves import Changed, Facts, apply, state_of
from quantwatch.store import confirmations, episodes, evaluations
from quantwatch.store.episodes import StoredAlert


@dataclass(frozen=True, slots=True)
class Again:
    """A run that was judged before: which judgement this is, and what it may still move."""

    version: int
    moves: bool
    """False: it is recorded, because a newer run has moved the alerts since."""
    earlier: Mapping[int, str]
    """The outcomes of the judgement before, by alert."""


_FIRST = Again(version=1, moves=True, earlier={})


class RunAlerts:
    """One run on its way through the alerts of its check."""

    def __init__(
        self,
        session: Session,
        check_id: int,
        result: RunResult,
        check: CheckConfig,
        at: telling.Desk,
        again: Again = _FIRST,
    ) -> None:
        self._session, self._result, self._check, self._at = session, result, check, at
        self._again = again
        known = confirmations.origin(session, result.run_id)
        self.ref = RunRef(result.run_id, known.confirms)
        # A second confirmation of one run is never queued, so none is waited for.
        asked = again is not _FIRST and confirmations.was_asked(session, result.run_id)
        self._policy = Policy(
            confirm=check.alerting.confirm and known.repeatable and not asked,
            missing_runs=check.alerting.missing_runs,
        )
        keys = [(outcome.candidate, outcome.rule) for outcome in result.outcomes]
        self._alerts = episodes.find_alerts(session, check_id, keys)
        self._open = episodes.open_alerts(session, check_id)
        ids = [alert.id for alert in self._alerts.values()]
        self._flapping = telling.flapping(session, ids, at)
        self._pinned = frozenset(_pinned_rules(check))
        self.wants_confirmation = False

    def move(self) -> list[Changed]:
        """Move each rule's alert, and end those that nothing stands behind any more.

        A run that moves nothing is recorded all the same.
        """
        changes = self._judge_all()
        if self.ref.confirms is not None or not self._again.moves:
            return changes
        return [*changes, *self._close_deleted()]

    def _judge_all(self) -> list[Changed]:
        return [
            changed
            for outcome in self._result.outcomes
            for changed in self._judge(self._alerts[outcome.candidate, outcome.rule], outcome)
        ]

    def _judge(self, alert: StoredAlert, outcome: RuleOutcome) -> list[Changed]:
        run_id, moment = self._result.run_id, self._at.moment
        version = self._again.version
        new = evaluations.note_evaluation(self._session, alert.id, run_id, outcome, moment, version)
        if not new or not self._again.moves:
            return []
        if self.ref.confirms is not None and alert.awaits_run_id != self.ref.confirms:
            return []
        if alert.id in self._flapping:
            # Who comes back every other night has to stay away for longer.
            outcome = damped(outcome, self._check.alerting.flapping)
        moved = self._step(alert, outcome)
        self.wants_confirmation |= Effect.CONFIRM in moved.effects
        breach = outcome.outcome == "breach"
        kept = evidence_of(self._result, outcome, self.ref) if breach else None
        return apply(self._session, alert, moved, Facts(moment, outcome, kept, run_id))

    def _step(self, alert: StoredAlert, outcome: RuleOutcome) -> Step:
        before, moved = state_of(alert), self._baseline_moved(alert)
        if not before.state.is_told:
            outcome = to_closed(outcome)
        earlier = self._again.earlier.get(alert.id)
        if earlier is None:
            return step(before, outcome, self.ref, self._policy, baseline_moved=moved)
        return step_again(before, earlier, outcome, self.ref, self._policy, baseline_moved=moved)

    def _baseline_moved(self, alert: StoredAlert) -> bool:
        """Whether the episode was opened against another pinned run. Others move every night."""
        if alert.episode is None or (alert.candidate, alert.rule) not in self._pinned:
            return False
        return bool(alert.episode.evidence.get("baseline") != self._result.baseline_run_id)

    def _close_deleted(self) -> list[Changed]:
        """Close what no rule and no candidate of the check stands behind any more."""
        step_of = partial(close, reason=Reason.RULE_DELETED)
        return [
            changed
            for alert in self._open
            if self._is_deleted(alert)
            for changed in apply(
                self._session, alert, step_of(state_of(alert)), Facts(self._at.moment)
            )
        ]

    def _is_deleted(self, alert: StoredAlert) -> bool:
        """A candidate that the run says nothing of keeps its alerts as they are."""
        if not alert.candidate:
            return False
        if all(candidate.name != alert.candidate for candidate in self._check.candidates):
            return True
        judged = any(candidate == alert.candidate for candidate, _ in self._alerts)
        return judged and (alert.candidate, alert.rule) not in self._alerts


def _pinned_rules(check: CheckConfig) -> Iterator[tuple[str, str]]:
    """Yield the rules that compare with a pinned run, by candidate."""
    if check.baseline.kind != "pinned":
        return
    for candidate in check.candidates:
        for rule in rules_for(check, candidate):
            if rule.kind == "baseline" or rule.metric == DRIFT:
                yield candidate.name, rule.name
