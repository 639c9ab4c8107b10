"""Who knows of an alert, what passes the filters, what happened in an episode: pure functions."""

from collections.abc import Iterator
from datetime import UTC

import pytest
from tests.dashboard.invented_episodes import a_silence, hours, listed

from quantwatch.store.alert_history import Judgement, Listed
from quantwatch.store.audit import AuditEntry
from quantwatch.store.backlog import Addressed
from quantwatch.store.told import Handed, Messages, Sent
from quantwatch_dashboard.charts.judged import judged_chart
from quantwatch_dashboard.logic.episode_story import Sources, story
from quantwatch_dashboard.logic.episodes import (
    Overlay,
    Receiver,
    ShownEpisode,
    Wanted,
    filtered,
    headline,
    receivers,
    shown,
    would_match,
)

SUBJECT = "demo/int8"


def on(state: str, at: float = 0, endpoint: str = "ops") -> Addressed:
    return Addressed(endpoint, SUBJECT, state, hours(at))


RECEIVED: dict[str, tuple[list[Addressed], str]] = {
    "got it": ([on("delivered")], "told"),
    "nothing is kept": ([], "unknown"),
    "got one of an episode before": ([on("delivered", -1)], "unknown"),
    "dead letter": ([on("dead")], "dead"),
    "waits": ([on("retry_wait")], "waiting"),
    "got one, the next waits": ([on("delivered"), on("grouped", 1)], "waiting"),
    "got one, the next died": ([on("dead", 1), on("delivered")], "dead"),
    "one died, the next waits": ([on("retry_wait", 1), on("dead")], "dead"),
    "dead letter of an episode before": ([on("delivered"), on("dead", -1)], "told"),
    "dead letter of another endpoint": ([on("delivered"), on("dead", 1, "other")], "told"),
}


@pytest.mark.parametrize(("addressed", "state"), RECEIVED.values(), ids=RECEIVED)
def test_who_has_got_it(addressed: list[Addressed], state: str) -> None:
    """Catches a page by which somebody knows to whom nothing was delivered."""
    assert receivers(listed(told=("ops",)), addressed) == (Receiver("ops", state),)


def test_dead_letters_of_another_alert_are_its_own() -> None:
    """Catches an endpoint that has got this alert and is shown as one that has not."""
    other = Addressed("ops", "demo/bf16", "dead", hours(1))
    [one] = shown([listed(told=("ops",))], Overlay(addressed=[other, on("delivered")]))
    assert one.receivers == (Receiver("ops", "told"),)


def test_many_open_episodes_are_grouped_once() -> None:
    """Catches each open episode that walks all deliveries of all others."""
    found = [listed(id=f"{i}", told=("ops",)) for i in range(1500)]
    elsewhere = [Addressed("ops", f"c{i}/x", "dead", hours(1)) for i in range(1500)]
    reads = 0

    class Counted(list[Addressed]):
        def __iter__(self) -> Iterator[Addressed]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    shown(found, Overlay(addressed=Counted(elsewhere)))
    assert reads == 1


