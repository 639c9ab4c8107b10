"""A night in pieces: each unit measured apart, in any order, folded to the bits of one pass."""

import copy
import pickle
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quantwatch.capture.course import Course
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.shards.partials import Partial, describe_unit, units_of
from quantwatch.capture.shards.shard import Shard
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.domain import Json, Observation, Progress

LENGTHS = [30, 9, 21, 14, 17, 26, 5]
APART = {"timings_s", "sharding"}
"""What tells how a night was measured, not what."""


class Apart:
    """Measures every unit in a shard of its own models, the last one first, through a pickle."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards

    def partials(self, course: Course, progress: Progress) -> Generator[Partial]:
        numbers = range(len(units_of(course)))
        found = {n: self._shards[n % len(self._shards)].measure(n) for n in reversed(numbers)}
        for number in numbers:
            progress.advance(found[number].num_tokens)
            yield pickle.loads(pickle.dumps(found[number]))

    def told(self) -> Json:
        return {"executor": "test"}


def _same_observations(ours: list[Observation], theirs: list[Observation]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.candidate, one.prompt, one.offset) == (
            other.candidate,
            other.prompt,
            other.offset,
        )
        assert one.first_nonfinite == other.first_nonfinite
        for matrix, twin in zip(one.matrices, other.matrices, strict=True):
            assert (matrix.metric, matrix.scopes, matrix.role) == (
                twin.metric,
                twin.scopes,
                twin.role,
            )
            np.testing.assert_array_equal(matrix.values, twin.values, err_msg=matrix.metric)
            np.testing.assert_array_equal(matrix.positions, twin.positions)
        for load, again in zip(one.loads, other.loads, strict=True):
            np.testing.assert_array_equal(load.candidate, again.candidate)


def _same_reports(ours: CaptureReport, theirs: CaptureReport) -> None:
    mine, other = ours.to_json(), theirs.to_json()
    for name in mine.keys() - APART:
        assert mine[name] == other[name], name
    assert ours.events == theirs.events


def _both(
    kit: Any, models: dict[str, Any], plan: CapturePlan, num_shards: int, **suite: Any
) -> tuple[Any, Any]:
    found = kit.suite(LENGTHS, **suite)
    loaded = {name: kit.load(module, name) for name, module in models.items()}
    course = Course(found, plan, loaded["reference"].max_positions)
    whole = kit.capture(
        loaded["reference"], {n: m for n, m in loaded.items() if n != "reference"}, found, plan
    )
    shards = [
        Shard({n: kit.load(copy.deepcopy(m.module), n) for n, m in loaded.items()}, course)
        for _ in range(num_shards)
    ]
    sink, floor, steps = kit.memory(), kit.memory(), kit.steps()
    for shard in shards:
        shard.__enter__()
    try:
        subject = Subject(loaded, found, plan, spread=Apart(shards))
        report = capture(subject, sink, floor, steps)
    finally:
        for shard in shards:
            shard.__exit__(None, None, None)
    assert steps.done == steps.total
    return whole, replace(whole, report=report, sink=sink, floor=floor, steps=steps)


PLANS = {
    "sampled": CapturePlan(batch_tokens=40, isolated_fraction=0.3),
    "estimated": CapturePlan(batch_tokens=40, isolated_fraction=0.3, lens="estimated"),
    "in chunks": CapturePlan(batch_tokens=40, isolated_fraction=0.5, prefill_chunk=8),
    "no lens, nothing isolated": CapturePlan(
        batch_tokens=40, isolated_fraction=0, lens_positions=0
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("num_shards", [1, 3])
def test_units_apart_are_one_night(kit: Any, plan: CapturePlan, num_shards: int) -> None:
    """Catches anything that one batch leaves behind for the next, and a fold out of order."""
    model = kit.build("llama")
    faulty = kit.perturb(model)
    models = {"reference": model, "off": faulty, "same": copy.deepcopy(model)}
    whole, pieces = _both(kit, models, plan, num_shards, score_start=1)
    _same_observations(pieces.sink.observations, whole.sink.observations)
    if plan.isolated_fraction:
        _same_observations(pieces.floor.observations, whole.floor.observations)
    _same_reports(pieces.report, whole.report)
    assert pieces.report.sharding == {"executor": "test"}
    assert whole.report.sharding == {}


@pytest.mark.parametrize("kind", ["mixtral", "gemma2"])
def test_routers_and_capped_logits(kit: Any, kind: str) -> None:
    """Catches loads of experts, reasons and floors that are lost between processes."""
    model = kit.build(kind)
    models = {"reference": model, "off": kit.perturb(model)}
    whole, pieces = _both(kit, models, PLANS["sampled"], 2)
    _same_observations(pieces.sink.observations, whole.sink.observations)
    _same_reports(pieces.report, whole.report)


def test_values_that_are_not_finite_are_found_at_the_same_place(kit: Any) -> None:
    """Catches the first prompt of whichever shard answered first."""
    model = kit.build("llama")
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[7] = float("nan")
    models = {"reference": model, "broken": broken}
    whole, pieces = _both(kit, models, PLANS["sampled"], 3)
    assert whole.report.first_nonfinite
    assert pieces.report.first_nonfinite == whole.report.first_nonfinite
    assert pieces.report.bit_equal == whole.report.bit_equal == {"broken": False}


def test_a_few_rows_of_the_head_are_named_from_all_units(kit: Any) -> None:
    """Catches the rows of the last unit alone, or too many that look like few."""
    model = kit.build("llama")
    few, many = copy.deepcopy(model), copy.deepcopy(model)
    few.lm_head.weight.data[[5, 9]] *= 1.5
    many.lm_head.weight.data[3:40] *= 1.5
    whole, pieces = _both(kit, {"reference": model, "few": few, "many": many}, PLANS["sampled"], 3)
    assert whole.report.head_rows == {"few": (5, 9), "many": ()}
    assert pieces.report.head_rows == whole.report.head_rows


def test_what_is_kept_cannot_be_spread(kit: Any) -> None:
    """Catches a recording without its batches."""
    loaded = {name: kit.load(kit.build("llama"), name) for name in ("reference", "c")}
    subject = Subject(loaded, kit.suite([9]), CapturePlan(), "wanted", spread=Apart([]))
    with pytest.raises(ValueError, match="served or kept is measured by one process"):
        capture(subject, kit.memory(), kit.memory(), kit.steps())


def test_units_keep_chunks_together(kit: Any) -> None:
    """Catches a chunk whose cache is in another process."""
    course = Course(kit.suite(LENGTHS), PLANS["in chunks"], 64)
    units = units_of(course)
    assert sum(map(len, units)) == len(course.batches)
    assert [batch for unit in units for batch in unit] == list(course.batches)
    for unit in units:
        assert len(unit) == 1 or {b.prompts[0].index for b in unit} == {unit[0].prompts[0].index}
        first, last = unit[0].chunk, unit[-1].chunk
        assert (first is None) == (last is None)
        assert first is None or last is None or (first.is_first and last.is_last)
    assert describe_unit(units[0], 0).startswith("batch 0 (prompt")
