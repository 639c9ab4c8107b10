"""The pure rules of delivery: waits, outcomes, rates, health, suppression."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.delivery import health
from quantwatch.delivery.backoff import MOST_ATTEMPTS, PLAN_S, next_ratio, planned_s, wait_s
from quantwatch.delivery.client import ERROR_CODES, Answer
from quantwatch.delivery.health import Health
from quantwatch.delivery.outcomes import Outcome, outcome_of
from quantwatch.delivery.rates import Bucket, capacity, refill_per_minute
from quantwatch.store.suppression import Told, suppressed

START = datetime(2026, 11, 29, 2, 0, tzinfo=UTC)
attempts = st.integers(1, 12)
ratios = st.floats(0, 1)
chances = st.floats(0, 1, exclude_max=True)


def test_the_plan() -> None:
    """Catches a schedule that is not the documented one: 5 s, 5 m, 30 m, 2 h, 5 h, 10 h, 10 h."""
    hours = [5 / 3600, 1 / 12, 0.5, 2, 5, 10, 10]
    assert [planned_s(n) / 3600 for n in range(1, MOST_ATTEMPTS)] == pytest.approx(hours)


@given(attempts, ratios, chances)
def test_waits_are_bounded(attempt: int, ratio: float, chance: float) -> None:
    """Law: 0.8 to 2.4 times the plan, and longer for a receiver that has been failing."""
    wait = wait_s(attempt, failure_ratio=ratio, chance=chance, retry_after_s=None)
    plan = planned_s(attempt)
    assert 0.8 * plan <= wait < 2.4 * plan + 1e-6
    healthy = wait_s(attempt, failure_ratio=0, chance=chance, retry_after_s=None)
    assert wait >= healthy


@given(attempts, ratios, chances, st.floats(0, 1e9))
def test_retry_after_is_bounded(attempt: int, ratio: float, chance: float, asked: float) -> None:
    """Law: Retry-After is followed between the plan and twice the plan."""
    wait = wait_s(attempt, failure_ratio=ratio, chance=chance, retry_after_s=asked)
    plan = planned_s(attempt)
    assert plan <= wait <= 2 * plan
    if plan <= asked <= 2 * plan:
        assert wait == asked


def test_a_day_of_outage_is_survived_at_the_worst_jitter() -> None:
    """Catches X25: attempts that are used up before a receiver is back after 24 h."""
    ratio, total = 0.0, 0.0
    for attempt in range(1, MOST_ATTEMPTS):
        total += wait_s(attempt, failure_ratio=ratio, chance=0.0, retry_after_s=None)
        ratio = next_ratio(ratio, failed=True)
    assert total > 24 * 3600
    assert total < 2.4 * sum(PLAN_S)


@given(st.lists(st.booleans(), max_size=60), ratios)
def test_ratio_stays_a_ratio(results: list[bool], ratio: float) -> None:
    """Law: between 0 and 1; a success lowers it, a failure raises it."""
    for failed in results:
        before, ratio = ratio, next_ratio(ratio, failed=failed)
        assert 0 <= ratio <= 1
        assert ratio >= before - 1e-12 if failed else ratio <= before


@pytest.mark.parametrize(
    ("answer", "attempt", "expected"),
    [
        pytest.param(Answer(200), 1, ("delivered", "success"), id="200"),
        pytest.param(Answer(204), 8, ("delivered", "success"), id="204"),
        pytest.param(Answer(299), 1, ("delivered", "success"), id="299"),
        pytest.param(Answer(301), 1, ("retry", "failure"), id="301"),
        pytest.param(Answer(304), 8, ("dead", "failure"), id="304-last"),
        pytest.param(Answer(400), 2, ("retry", "failure"), id="400"),
        pytest.param(Answer(400), 3, ("dead", "failure"), id="400-third"),
        pytest.param(Answer(413), 3, ("dead", "failure"), id="413-third"),
        pytest.param(Answer(401), 3, ("retry", "failure"), id="401-third"),
        pytest.param(Answer(403), 8, ("dead", "failure"), id="403-last"),
        pytest.param(Answer(410), 1, ("dead", "gone"), id="410"),
        pytest.param(Answer(429), 1, ("retry", "throttle"), id="429"),
        pytest.param(Answer(502), 1, ("retry", "throttle"), id="502"),
        pytest.param(Answer(503), 8, ("dead", "throttle"), id="503-last"),
        pytest.param(Answer(500), 7, ("retry", "failure"), id="500"),
        pytest.param(Answer(100), 1, ("retry", "failure"), id="100-is-no-success"),
        pytest.param(Answer(error_code="timeout"), 7, ("retry", "failure"), id="timeout"),
        pytest.param(Answer(error_code="timeout"), 8, ("dead", "failure"), id="timeout-last"),
        pytest.param(Answer(error_code="refused_address"), 1, ("dead", "invalid"), id="ssrf"),
    ],
)
def test_outcomes(answer: Answer, attempt: int, expected: tuple[str, str]) -> None:
    """Catches an answer that means something else than §6.3 says."""
    outcome = outcome_of(answer, attempt)
    assert (outcome.next, outcome.effect) == expected
    assert (outcome.error_code is None) == (outcome.next == "delivered")


@pytest.mark.parametrize("code", [code for code in ERROR_CODES if code != "refused_address"])
def test_network_trouble_is_retried(code: str) -> None:
    """Catches a kind of trouble that nobody decided about."""
    assert outcome_of(Answer(error_code=code), 1).next == "retry"


def test_a_test_message_is_tried_once() -> None:
    """Catches a test that is retried for a day."""
    assert outcome_of(Answer(500), 1, once=True).next == "dead"


@given(st.integers(1, 60), st.lists(st.floats(0, 20), max_size=100))
def test_rate_law(per_minute: int, pauses: list[float]) -> None:
    """Law: in no minute more than R messages, however they come."""
    bucket, now = Bucket(0, START - timedelta(days=1)), START
    sent: list[datetime] = []
    for pause in pauses:
        now += timedelta(seconds=pause)
        bucket = bucket.refilled(per_minute, now)
        while bucket.tokens >= 1:
            bucket = bucket.spent()
            sent.append(now)
    for moment in sent:
        window = [one for one in sent if moment <= one < moment + timedelta(seconds=59.999)]
        assert len(window) <= per_minute


@pytest.mark.parametrize("per_minute", [1, 2, 20, 600])
def test_rate_is_reached(per_minute: int) -> None:
    """Catches a limit that is kept by sending nothing."""
    assert capacity(per_minute) >= 1
    assert refill_per_minute(per_minute) >= 1
    bucket = Bucket(0, START).refilled(per_minute, START + timedelta(minutes=2))
    assert bucket.tokens == capacity(per_minute)


def test_clock_that_goes_back_adds_nothing() -> None:
    """Catches a bucket that is filled by a clock jump."""
    bucket = Bucket(0, START)
    assert bucket.refilled(20, START - timedelta(minutes=5)) == bucket
    assert bucket.refilled(20, START - timedelta(hours=1)).tokens == 0


def streak(*outcomes: Outcome, hours: float = 1) -> list[Health]:
    found, known = [], Health()
    for number, outcome in enumerate(outcomes):
        known = health.after(known, outcome, START + timedelta(hours=hours * number))
        found.append(known)
    return found


FAILED = Outcome("retry", "failure", "http_500")
DONE = Outcome("delivered", "success")


def test_notice_at_the_fourth_failure() -> None:
    """Catches a notice at each failure, or none."""
    before = Health()
    told = []
    for now in streak(*[FAILED] * 6):
        told.append(health.notices(before, now, FAILED))
        before = now
    assert told == [(), (), (), ("endpoint.failing",), (), ()]


def test_disabled_after_five_days() -> None:
    """Catches an endpoint that is disabled too early, or by the number of failures."""
    found = streak(*[FAILED] * 6, hours=24)
    assert [one.state for one in found] == ["enabled"] * 5 + ["disabled_auto"]
    again = streak(FAILED, FAILED, DONE, FAILED, FAILED, FAILED, FAILED, hours=24)
    assert again[-1].state == "enabled"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome("dead", "gone", "http_410"), "disabled_gone"),
        (Outcome("dead", "invalid", "refused_address"), "invalid"),
        (Outcome("dead", "failure", "http_400"), "enabled"),
    ],
    ids=["gone", "invalid", "exhausted"],
)
def test_states(outcome: Outcome, state: str) -> None:
    """Catches a dead message that disables its endpoint, or 410 that does not."""
    [now] = streak(outcome)
    assert now.state == state
    kind = "endpoint.exhausted" if state == "enabled" else "endpoint.disabled"
    assert health.notices(Health(), now, outcome) == (kind,)


def row(number: int, state: str, kind: str, episodes: str, **fields: bool) -> Told:
    known = {"left_machine": state == "delivered", "complete": True, "ends_all": False}
    return Told(number, state, type=kind, episodes=frozenset(episodes), **(known | fields))


FIRE, END = "alert.firing", "alert.resolved"
CASES: dict[str, tuple[list[Told], set[int]]] = {
    "nothing resolved": ([row(1, "pending", FIRE, "a")], set()),
    "never told": ([row(1, "pending", FIRE, "a"), row(2, "pending", END, "a")], {1, 2}),
    "told": ([row(1, "delivered", FIRE, "a"), row(2, "pending", END, "a")], set()),
    "tried": (
        [row(1, "retry_wait", FIRE, "a", left_machine=True), row(2, "pending", END, "a")],
        {1},
    ),
    "on its way": ([row(1, "sending", FIRE, "a"), row(2, "pending", END, "a")], set()),
    "in a digest": ([row(1, "grouped", FIRE, "a"), row(2, "pending", END, "a")], set()),
    "dead without contact": ([row(1, "dead", FIRE, "a"), row(2, "pending", END, "a")], {2}),
    "dead with contact": (
        [row(1, "dead", FIRE, "a", left_machine=True), row(2, "pending", END, "a")],
        set(),
    ),
    "no trace of firing": ([row(2, "pending", END, "a")], set()),
    "reminder is pointless": (
        [
            row(1, "delivered", FIRE, "a"),
            row(2, "pending", "alert.reminder", "a"),
            row(3, "pending", END, "a"),
        ],
        {2},
    ),
    "some of the group": ([row(1, "pending", FIRE, "ab"), row(2, "pending", END, "a")], set()),
    "all of it, one by one": (
        [
            row(1, "pending", FIRE, "ab"),
            row(2, "pending", END, "a"),
            row(3, "pending", END, "b", ends_all=True),
        ],
        {1, 2, 3},
    ),
    "some of it, never told": (
        [
            row(1, "dead", FIRE, "a"),
            row(2, "delivered", FIRE, "b"),
            row(3, "pending", "alert.updated", "a"),
        ],
        {3},
    ),
    "another episode": (
        [
            row(1, "pending", FIRE, "a"),
            row(2, "delivered", FIRE, "b"),
            row(3, "pending", END, "b"),
        ],
        set(),
    ),
    "the one before is over": (
        [
            row(1, "delivered", FIRE, "a"),
            row(2, "delivered", END, "a", ends_all=True),
            row(3, "pending", FIRE, "b"),
            row(4, "pending", END, "b", ends_all=True),
        ],
        {3, 4},
    ),
    "more than is named": (
        [row(1, "pending", FIRE, "a", complete=False), row(2, "pending", END, "a")],
        set(),
    ),
    "an end that was tried": (
        [
            row(1, "suppressed", FIRE, "a"),
            row(2, "retry_wait", END, "a", left_machine=True),
        ],
        set(),
    ),
}


@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_suppression(rows: list[Told], expected: set[int]) -> None:
    """Catches X17 and B22: an end without a beginning, or a beginning without its end."""
    assert suppressed(rows) == expected


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["pending", "retry_wait", "sending", "delivered", "dead", "suppressed"]
            ),
            st.sampled_from([FIRE, END, "alert.reminder"]),
            st.sampled_from(["a", "b", "ab"]),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_suppression_law(drawn: list[tuple[str, str, str, bool]]) -> None:
    """Law: only what waits is suppressed, and never the end of what was or may have been told."""
    rows = [
        row(i, state, kind, episodes, left_machine=left or state == "delivered")
        for i, (state, kind, episodes, left) in enumerate(drawn)
    ]
    gone = suppressed(rows)
    for one in rows:
        if one.id in gone:
            assert one.state in ("pending", "retry_wait")
            if one.type == END:
                earlier = [x for x in rows[: one.id] if x.type != END and x.episodes & one.episodes]
                assert not any(x.left_machine for x in earlier)