def test_the_worst_comes_first() -> None:
    """Catches a warning, or what is looked after, above a critical alert that nobody has seen."""
    found = shown(
        [
            listed("pending", id="waits"),
            listed("firing", id="mild", severity="warning"),
            listed("firing", id="seen", acked_by="dana"),
            listed("recovering", id="better"),
            listed("firing", id="alone"),
        ],
        Overlay(),
    )

    ids = [one.listed.episode.id for one in found]
    assert ids == ["alone", "seen", "mild", "better", "waits"]
    assert headline(found) == "4 alerts open, 3 unacknowledged"


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("open", {"f", "a", "r", "p", "q"}), ("firing", {"f", "a", "q"}), ("recovering", {"r"}),
        ("pending", {"p"}), ("unacknowledged", {"f", "q"}), ("acknowledged", {"a"}), ("quiet", {"q"}),
        ("ended", {"e"}), ("all", {"f", "a", "r", "p", "q", "e"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_states(state: str, expected: set[str]) -> None:
    """Catches a filter that hides what it names."""
    found = [
        ShownEpisode(listed(id="f")),
        ShownEpisode(listed(id="a", acked_by="dana")),
        ShownEpisode(listed("recovering", id="r")),
        ShownEpisode(listed("pending", id="p")),
        ShownEpisode(listed(id="q"), silence=a_silence({"check": "*"})),
        ShownEpisode(listed("ended", id="e")),
    ]

    assert {one.listed.episode.id for one in filtered(found, Wanted(state=state))} == expected


@pytest.mark.parametrize(
    ("words", "num"),
    [("", 1), ("LAYER", 1), ("layers.28 int8", 1), ("dana", 1), ("ops", 1), ("int4", 0)],
)
def test_words(words: str, num: int) -> None:
    """Catches a search that misses the scope, the endpoint or the person, or needs the case."""
    one = ShownEpisode(listed(acked_by="dana", ack_comment="rolled back", told=("ops",)))

    assert len(filtered([one], Wanted(words=words))) == num


@pytest.mark.parametrize(
    ("matcher", "num"),
    [({}, 0), ({"check": "demo"}, 2), ({"rule": "layer-*"}, 1), ({"check": "DEMO"}, 0),
     ({"check": "*", "severity": "warning"}, 0)],
    ids=["nothing given", "a check", "a glob", "another case", "another severity"],
)  # fmt: skip
def test_what_a_silence_would_match(matcher: dict[str, str], num: int) -> None:
    """Catches a preview that promises something else than the silence then does."""
    assert len(would_match(matcher, [listed(), listed(rule="output-kl")])) == num


def kinds(one: Listed, sources: Sources) -> list[str]:
    """Return the kinds of what happened, in order."""
    return [moment.kind for moment in story(one, sources, hours(10))]


def test_a_whole_story_in_order() -> None:
    """Catches a timeline that leaves out who was told, who looked after it, or how it ended."""
    handed = (Handed("ops", "delivered", 1, None),)
    sources = Sources(
        judged=[
            Judgement("01JR0", hours(0), "breach", 0.19, "finite", 0.15),
            Judgement("01JR3", hours(5), "clear", 0.05, "finite", 0.15),
            Judgement("01JR4", hours(6), "breach", None, "nan", 0.15),
            Judgement("01JR5", hours(7), "clear", 0.05, "finite", 0.15),
            Judgement("01JR6", hours(9), "clear", 0.05, "finite", 0.15),
        ],
        sent=Messages((Sent("01JX", "alert.firing", hours(1), True, handed),)),
        audited=[
            AuditEntry(1, hours(-5), "eve", "acknowledge", "alert 1", None, {"comment": "before"}),
            AuditEntry(2, hours(3), "dana", "acknowledge", "alert 1", None, {"comment": "on it"}),
        ],
        silences=[a_silence({"check": "demo"}, 2, 4), a_silence({"check": "other"})],
    )
    moments = story(listed("ended"), sources, hours(10))

    assert [moment.kind for moment in moments] == [
        "fired", "told", "silenced", "acked", "unsilenced", "recovering", "again", "recovering",
        "ended",
    ]  # fmt: skip
    by_kind = {moment.kind: moment for moment in moments}
    assert by_kind["acked"].detail == "on it"
    assert by_kind["again"].detail == "NaN, limit 0.150"
    assert by_kind["ended"].run_id == "01JR2"


def test_messages_that_are_left_out_are_told() -> None:
    """Catches a gap in a long story that looks as if nobody had been told in it."""
    found = Messages((Sent("01JX", "alert.firing", hours(1), True, ()),), 1_234, hours(2))
    moments = story(listed(), Sources(sent=found), hours(10))

    assert [moment.what for moment in moments][-2:] == [
        "Notified: firing",
        "1,234 messages are not shown",
    ]


def test_an_episode_that_waited_for_its_confirmation() -> None:
    """Catches a firing that seems to have come with the opening."""
    assert kinds(listed(fired_at=hours(2)), Sources()) == ["opened", "fired"]


def test_an_episode_of_which_nobody_was_told() -> None:
    """Catches an end without a word that it never fired."""
    dropped = listed("ended", fired_at=None, resolve_reason="rule_changed")
    moments = story(dropped, Sources(), hours(10))

    assert [moment.what for moment in moments] == ["Opened", "Ended before anybody was notified"]
    assert moments[-1].detail == "the rule was edited"


def test_an_acknowledgement_whose_audit_entry_is_gone() -> None:
    """Catches a person who vanishes from the story when the audit log is cut."""
    one = listed(acked_at=hours(1), acked_by="dana", ack_comment="on it")

    assert kinds(one, Sources()) == ["fired", "acked"]


@pytest.mark.parametrize("is_log", [True, False], ids=["log", "linear"])
def test_the_values_around_an_episode(is_log: bool) -> None:
    """Catches NaN or an exact zero that vanishes from the picture, and a limit out of sight."""
    kinds = [("clear", 0.0, "finite"), ("breach", None, "nan"), ("breach", 0.2, "finite"),
             ("undecided", None, "inconclusive")]  # fmt: skip
    judged = [
        Judgement(f"01JR{i}", hours(i), outcome, value, kind, 0.15)
        for i, (outcome, value, kind) in enumerate(kinds)
    ]
    figure = judged_chart(judged, (hours(1), hours(3)), unit="<b>KL</b>", is_log=is_log, zone=UTC)
    limit, values = figure.data

    assert [y is None for y in values.y] == [False, False, False, True]
    assert len(set(values.y[:3])) == 3
    assert set(limit.y) == {0.15}
    assert "NaN, ∞" in figure.layout.yaxis.ticktext
    assert values.marker.symbol[:2] == ("circle", "x")
    assert figure.layout.yaxis.title.text == "&lt;b&gt;KL&lt;/b&gt;"
