"""Hand units to workers, take what they measured, and go on without those that died."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from quantwatch.capture.course import Course
from quantwatch.capture.shards.partials import Partial, Unit, describe_unit, units_of
from quantwatch.domain import Json, Progress
from quantwatch.errors import ModelError, QuantwatchError, WorkersLostError
from quantwatch.pipeline.executors.job import Done, Event, Failed, Job, Lost, Opened
from quantwatch.pipeline.executors.ledger import Ledger

_TICK_S = 0.25
"""How soon a cancellation is seen."""
_AHEAD = 4
"""Units per worker that may wait for their turn."""


class Crew(Protocol):
    """Workers, each with a process of its own; they open the job by themselves."""

    @property
    def size(self) -> int:
        """Number of workers, which are 0 … size − 1, dead ones included."""

    def hire(self) -> int:
        """Start one more worker; return its number. Raises OSError where there is no room."""

    def give(self, worker: int, unit: int) -> None:
        """Have a worker measure a unit. If it is dead, `wait` says so."""

    def wait(self, timeout_s: float) -> Event | None:
        """Return what happened next, None if nothing did in time."""

    def close(self) -> None:
        """End all workers at once."""


class Hire(Protocol):
    """Starts workers."""

    def __call__(self, job: Job, most: int) -> Crew:
        """Start as many as are wanted, `most` at most."""


class Driver:
    """A `Spread` over a crew."""

    def __init__(self, job: Job, facts: Json, hire: Hire, told: Json) -> None:
        self._job = job
        self._facts = facts
        self._hire = hire
        self._told: dict[str, object] = dict(told)
        self._shift: _Shift | None = None
        self._peaks: dict[int, int] = {}

    def partials(self, course: Course, progress: Progress) -> Generator[Partial]:
        """Yield every unit's partial in order; the workers end with it, however it ends."""
        units = units_of(course)
        with self._crew(len(units)) as crew:
            ledger = Ledger[Partial](len(units), _AHEAD * crew.size)
            shift = self._shift = _Shift(crew, ledger, units, self._facts)
            while not ledger.is_complete:
                event = shift.next_event()
                progress.advance(self._noted(event))
                yield from ledger.ready()

    def told(self) -> Json:
        """Return workers, threads, what was lost, replaced and measured again, and memory."""
        shift = self._shift
        return {
            **self._told,
            "retried": shift.num_retried if shift else 0,
            "replaced": shift.num_replaced if shift else 0,
            "lost": list(shift.lost) if shift else [],
            "peak_memory_bytes": [self._peaks[worker] for worker in sorted(self._peaks)],
        }

    @contextmanager
    def _crew(self, num_units: int) -> Iterator[Crew]:
        crew = self._hire(self._job, num_units)
        self._told["shards"] = crew.size
        try:
            yield crew
        finally:
            crew.close()

    def _noted(self, event: Event | None) -> int:
        """Keep a worker's peak memory; return the tokens that are done with an event."""
        if isinstance(event, Done):
            self._peaks[event.worker] = event.peak_memory_bytes
            return event.partial.num_tokens
        return 0


