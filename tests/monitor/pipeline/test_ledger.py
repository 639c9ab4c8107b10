"""Who measures what: every unit leaves once and in order, whatever happens to the workers."""

import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.capture.course import Course
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.shards.partials import Partial, units_of
from quantwatch.domain import Prompt, Suite
from quantwatch.errors import (
    CaptureError,
    ModelError,
    PromptError,
    ResourceError,
    RunStoppedError,
    WorkersLostError,
)
from quantwatch.pipeline.executors.driver import Driver, first_difference
from quantwatch.pipeline.executors.job import Done, Event, Failed, Job, Lost, Opened
from quantwatch.pipeline.executors.ledger import Ledger


@given(
    num_units=st.integers(0, 12),
    num_workers=st.integers(1, 4),
    window=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_every_unit_leaves_once_and_in_order(
    num_units: int, num_workers: int, window: int, seed: int
) -> None:
    """Catches a unit that is lost, doubled or out of order, and one that two workers have."""
    chance, ledger = random.Random(seed), Ledger[str](num_units, window, attempts=10**6)
    left, held, late = list[str](), dict[int, int](), list[tuple[int, int]]()
    for _ in range(5000):
        if ledger.is_complete:
            break
        worker = chance.randrange(num_workers)
        if worker not in held:
            unit = ledger.take(worker)
            if unit is not None:
                assert unit not in held.values()
                assert len(left) <= unit < len(left) + window
                held[worker] = unit
        elif chance.random() < 0.3:
            late.append((worker, held[worker]))
            assert ledger.lose(worker, "killed") == held.pop(worker)
        else:
            unit = held.pop(worker)
            assert ledger.accept(worker, unit, f"unit {unit}")
            assert not ledger.accept(worker, unit, "once more")
        if late and chance.random() < 0.2:
            ghost, unit = late.pop()
            if held.get(ghost) != unit:
                assert not ledger.accept(ghost, unit, "of a ghost")
        left += ledger.ready()
    assert left == [f"unit {n}" for n in range(num_units)]
    assert list(ledger.ready()) == []


def test_what_was_lost_goes_first() -> None:
    """Catches a retry behind everything else: what came after it would wait in memory."""
    ledger = Ledger[str](5, window=10)
    assert [ledger.take(worker) for worker in range(3)] == [0, 1, 2]
    assert ledger.lose(1, "killed") == 1
    assert ledger.lose(1, "killed") is None
    ledger.accept(0, 0, "zero")
    assert ledger.take(0) == 1
    assert ledger.num_retried == 1
    with pytest.raises(ValueError, match="worker 0 is at unit 1"):
        ledger.take(0)


def test_a_unit_ends_three_workers_at_most() -> None:
    """Catches a batch that kills every process there is, one after the other, forever."""
    ledger = Ledger[str](2, window=10)
    for worker in range(2):
        assert ledger.take(worker) == 0
        assert ledger.lose(worker, f"worker {worker} was killed") == 0
    assert ledger.take(2) == 0
    with pytest.raises(WorkersLostError, match=r"3 workers ended over it \(worker 0 was.*; ") as e:
        ledger.lose(2, "worker 2 was killed")
    assert e.value.unit == 0


SUITE = Suite(
    "test", "ab" * 32, tuple(Prompt(n, "c", "t", (1, 2, 3), (), score_start=0) for n in range(6))
)
COURSE = Course(SUITE, CapturePlan(batch_tokens=3, isolated_fraction=0.0), 64)
FACTS = {"threads": 1, "variables": {"A": None}}


def _partial(unit: int, tokens: int = 3) -> Partial:
    return Partial(unit, (), (), CaptureReport(), {}, {}, tokens)


class Crew:
    """Workers that do what a script says when they are given a unit: done, or else."""

    def __init__(
        self,
        size: int,
        script: Mapping[tuple[int, int], str],
        room: int = 99,
        late: Callable[[int], Event] = lambda number: Opened(number, FACTS, "here:1"),
    ) -> None:
        self.size = size
        self._room = room
        self._late = late
        self.closed = 0
        self._script = script
        self._events: list[Event] = [Opened(n, FACTS, "here:1") for n in range(size)]
        self.given: list[tuple[int, int]] = []

    def hire(self) -> int:
        if self.size >= self._room:
            raise OSError("no memory")
        self.size += 1
        self._events.append(self._late(self.size - 1))
        return self.size - 1

    def give(self, worker: int, unit: int) -> None:
        self.given.append((worker, unit))
        does = self._script.get((worker, unit), "done")
        if does == "dies":
            self._events.append(Lost(worker, f"worker {worker} was killed"))
        elif does == "fails":
            self._events.append(Failed(worker, unit, CaptureError("a tap fired twice")))
        elif does == "answers as it dies":
            self._events.append(Lost(worker, f"worker {worker} was killed"))
            self._events.append(Done(worker, _partial(unit, 1000), 7))
        else:
            self._events.append(Done(worker, _partial(unit), 5))

    def wait(self, timeout_s: float) -> Event | None:
        return self._events.pop(0) if self._events else None

    def close(self) -> None:
        self.closed += 1


class Steps:
    def __init__(self) -> None:
        self.done = 0

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        self.done += tokens


def _driver(crew: Any, facts: Any = FACTS) -> Driver:
    told = {"executor": "test", "notes": []}
    return Driver(cast(Job, None), facts, lambda *_: cast(Any, crew), told)


def _run(crew: Crew, facts: Any = FACTS) -> tuple[list[int], int, Any]:
    driver, steps = _driver(crew, facts), Steps()
    try:
        units = [partial.unit for partial in driver.partials(COURSE, steps)]
    finally:
        assert crew.closed == 1
    return units, steps.done, driver.told()


def test_dead_workers_cost_nothing_but_time() -> None:
    """Catches tokens and partials of a worker that was thought dead."""
    assert len(units_of(COURSE)) == 6
    crew = Crew(3, {(1, 1): "answers as it dies", (0, 3): "dies"})
    units, tokens, told = _run(crew)
    assert units == [0, 1, 2, 3, 4, 5]
    assert tokens == 18
    assert told == {
        "executor": "test",
        "notes": [],
        "shards": 3,
        "retried": 2,
        "replaced": 1,
        "lost": ["worker 1 was killed", "worker 0 was killed"],
        "peak_memory_bytes": [5, 5, 5],
    }


def test_a_worker_that_is_gone_gets_nothing() -> None:
    crew = Crew(2, {(0, 0): "dies"}, room=2)
    _run(crew)
    assert [worker for worker, _ in crew.given] == [0, *[1] * 6]


def test_a_dead_worker_is_replaced_when_its_batch_is_measured() -> None:
    """Catches a night at half the speed, and a second victim of what killed the first."""
    crew = Crew(2, {(0, 0): "dies"})
    units, tokens, told = _run(crew)
    assert units == [0, 1, 2, 3, 4, 5]
    assert tokens == 18
    assert crew.given[:3] == [(0, 0), (1, 1), (1, 0)]
    assert {worker for worker, _ in crew.given[3:]} == {1, 2}
    assert (told["shards"], told["replaced"], told["retried"]) == (2, 1, 1)


def test_a_lonely_worker_is_replaced_at_once() -> None:
    """Catches a run that ends with its only process, and a batch that is forgotten then."""
    crew = Crew(1, {(0, 3): "dies"})
    units, _, told = _run(crew)
    assert units == [0, 1, 2, 3, 4, 5]
    assert crew.given[3:] == [(0, 3), (1, 3), (1, 4), (1, 5)]
    assert (told["replaced"], told["lost"]) == (1, ["worker 0 was killed"])


def test_nobody_is_started_for_the_last_batches() -> None:
    """Catches models that are loaded once more for nothing."""
    crew = Crew(2, {(0, 4): "dies"})
    units, _, told = _run(crew)
    assert units == [0, 1, 2, 3, 4, 5]
    assert (told["lost"], told["replaced"]) == (["worker 0 was killed"], 0)


def test_no_more_are_replaced_than_began() -> None:
    """Catches processes that are started and die for a whole night."""
    deaths = dict.fromkeys(((0, 0), (1, 1), (2, 2)), "dies")
    with pytest.raises(
        WorkersLostError,
        match=r"no worker is left, the last one at batch 1 \(prompt 1\): all 2 are gone \(worker 0 "
        r"was killed; worker 1 was killed\)",
    ):
        _run(Crew(1, deaths))


def test_where_nobody_can_be_started_the_others_go_on() -> None:
    """Catches a run that ends because there is no memory for one more process."""
    units, _, told = _run(Crew(2, {(0, 0): "dies"}, room=2))
    assert units == [0, 1, 2, 3, 4, 5]
    assert told["replaced"] == 0
    assert told["lost"] == [
        "worker 0 was killed",
        "no other worker could be started: no memory",
    ]
    with pytest.raises(
        WorkersLostError, match=r"the only worker is gone \(.*; no other .*memory\)"
    ):
        _run(Crew(1, {(0, 0): "dies"}, room=1))


LATE: dict[str, tuple[Callable[[int], Event], str]] = {
    "has no memory": (
        lambda n: Failed(n, None, ResourceError("not enough memory")),
        "worker 2, which loads the models again: not enough memory",
    ),
    "is killed as it loads": (lambda n: Lost(n, f"worker {n} was killed"), "worker 2 was killed"),
    "loads another checkpoint": (
        lambda n: Opened(n, {**FACTS, "threads": 2}, "here:1"),
        "worker 2 (here:1) would not measure the same numbers: threads is 2 there and 1 here",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_a_replacement_that_is_none_ends_nothing(case: str) -> None:
    """Catches a night that ends by a worker it could do without, and one more that goes its way."""
    late, words = LATE[case]
    crew = Crew(2, {(0, 0): "dies"}, late=late)
    units, tokens, told = _run(crew)
    assert (units, tokens) == ([0, 1, 2, 3, 4, 5], 18)
    assert {worker for worker, _ in crew.given} == {0, 1}
    assert (crew.size, told["replaced"]) == (3, 0)
    assert told["lost"] == ["worker 0 was killed", f"no other worker could be started: {words}"]


def test_a_replacement_with_other_numbers_is_refused() -> None:
    """Catches a worker that is taken on without a look, since the run has begun."""
    crew = Crew(1, {(0, 0): "dies"})
    hire = crew.hire

    def other() -> int:
        worker = hire()
        crew._events[-1] = Opened(worker, {**FACTS, "threads": 2}, "there:9")
        return worker

    crew.hire = other  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"worker 1 \(there:9\) would not measure the same"):
        _run(crew)


def test_a_stop_is_heard_while_nothing_happens() -> None:
    """Catches a cancelled run that waits for its workers' next batch."""
    crew = Crew(1, {})
    crew._events.clear()  # busy with something long

    class Stopped(Steps):
        def advance(self, tokens: int) -> None:
            raise RunStoppedError("cancelled", "user")

    with pytest.raises(RunStoppedError):
        list(_driver(crew).partials(COURSE, Stopped()))
    assert crew.closed == 1


def test_errors_pass_as_they_are() -> None:
    """Catches a run that fails for another reason than it would in one process."""
    with pytest.raises(CaptureError, match=r"^a tap fired twice$"):
        _run(Crew(2, {(1, 1): "fails"}))


def test_an_error_of_loading_names_the_worker() -> None:
    """Catches a missing file on another machine that seems to be missing here."""
    crew = Crew(1, {})
    crew._events = [Failed(0, None, PromptError("no such file"))]
    with pytest.raises(
        PromptError, match=r"^worker 0, which loads the models again: no such file$"
    ):
        _run(crew)


def test_other_numbers_are_refused() -> None:
    """Catches a worker with another processor, library or number of threads."""
    with pytest.raises(
        ModelError, match=r"^worker 0 \(here:1\) would not measure the same numbers: threads is 1 "
    ):
        _run(Crew(1, {}), {**FACTS, "threads": 2})


def test_the_first_difference_is_named() -> None:
    assert first_difference(FACTS, dict(FACTS)) is None
    words = first_difference(FACTS, {"threads": 1, "variables": {"A": "1"}})
    assert words == "variables: A is '1' there and None here"
    assert first_difference({}, {"more": 1}) == "more is 1 there and None here"
