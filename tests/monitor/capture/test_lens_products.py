"""The lens multiplying 16-bit factors: what it changes, what is told, where it is refused."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

import quantwatch
from quantwatch.baselines.comparable import mismatches
from quantwatch.capture.plan import VERSION, CapturePlan
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import MODEL
from quantwatch.errors import ConfigError, ModelError
from quantwatch.telemetry import canonical_sha
from quantwatch_kernels.compare import lens_rounded
from quantwatch_kernels.compare.rounding import ROUNDINGS, Rounded

FLOAT32 = CapturePlan(batch_tokens=64, lens_positions=64, isolated_fraction=1.0)
ROUNDED: dict[Rounded, CapturePlan] = {
    name: replace(FLOAT32, lens_products=name) for name in ROUNDINGS
}
WITHIN: dict[Rounded, float] = {"bfloat16": 0.02, "int16": 0.002}
"""Relative, of a mean or median of few tokens."""
FACTORS = pytest.mark.parametrize("factors", ROUNDINGS)
LENGTHS = (20, 33, 9)
OF_LENS = ("lens_kl", "topk_logit_deviation_k5", "topk_logit_deviation_k3")
ROWS = [list(range(3, 43)), list(range(20, 32))]


@FACTORS
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "opt-350m"])
def test_only_the_lens_changes_and_hardly(kit: Any, kind: str, factors: Rounded) -> None:
    """Catches a scale or cap that rounded products lack, and a precision that gets elsewhere."""
    model = kit.build(kind)
    pair = {"c": kit.perturb(model)}
    plain, rounded = (
        kit.capture(model, pair, kit.suite(LENGTHS), plan) for plan in (FLOAT32, ROUNDED[factors])
    )
    matrices = [[m for o in run.sink.observations for m in o.matrices] for run in (plain, rounded)]
    for before, after in zip(*matrices, strict=True):
        assert (before.metric, before.scopes, before.role) == (
            after.metric, after.scopes, after.role)  # fmt: skip
        if before.metric in OF_LENS and before.scopes != (MODEL,):
            assert (after.values != before.values).any()
            # Where two ids are nearly as likely, rounding changes which of them is fifth.
            statistic = np.mean if before.metric == "lens_kl" else np.median
            ratio = after.values / before.values
            np.testing.assert_allclose(statistic(ratio), 1.0, rtol=WITHIN[factors])
        else:
            np.testing.assert_array_equal(after.values, before.values)
    assert rounded.report.events["c"] == ()


@FACTORS
def test_the_floor_is_read_through_the_same_lens(kit: Any, factors: Rounded) -> None:
    """Catches a floor of another method: rounding is relative to the difference, so both are tiny."""
    model = kit.build("llama")
    floors = [
        kit.capture(model, {"c": kit.perturb(model)}, kit.suite(LENGTHS), plan).floor
        for plan in (FLOAT32, ROUNDED[factors])
    ]
    plain, rounded = (floor.largest("attention", "lens_kl") for floor in floors)
    assert plain.keys() == rounded.keys()
    assert plain
    assert plain != rounded
    assert all(0 <= value < 1e-9 for value in rounded.values())


@FACTORS
def test_a_slow_lens_is_told_of_the_candidate(
    kit: Any, monkeypatch: pytest.MonkeyPatch, factors: Rounded
) -> None:
    """Catches a setting made for speed that costs time and says nothing."""
    monkeypatch.setattr(lens_rounded, "why_not_words", lambda factors: f"no {factors}")
    model = kit.build("llama")
    found = kit.capture(model, {"c": kit.perturb(model)}, kit.suite(LENGTHS), ROUNDED[factors])
    (said,) = found.report.events["c"]
    assert said.startswith(f"lens_{factors} (aten instead of native), ")
    assert said.endswith(f" times: no {factors}")
    assert not any("lens" in words for words in found.report.events["reference"])


def biased(module: Any) -> Any:
    module.lm_head = nn.Linear(32, module.lm_head.out_features)
    return module


REFUSED = {
    "bias": (biased, "it has a bias"),
    "bfloat16": (lambda module: module.bfloat16(), "the head is torch.bfloat16, not float32"),
}


@FACTORS
@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_can_not_is_refused_at_once(kit: Any, name: str, factors: Rounded) -> None:
    """Catches a run that measures for an hour and fails, or measures in another precision."""
    change, reason = REFUSED[name]
    model = change(kit.build("llama"))
    plan = replace(ROUNDED[factors], isolated_fraction=0.0)
    with pytest.raises(ModelError) as caught:
        kit.capture(model, {"c": kit.perturb(model)}, kit.suite(LENGTHS), plan)
    said = f'lens_products = "{factors}" is for a head that is one float32 product: '
    assert said in str(caught.value)
    assert reason in str(caught.value)
    assert str(caught.value).endswith("unset lens_products")
    kit.capture(
        model, {"c": kit.perturb(model)}, kit.suite(LENGTHS), replace(plan, lens_positions=0)
    )


@FACTORS
def test_plans_are_told_apart_where_it_matters(factors: Rounded) -> None:
    """Catches a baseline in float32 that a rounded run is compared with, or one refused for nothing."""
    known = {
        name: value
        for name, value in asdict(FLOAT32).items()
        if name not in ("lens", "sketch_top", "sketch_draws", "prefill_chunk", "lens_products")
    }
    assert FLOAT32.sha == canonical_sha({**known, "version": VERSION})
    assert ROUNDED[factors].sha != FLOAT32.sha
    off = replace(ROUNDED[factors], lens_positions=0)
    assert off.sha == replace(off, lens_products="float32").sha
    with pytest.raises(ValueError, match="exact sample"):
        replace(ROUNDED[factors], lens="estimated")


@FACTORS
def test_a_run_says_so_and_is_not_compared_with_another(kit: Any, factors: Rounded) -> None:
    """Catches a rounded run that looks like any other."""
    model = kit.build("llama")
    pair = model, kit.perturb(model)
    plain = quantwatch.compare(*pair, ROWS, isolated_fraction=1.0)
    rounded = quantwatch.compare(*pair, ROWS, isolated_fraction=1.0, lens_products=factors)
    (candidate,), (before,) = rounded.candidates, plain.candidates
    assert candidate.variant is not None
    assert before.variant is not None
    (note,) = set(candidate.variant.notes) - set(before.variant.notes)
    assert note.startswith(f'lens_products = "{factors}": per-layer KL and top-k deviations')
    assert rounded.config["lens_products"] == factors
    assert rounded.capture["lens_products"] == factors
    (sentence,) = mismatches(rounded, plain)
    assert "lens_products" in sentence
    ours, theirs = (c.find("lens_kl", "layers.1") for c in (candidate, before))
    assert ours is not None
    assert theirs is not None
    assert ours.method == theirs.method
    assert ours.mean == pytest.approx(theirs.mean, rel=1.5 * WITHIN[factors])
    assert ours.mean != theirs.mean


@FACTORS
def test_chunks_of_long_prompts_are_read_so_too(kit: Any, factors: Rounded) -> None:
    """Catches a path that forgets the setting."""
    model = kit.build("llama")
    pair = model, kit.perturb(model)
    runs = [
        quantwatch.compare(*pair, ROWS, prefill_chunk=16, lens_positions=256, lens_products=each)
        for each in ("float32", factors)
    ]
    means = [run.candidates[0].find("lens_kl", "layers.2").mean for run in runs]  # type: ignore[union-attr]
    assert means[0] != means[1]
    assert means[0] == pytest.approx(means[1], rel=WITHIN[factors])


@FACTORS
def test_what_is_no_product_is_refused(kit: Any, factors: Rounded) -> None:
    """Catches a precision that nobody has heard of, and one that estimates can't be held against."""
    allowed = '"float16" is not allowed; allowed: "float32", "int16" or "bfloat16"'
    with pytest.raises(ConfigError, match=f"lens_products: {allowed}"):
        quantwatch.compare(kit.build("llama"), kit.build("llama"), ROWS, lens_products="float16")
    with pytest.raises(ValidationError, match="held against has to be exact"):
        CheckConfig.model_validate(
            {"reference": {"model": "m"}, "candidates": [{"name": "c", "model": "m"}],
             "suite": "core-v1", "lens": "estimated", "lens_products": factors}
        )  # fmt: skip


@FACTORS
def test_rounded_runs_repeat_bit_for_bit(kit: Any, factors: Rounded) -> None:
    """Catches memory that one run leaves to the next."""
    model = kit.build("llama")
    torch.manual_seed(0)
    pair = {"c": kit.perturb(model)}
    once, again = (kit.capture(model, pair, kit.suite(LENGTHS), ROUNDED[factors]) for _ in range(2))
    for a, b in zip(
        once.sink.matrices("c", "lens_kl"), again.sink.matrices("c", "lens_kl"), strict=True
    ):
        assert a.values.tolist() == b.values.tolist()
