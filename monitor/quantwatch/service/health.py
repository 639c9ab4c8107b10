"""/healthz: does this process work? /readyz: can it do its work now?"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantwatch.errors import QuantwatchError
from quantwatch.observability.redaction import scrub
from quantwatch.service.supervisor import Part
from quantwatch.store import figures
from quantwatch.store.schema import require_current, state_of
from quantwatch.store.session import Database

LONGEST_SILENCE_S = 90.0
"""How old the newest look of a scheduler may be: looks are up to 30 s apart, told every 10 s."""
CACHED_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered: fine or not, with the reason by topic."""

    is_fine: bool
    details: dict[str, Any]


class Health:
    """Looks at the parts of this process, the database and the scheduler's clock."""

    def __init__(
        self,
        db: Database,
        parts: Callable[[], Sequence[Part]],
        *,
        schedules: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._parts, self._schedules, self._clock = db, parts, schedules, clock
        self._lock = threading.Lock()
        self._known: tuple[float, dict[str, str]] | None = None

    def live(self) -> Answer:
        """Say whether every part's threads work."""
        words: dict[str, str] = {}
        for part in self._parts():
            # Several workers are one part to those who ask: dead if one is.
            well = _is_well(part) and words.get(part.name) != "dead"
            words[part.name] = "alive" if well else "dead"
        return Answer("dead" not in words.values(), {"parts": words})

    def ready(self) -> Answer:
        """Say whether the database answers with our schema, and whether slots are looked for."""
        live, asked = self.live(), self._asked()
        fine = live.is_fine and all(words == "ok" for words in asked.values())
        return Answer(fine, {**asked, **live.details})

    def _asked(self) -> dict[str, str]:
        """Ask the database, at most every two seconds however often we are asked."""
        with self._lock:
            moment = self._clock()
            if self._known is None or moment - self._known[0] >= CACHED_S:
                self._known = moment, self._ask()
            return self._known[1]

    def _ask(self) -> dict[str, str]:
        try:
            with self._db.reader() as session:
                require_current(state_of(session.connection(), self._db.name), self._db.name)
                silent_s = figures.scheduler_silence_s(session) if self._schedules else 0.0
        except QuantwatchError as error:
            return {"database": scrub(str(error))}
        found = {"database": "ok"}
        return found | ({"scheduler": _scheduler(silent_s)} if self._schedules else {})


def _scheduler(silent_s: float | None) -> str:
    """Judge any scheduler's newest look: one that stands by is ready while another one works."""
    if silent_s is None:
        return "has not looked yet"
    if silent_s > LONGEST_SILENCE_S:
        return f"has not looked for {silent_s:.0f} s; at most {LONGEST_SILENCE_S:.0f} s are well"
    return "ok"


def _is_well(part: Part) -> bool:
    return part.is_alive and part.failure is None
