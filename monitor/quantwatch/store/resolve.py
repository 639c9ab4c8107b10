"""What a user calls a run: its id, the beginning of it, `latest`, or a check's name."""

from difflib import get_close_matches

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from quantwatch.errors import NotFoundError, UserError
from quantwatch.store.session import Database
from quantwatch.store.tables import CheckRow, RunRow

_SHOWN = 5


def resolve_run_id(db: Database, text: str) -> str:
    """Return the full id. `latest` and a check's name mean the newest run that has ended.

    Raises UserError that names the candidates when none or several fit.
    """
    with db.reader() as session:
        if session.get(RunRow, text) is not None:
            return text
        newest = _newest(session, text)
        if newest is not None:
            return newest
        begin_alike = select(RunRow.id).where(RunRow.id.startswith(text.upper(), autoescape=True))
        found = _ids(session, begin_alike) if text else []
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(found[:_SHOWN]) + (", …" if len(found) > _SHOWN else "")
            raise UserError(f"Several runs begin with {text!r}: {names}. Give more of the id.")
        raise NotFoundError(f"There is no run or check {text!r}. {_choices(session)}")


def require_check(session: Session, name: str) -> None:
    """Raise NotFoundError, with the checks there are, unless there is one of that name."""
    if session.scalar(select(CheckRow.id).where(CheckRow.name == name)) is None:
        known = list(session.scalars(select(CheckRow.name).order_by(CheckRow.name)))
        close = "".join(f"Did you mean {other}? " for other in get_close_matches(name, known, n=1))
        said = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        raise NotFoundError(f"There is no check {name!r}. {close}Checks: {said or 'none yet'}.")


def _newest(session: Session, text: str) -> str | None:
    query = select(RunRow.id).where(RunRow.finished_at.is_not(None))
    if text != "latest":
        query = query.join(CheckRow, CheckRow.id == RunRow.check_id).where(CheckRow.name == text)
    return next(iter(_ids(session, query)), None)


def _ids(session: Session, query: Select[str]) -> list[str]:
    """Return the newest of the runs first, one more than is shown."""
    newest = query.order_by(RunRow.started_at.desc(), RunRow.id.desc()).limit(_SHOWN + 1)
    return list(session.scalars(newest))


def _choices(session: Session) -> str:
    runs = _ids(session, select(RunRow.id))[:_SHOWN]
    if not runs:
        return "The database holds no runs yet; `quantwatch check run NAME` makes one."
    checks = session.scalars(select(CheckRow.name).order_by(CheckRow.name).limit(_SHOWN))
    return f"Newest runs: {', '.join(runs)}. Checks: {', '.join(checks)}."
