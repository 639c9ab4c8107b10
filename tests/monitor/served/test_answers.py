"""Reading one position with suspicion: what can't be trusted is missing, with a reason."""

import math
from typing import Any

import pytest

from quantwatch.models.served.answers import UNKNOWN, Position, Stamp, log_probability, position
from quantwatch.models.served.freshness import Freshness
from quantwatch.models.served.openai import ids_by_text
from quantwatch.models.served.trouble import StaleAnswerError, UnusableServerError

GOOD = [(7, -0.5), (3, -1.5), (9, -2.0)]


def test_a_position_is_ranked_and_cut_to_k() -> None:
    """vLLM adds the token that came, wherever it ranks; entries come in any order."""
    found = position([(3, -1.5), (50, -9.0), (7, -0.5), (9, -2.0)], 3, -9.0)
    assert found == Position((7, 3, 9), (-0.5, -1.5, -2.0), -9.0)


def test_equal_probabilities_are_ranked_by_id() -> None:
    """As everywhere: two servers' order of a tie is no difference."""
    assert position([(9, -1.0), (2, -1.0), (5, -3.0)], 3, None) == Position(
        (2, 9, 5), (-1.0, -1.0, -3.0), None
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([*GOOD[:2]], "2 of 3"),
        ([], "0 of 3"),
        ([*GOOD[:2], GOOD[0]], "2 of 3"),
        ([*GOOD[:2], (9, math.nan)], "NaN"),
        ([*GOOD[:2], (9, 0.1)], "above 0"),
        ([*GOOD[:2], (9, math.inf)], "above 0"),
        ([*GOOD[:2], (9, None)], "no number"),
        ([*GOOD[:2], (9, "-2")], "no number"),
        ([*GOOD[:2], (9, True)], "no number"),
        ([*GOOD[:2], ("w9", -2.0)], "token id is 'w9'"),
        ([*GOOD[:2], (1.5, -2.0)], "token id is '1.5'"),
        ([*GOOD[:2], (-4, -2.0)], "token id is '-4'"),
        ([*GOOD, (7, -0.75)], "two log-probabilities"),
        ([(1, -0.1), (2, -0.2), (3, -0.3)], "more than 1"),
        # What vLLM's buffers hold before anything was written (#42019): id 0, ln 1.
        ([(0, 0.0), (0, 0.0), (0, 0.0)], "1 of 3"),
    ],
)
def test_what_cannot_be_trusted_is_missing(entries: list[tuple[Any, Any]], words: str) -> None:
    found = position(entries, 3, -1.0)
    assert isinstance(found, str)
    assert words in found


def test_a_target_that_cannot_be_read_makes_the_position_missing() -> None:
    assert position(GOOD, 3, log_probability(math.nan)) == "a log-probability is NaN"


def test_rounding_above_zero_is_zero() -> None:
    assert log_probability(5e-7) == 0.0
    assert log_probability(-0.0) == 0.0


def test_minus_9999_stands_for_no_probability() -> None:
    """vLLM can't write −∞ into JSON: as a number it would be a finite NLL."""
    assert log_probability(-9999.0) == -math.inf
    assert log_probability(-9998.0) == -9998.0
    found = position([*GOOD, (4, -9999.0)], 4, None)
    assert isinstance(found, Position)
    assert found.logprobs[-1] == -math.inf


def test_texts_of_several_ids_are_unknown() -> None:
    assert ids_by_text(("a", "b", "a")) == {"a": UNKNOWN, "b": 1}


def stamps(*found: Stamp) -> Freshness:
    freshness = Freshness()
    for stamp in found:
        freshness.check(stamp)
    return freshness


def test_the_same_server_stays_fresh() -> None:
    stamps(Stamp("m", "fp", 100.0, "a"), Stamp("m", "fp", 98.0, "b"), Stamp(None, None, None, None))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Stamp("other", "fp", 101.0, "b"), "its model is 'other', was 'm'"),
        (Stamp("m", "fp-2", 101.0, "b"), "its system fingerprint is 'fp-2', was 'fp'"),
    ],
    ids=["model", "fingerprint"],
)
def test_another_model_is_refused(second: Stamp, words: str) -> None:
    """Catches a server that is restarted with other weights in the middle of a run."""
    with pytest.raises(UnusableServerError, match=words):
        stamps(Stamp("m", "fp", 100.0, "a"), second)


def test_another_model_is_refused_after_one_that_said_nothing() -> None:
    with pytest.raises(UnusableServerError, match="fingerprint"):
        stamps(Stamp("m"), Stamp("m", "fp"), Stamp("m", "fp-2"))


@pytest.mark.parametrize(
    "second",
    [Stamp("m", "fp", 101.0, "a"), Stamp("m", "fp", 90.0, "b")],
    ids=["its id was seen", "made before"],
)
def test_an_old_answer_is_stale(second: Stamp) -> None:
    """Catches a cache between the server and us."""
    with pytest.raises(StaleAnswerError, match="stale"):
        stamps(Stamp("m", "fp", 100.0, "a"), second)
