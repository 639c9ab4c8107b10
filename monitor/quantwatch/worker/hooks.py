"""What runs mean to the alerts, handed to those who end runs; this alone knows the alerts."""

from typing import TYPE_CHECKING

from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import RunResult, RunStatus
from quantwatch.store.endings import Tell, Trouble

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from quantwatch.worker.performing import Settle

_HEALTH = (RunStatus.FAILED, RunStatus.TIMED_OUT, RunStatus.ABANDONED)


def settling(service: Config) -> "Settle":
    """Return what belongs to the transaction that ends a run with results."""

    def settle(session: "Session", result: RunResult, check: CheckConfig) -> None:
        from quantwatch.pipeline.alerting import settle as move_alerts

        move_alerts(session, result, check, service)

    return settle


def telling(service: Config) -> Tell:
    """Return what belongs to the transaction that ends a run without results.

    Only checks of this configuration are told of at once; others are found by the minute's watch.
    """

    def tell(session: "Session", trouble: Trouble) -> None:
        settings = service.checks.get(trouble.check)
        if settings is None or not (trouble.status in _HEALTH or trouble.quarantined):
            return
        from quantwatch.pipeline.alerting import note_trouble

        note_trouble(session, trouble.check, settings, service)

    return tell
