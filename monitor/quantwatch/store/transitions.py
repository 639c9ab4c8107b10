"""The one UPDATE that moves a run: guarded by the table of `domain.lifecycle`."""

from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from quantwatch.domain import RunEvent
from quantwatch.domain.lifecycle import sources, target
from quantwatch.store.tables import RunRow


def change(
    session: Session, run_id: str, event: RunEvent, values: dict[str, Any], *guards: Any
) -> bool:
    """Apply an event to a run; say whether the run was as expected.

    False means that it is in a state the event can't come from, or a guard (the lease's token)
    doesn't hold: somebody else was there first.
    """
    states = [status.value for status in sources(event)]
    to = target(event)
    status = RunRow.status if to is None else to.value
    statement = (
        update(RunRow)
        .where(RunRow.id == run_id, RunRow.status.in_(states), *guards)
        .values({**values, "status": status})
        .returning(RunRow.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).first() is not None
