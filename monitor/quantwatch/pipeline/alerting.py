"""What a succeeded run means to the alerts: states, episodes, messages, confirmation runs.

All of it is one transaction with the run's results. Metric alerts move here and nowhere else, so
that trouble of the monitor itself never becomes one. `watch` does what no run does.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from sqlalchemy.orm import Session

from quantwatch.alerts.episodes import Effect, Policy, Reason, RunRef, close, step
from quantwatch.alerts.flapping import PATIENCE
from quantwatch.alerts.overrides import rules_for
from quantwatch.config.rules import DRIFT
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import RuleOutcome, RunResult, RunStatus
from quantwatch.pipeline import telling
from quantwatch.pipeline.evidence import evidence_of
from quantwatch.pipeline.moves import Changed, Facts, apply, state_of
from quantwatch.pipeline.service_alerts import judge_service
from quantwatch.pipeline.watching import close_alert, note_trouble, watch
from quantwatch.store import confirmations, episodes, evaluations, watched
from quantwatch.store.episodes import StoredAlert
from quantwatch.store.runs import Settle

__all__ = ["close_alert", "note_trouble", "settle", "settler", "watch"]


def settler(check: CheckConfig, service: Config) -> Settle:
    """Return what `finish_run` takes as `then`."""
    return partial(settle, check=check, service=service)


def settle(session: Session, result: RunResult, check: CheckConfig, service: Config) -> None:
    """Move the alerts of a check by what a run says, in the transaction that ends the run.

    A run that did not succeed moves nothing. A run that was settled before changes nothing.
    """
    if result.status is not RunStatus.SUCCEEDED:
        return
    known = watched.hold_check(session, result.check)
    assert known is not None
    at = telling.desk(session, result.check, check, service)
    run = _Run(session, known.id, result, check, at)
    changes = run.judge() if run.ref.confirms else [*run.judge(), *run.close_deleted()]
    changes += judge_service(session, known, check, at.moment)
    telling.tell(session, at, changes)
    if run.wants_confirmation:
        confirmations.queue_confirmation(session, result.run_id)


class _Run:
    """One run on its way through the alerts of its check."""

    def __init__(
        self,
        session: Session,
        check_id: int,
        result: RunResult,
        check: CheckConfig,
        at: telling.Desk,
    ) -> None:
        self._session, self._result, self._check, self._at = session, result, check, at
        known = confirmations.origin(session, result.run_id)
        self.ref = RunRef(result.run_id, known.confirms)
        self._policy = Policy(
            confirm=check.alerting.confirm and known.repeatable,
            missing_runs=check.alerting.missing_runs,
        )
        keys = [(outcome.candidate, outcome.rule) for outcome in result.outcomes]
        self._alerts = episodes.find_alerts(session, check_id, keys)
        self._open = episodes.open_alerts(session, check_id)
        ids = [alert.id for alert in self._alerts.values()]
        self._flapping = telling.flapping(session, ids, at.moment)
        self._pinned = frozenset(_pinned_rules(check))
        self.wants_confirmation = False

    def judge(self) -> list[Changed]:
        """Move each rule's alert, unless it was judged on this run before."""
        return [
            changed
            for outcome in self._result.outcomes
            for changed in self._judge(self._alerts[outcome.candidate, outcome.rule], outcome)
        ]

    def _judge(self, alert: StoredAlert, outcome: RuleOutcome) -> list[Changed]:
        run_id, moment = self._result.run_id, self._at.moment
        if not evaluations.note_evaluation(self._session, alert.id, run_id, outcome, moment):
            return []
        if self.ref.confirms is not None and alert.awaits_run_id != self.ref.confirms:
            return []
        if alert.id in self._flapping:
            # Who comes back every other night has to stay away for longer.
            outcome = replace(outcome, leave_runs=PATIENCE * outcome.leave_runs)
        moved = step(
            state_of(alert),
            outcome,
            self.ref,
            self._policy,
            baseline_moved=self._baseline_moved(alert),
        )
        self.wants_confirmation |= Effect.CONFIRM in moved.effects
        breach = outcome.outcome == "breach"
        kept = evidence_of(self._result, outcome, self.ref) if breach else None
        return apply(self._session, alert, moved, Facts(moment, outcome, kept, run_id))

    def _baseline_moved(self, alert: StoredAlert) -> bool:
        """Whether the episode was opened against another pinned run. Others move every night."""
        if alert.episode is None or (alert.candidate, alert.rule) not in self._pinned:
            return False
        return bool(alert.episode.evidence.get("baseline") != self._result.baseline_run_id)

    def close_deleted(self) -> list[Changed]:
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
