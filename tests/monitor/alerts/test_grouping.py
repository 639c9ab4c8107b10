"""One message per direction: who hears what, and why."""

from hypothesis import given
from hypothesis import strategies as st

from quantwatch.alerts.grouping import Change, Message, messages

FIRED, RESOLVED, ESCALATED = Change.FIRED, Change.RESOLVED, Change.ESCALATED
NONE: dict[str, frozenset[int]] = {}


def test_ten_rules_of_one_run_are_one_message() -> None:
    """Catches a page per rule."""
    changes = dict.fromkeys(range(10), FIRED)
    audience = dict.fromkeys(range(10), ("ops", "chat"))
    assert messages(changes, audience, NONE) == (
        Message(("ops", "chat"), tuple(range(10)), "first", 10),
    )


def test_an_endpoint_hears_only_what_it_wants() -> None:
    """Catches a warning that wakes who asked for critical alerts."""
    found = messages({1: FIRED, 2: FIRED}, {1: ("all", "pager"), 2: ("all",)}, NONE)
    assert found == (Message(("all",), (1, 2), "first", 2), Message(("pager",), (1,), "first", 1))


def test_new_members_are_new_only_to_who_knows_others() -> None:
    """Catches "first" for the second alert of a group."""
    known = {"all": frozenset({7})}
    found = messages({1: FIRED}, {1: ("all", "pager")}, known)
    assert [(m.endpoints, m.reason, m.type) for m in found] == [
        (("all",), "new_members", "alert.firing"),
        (("pager",), "first", "alert.firing"),
    ]


def test_all_or_some_resolved() -> None:
    """Catches a group that is closed at the receiver while a member fires (outbox: CLOSING)."""
    found = messages({1: RESOLVED}, {1: ("a", "b")}, {"a": frozenset({2})})
    assert [(m.endpoints, m.reason, m.type, m.num_open) for m in found] == [
        (("a",), "resolved_some", "alert.updated", 1),
        (("b",), "resolved_all", "alert.resolved", 0),
    ]


def test_the_strongest_reason_is_given() -> None:
    """Catches an escalation that hides a new alert."""
    [both] = messages({1: ESCALATED, 2: FIRED}, {1: ("a",), 2: ("a",)}, {"a": frozenset({1})})
    assert (both.reason, both.members, both.num_open) == ("new_members", (1, 2), 2)
    [one] = messages({1: ESCALATED}, {1: ("a",)}, {"a": frozenset({2})})
    assert (one.reason, one.type) == ("escalated", "alert.escalated")


members = st.integers(0, 6)
names = st.sampled_from("abcd")


@given(st.dictionaries(members, st.frozensets(names), max_size=7))
def test_everybody_hears_of_his_members_once(audience: dict[int, frozenset[str]]) -> None:
    """Catches a message that is lost or told twice."""
    changes = dict.fromkeys(audience, FIRED)
    told = messages(changes, {m: sorted(names_) for m, names_ in audience.items()}, NONE)
    heard = sorted((name, member) for m in told for name in m.endpoints for member in m.members)
    assert heard == sorted((name, member) for member, names_ in audience.items() for name in names_)
    assert len([name for m in told for name in m.endpoints]) == len(
        {name for m in told for name in m.endpoints}
    )
