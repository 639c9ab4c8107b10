"""What a succeeded run means to the alerts: states, episodes, messages, confirmation runs.

All of it is one transaction with the run's results. Metric alerts move here and nowhere else, so
that trouble of the monitor itself never becomes one. `watch` does what no run does.
"""

from functools import partial

from sqlalchemy.orm import Session

from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import RunResult, RunStatus
from quantwatch.pipeline import telling
from quantwatch.pipeline.run_alerts import RunAlerts
from quantwatch.pipeline.service_alerts import judge_service
from quantwatch.pipeline.watching import close_alert, note_trouble, watch
from quantwatch.store import confirmations, watched
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
    run = RunAlerts(session, known.id, result, check, at)
    changes = run.move()
    changes += judge_service(session, known, check, at.moment)
    telling.tell(session, at, changes)
    if run.wants_confirmation:
        confirmations.queue_confirmation(session, result.run_id)