class _Shift:
    """Who is there, and at what."""

    def __init__(
        self, crew: Crew, ledger: Ledger[Partial], units: tuple[Unit, ...], facts: Json
    ) -> None:
        self._crew, self._ledger = crew, ledger
        self._units = units
        self._facts = facts
        self._there = set(range(crew.size))
        self._idle = set[int]()
        self._opened = set[int]()
        self._wanted = self._spare = crew.size
        self.num_replaced = 0
        self.lost: list[str] = []
        """How workers ended."""

    @property
    def num_retried(self) -> int:
        """Units that were handed out again."""
        return self._ledger.num_retried

    def next_event(self) -> Event | None:
        """Give everybody work and return what happened next, if it counts.

        Raises what a worker raised, and WorkersLostError when a unit ends one after the other, or
        nobody is left.
        """
        self._replace()
        for worker in sorted(self._idle):
            if (unit := self._ledger.take(worker)) is not None:
                self._idle.discard(worker)
                self._crew.give(worker, unit)
        event = self._crew.wait(_TICK_S)
        if event is None or event.worker not in self._there:
            return None
        if isinstance(event, Opened):
            if not self._is_welcome(event):
                return None
        elif isinstance(event, Done):
            if not self._ledger.accept(event.worker, event.partial.unit, event.partial):
                return None
        elif isinstance(event, Failed):
            if event.unit is not None or not self._is_spare(event.worker):
                raise self._error(event)
            self._do_without(event.worker, str(self._error(event)))
            return None
        else:
            self._lose(event)
            return event
        self._idle.add(event.worker)
        return event

    def _is_welcome(self, event: Opened) -> bool:
        """Refuse a worker whose numbers may be other ones, naming the first cause."""
        words = first_difference(self._facts, event.facts)
        if words is None:
            self._opened.add(event.worker)
            return True
        told = f"worker {event.worker} ({event.place}) would not measure the same numbers: {words}"
        if self._is_spare(event.worker):
            self._do_without(event.worker, told)
            return False
        late = event.worker >= self._wanted
        raise ModelError(f"{told}; it began later than the run: run it again" if late else told)

    def _is_spare(self, worker: int) -> bool:
        """Say whether a worker came later, in the place of a dead one, and others are there."""
        return worker >= self._wanted and len(self._there) > 1

    def _do_without(self, worker: int, why: str) -> None:
        """Go on with those that are there, and start nobody else: it would go the same way."""
        self._there.discard(worker)
        self._spare = 0
        self.num_replaced -= 1
        self.lost.append(f"no other worker could be started: {why}")

    def _error(self, event: Failed) -> BaseException:
        """Return what ends the run: the error itself, if it is of a unit as anywhere else."""
        error = event.error
        if event.unit is not None or not isinstance(error, QuantwatchError):
            return error
        return type(error)(f"worker {event.worker}, which loads the models again: {error}")

    def _lose(self, event: Lost) -> None:
        if event.worker not in self._opened and self._is_spare(event.worker):
            self._do_without(event.worker, event.why)
            return
        self._there.discard(event.worker)
        self._idle.discard(event.worker)
        self.lost.append(event.why)
        try:
            unit = self._ledger.lose(event.worker, event.why)
        except WorkersLostError as error:
            name = self._named(error.unit)
            raise WorkersLostError(f"{name} can't be measured: {error}", error.unit) from None
        self._replace()
        if self._there:
            return
        at = "" if unit is None else f", the last one at {self._named(unit)}"
        all_of = "the only worker is" if self._crew.size == 1 else f"all {self._crew.size} are"
        raise WorkersLostError(
            f"no worker is left{at}: {all_of} gone ({'; '.join(self.lost)})", unit
        )

    def _replace(self) -> None:
        """Start a worker in the place of a dead one, where that gains time; as many as began.

        What killed one may be a lack of memory, and that would kill the next as well: so while
        anybody is left, what it was at is measured first, by fewer workers than before.
        """
        left = len(self._there)
        if not self._spare or left == self._wanted:
            return
        if left and (self._ledger.has_open_losses or self._ledger.num_waiting <= left):
            return
        try:
            self._there.add(self._crew.hire())
        except OSError as error:
            self._spare = 0
            self.lost.append(f"no other worker could be started: {error}")
        else:
            self._spare -= 1
            self.num_replaced += 1

    def _named(self, unit: int | None) -> str:
        return "no batch" if unit is None else describe_unit(self._units[unit], unit)


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """Return what of two records of facts differs first, in words; None when they are equal."""
    for name in (*ours, *theirs):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return f"{name}: {first_difference(one, other)}"
        return f"{name} is {other!r:.80} there and {one!r:.80} here"
    return None
