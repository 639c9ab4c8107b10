"""What counts as found, what as located, and what the monitor is told of it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from quantwatch.alerts.blindness import blindness, canary_words
from quantwatch.alerts.sighting import Seen, sighting
from quantwatch.domain import (
    Alert,
    Canary,
    CandidateResult,
    Culprit,
    Measurement,
    Scope,
    Severity,
)

Row = Callable[..., Measurement]
PLACE = Scope("layers.1.mlp.up_proj")
CANARY = Canary(
    "int8", "candidate", 3, "channel", 0.01, PLACE, 17, datetime(2026, 11, 30, tzinfo=UTC), 2.0,
    "measured", found=True, located=True, named=Scope("layers.1"), rule="outlier",
)  # fmt: skip


def breach(scope: str, metric: str = "isolated_error", **changes: Any) -> Alert:
    made = Alert(
        "outlier", "int8", metric, "mean", Scope(scope), 0.3, "finite", 0.1, Severity.WARNING, ""
    )
    return replace(made, **changes)


@pytest.fixture
def seen(measurement: Row) -> Callable[..., Seen]:
    """A candidate with isolated errors by scope, a culprit, and alerts."""

    def make(errors: dict[str, float], culprit: str | None = None, *alerts: Alert) -> Seen:
        rows = tuple(measurement("isolated_error", scope, value) for scope, value in errors.items())
        named = Culprit(None if culprit is None else Scope(culprit), None, None, "")
        return Seen(CandidateResult("int8", None, None, rows, named), alerts)

    return make


QUIET = {"layers.0": 0.5, "layers.1": 0.1, str(PLACE): 0.1, "layers.0.mlp.up_proj": 0.5}
LOUD = {**QUIET, "layers.1": 0.2, str(PLACE): 0.2}
OF_ITSELF = breach("layers.0")
INCONCLUSIVE = breach("layers.1", value=None, value_kind="inconclusive")
CASES: list[tuple[str, str | None, tuple[Alert, ...], tuple[Alert, ...], tuple[Any, ...]]] = [
    # name, culprit with the fault, alerts with it, alerts without it, (found, named, located)
    ("by its layer", "layers.0.mlp.up_proj", (breach("layers.1"),), (), (True, "layers.1", True)),
    ("by its culprit", str(PLACE), (breach("model", "logit_kl"),), (), (True, PLACE, True)),
    ("the part around it", "layers.0", (breach("layers.1.mlp"),), (), (True, "layers.1.mlp", True)),
    ("another layer", "layers.0", (breach("layers.10"),), (), (True, "layers.10", False)),
    ("nowhere", "layers.0", (breach("model", "logit_kl"),), (), (True, None, False)),
    ("no breach", str(PLACE), (), (), (False, None, False)),
    ("not decided", str(PLACE), (INCONCLUSIVE,), (), (False, None, False)),
    ("breached anyhow", "layers.0", (OF_ITSELF,), (OF_ITSELF,), (False, None, False)),
    (
        "the same rule elsewhere", "layers.0", (OF_ITSELF, breach("layers.1")), (OF_ITSELF,),
        (True, "layers.1", True),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("culprit", "alerts", "before", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_found_and_located(
    seen: Callable[..., Seen], culprit: str, alerts: Any, before: Any, expected: tuple[Any, ...]
) -> None:
    """Catches what was there without the fault, the layer beside it, a culprit that did not move."""
    planted, control = seen(LOUD, culprit, *alerts), seen(QUIET, "layers.0", *before)
    found = sighting(PLACE, planted, control, lambda _: True)
    assert (found.alert is not None, found.named, found.located) == expected
    assert found.masked is None
    assert (found.before, found.after) == (0.1, 0.2)


def test_a_whole_layer_is_located_inside(seen: Callable[..., Seen]) -> None:
    """Catches the finest culprit called wrong because more than it was planted."""
    planted = seen(LOUD, str(PLACE), breach("layers.1"))
    found = sighting(Scope("layers.1"), planted, seen(QUIET), lambda _: True)
    assert (found.named, found.located) == (PLACE, True)


def test_behind_a_breach_nothing_is_seen(seen: Callable[..., Seen]) -> None:
    """Catches a monitor called blind where the place breaches the same rule anyhow."""
    own = breach("layers.1")
    found = sighting(PLACE, seen(LOUD, None, own), seen(QUIET, None, own), lambda _: True)
    assert (found.alert, found.masked) == (None, own)
    other = breach("layers.1", rule="another")
    both = seen(LOUD, None, own, other), seen(QUIET, None, own)
    assert sighting(PLACE, *both, lambda _: True).alert == other


def test_what_can_not_be_compared_does_not_count(seen: Callable[..., Seen]) -> None:
    """Catches a quantile over some prompts that is found beyond one over all."""
    planted = seen(LOUD, None, breach("layers.1"))
    assert sighting(PLACE, planted, seen(QUIET), lambda _: False).alert is None


def test_in_a_copy_of_the_reference_all_is_the_fault(seen: Callable[..., Seen]) -> None:
    """Catches a control that is asked for where everything else is equal."""
    planted = seen({str(PLACE): 0.2}, str(PLACE), breach("layers.1"))
    found = sighting(PLACE, planted, None, lambda _: True)
    assert (found.located, found.before, found.after) == (True, 0.0, 0.2)


OUTCOMES = [
    ({}, "clear", "found by rule outlier and located at layers.1"),
    ({"located": False, "named": None}, "breach", "found by rule outlier, and located nowhere"),
    ({"located": False, "named": "layers.2"}, "breach", "located at layers.2"),
    ({"found": False, "located": False}, "breach", "not found by any rule: the monitor is blind"),
]


@pytest.mark.parametrize(("changes", "outcome", "words"), OUTCOMES, ids=[o[2] for o in OUTCOMES])
def test_the_alert(changes: dict[str, Any], outcome: str, words: str) -> None:
    """Catches a canary that is found but not located taken for a good one, and words for it."""
    said = blindness(replace(CANARY, **changes), "R1")
    assert (said.outcome, said.candidate, said.severity) == (outcome, "", Severity.CRITICAL)
    assert words in said.words
    assert "channel 17 at layers.1.mlp.up_proj in a copy of int8" in said.words
    assert said.words.endswith("(run R1)")


def test_words_where_nothing_was_measured() -> None:
    """Catches a canary that was not measured told as one that was missed."""
    bare = replace(CANARY, state="not measurable", found=None, located=None, reason="streamed")
    assert canary_words(bare).endswith("could not be measured: streamed")
    assert not bare.is_blind
