"""Every layer at every position by the estimator, beside the exact sample of the same run."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

import quantwatch
from quantwatch.capture import estimates
from quantwatch.capture.estimates import relative_difference
from quantwatch.capture.plan import VERSION, CapturePlan
from quantwatch.capture.sampling import token_seeds
from quantwatch.domain import Prompt
from quantwatch.metrics.registry import METRICS
from quantwatch.telemetry import canonical_sha
from quantwatch_kernels.compare.sketch_estimate import estimated_kl
from quantwatch_kernels.registry import fallbacks

SAMPLED = CapturePlan(batch_tokens=64)
ESTIMATED = replace(SAMPLED, lens="estimated", sketch_top=16, sketch_draws=16)
LENGTHS = [40, 9, 23]
SKETCH = ("sketch_top", "sketch_draws")


def captured(kit: Any, plan: CapturePlan, architecture: str = "llama", **suite: Any) -> Any:
    model = kit.build(architecture)
    return kit.capture(model, {"c": kit.perturb(model)}, kit.suite(LENGTHS, **suite), plan)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "own", "opt-350m"])
def test_estimates_stand_beside_an_unchanged_sample(kit: Any, kind: str) -> None:
    """Catches an estimate that gets into a mean, and a scale or cap that the estimator lacks."""
    plain, both = captured(kit, SAMPLED, kind), captured(kit, ESTIMATED, kind)
    whole = captured(kit, replace(SAMPLED, lens_positions=256), kind)
    for prompt, layer in [(0, "layers.0"), (1, "layers.2"), (2, "layers.1")]:
        values, at = both.sink.row("c", prompt, "lens_kl", layer)
        before, at_before = plain.sink.row("c", prompt, "lens_kl", layer)
        assert values.tolist() == before.tolist()
        assert at.tolist() == at_before.tolist()
        estimated, everywhere = both.sink.row("c", prompt, "lens_kl_estimated", layer)
        exact, _ = whole.sink.row("c", prompt, "lens_kl", layer)
        assert everywhere is None
        assert estimated.mean() == pytest.approx(exact.mean(), rel=0.15)
        assert np.median(np.abs(estimated / exact - 1)) < 0.25
        for k in (3, 5):
            deviation, _ = both.sink.row("c", prompt, f"topk_logit_deviation_k{k}", layer)
            truth, _ = whole.sink.row("c", prompt, f"topk_logit_deviation_k{k}", layer)
            np.testing.assert_allclose(deviation, truth, rtol=2e-4, atol=2e-6)


def test_errors_are_those_of_the_sample(kit: Any) -> None:
    found = captured(kit, ESTIMATED)
    for prompt in range(3):
        estimated, _ = found.sink.row("c", prompt, "lens_kl_estimated", "layers.1")
        exact, at = found.sink.row("c", prompt, "lens_kl", "layers.1")
        error, at_error = found.sink.row("c", prompt, "lens_kl_error", "layers.1")
        difference, _ = found.sink.row("c", prompt, "lens_kl_difference", "layers.1")
        assert at_error.tolist() == at.tolist()
        assert difference.tolist() == (estimated[at] - exact).tolist()
        assert error.tolist() == relative_difference(estimated[at], exact).tolist()


def test_the_picture_is_full_and_exact_where_that_was_measured(kit: Any) -> None:
    """Catches a worst token that shows its estimate, and shifts by the first scored position."""
    found = captured(kit, ESTIMATED, score_start=5)
    plain = captured(kit, SAMPLED, score_start=5)
    for prompt, length in enumerate(LENGTHS):
        shown, at = found.sink.row("c", prompt, "lens_kl", "layers.2", "extra")
        assert at.tolist() == list(range(5, length))
        worst, where = plain.sink.row("c", prompt, "lens_kl", "layers.2", "extra")
        assert shown[where - 5].tolist() == worst.tolist()
        _, marked = found.sink.row("c", prompt, "lens_kl_error", "layers.2", "extra")
        assert marked.tolist() == where.tolist()
        estimated, _ = found.sink.row("c", prompt, "lens_kl_estimated", "layers.2")
        others = np.delete(np.arange(len(shown)), where - 5)
        assert shown[others].tolist() == estimated[others].tolist()


def test_equal_models_are_exactly_zero(kit: Any) -> None:
    model = kit.build("llama")
    found = kit.capture(model, {"c": kit.load(model, "c")}, kit.suite(LENGTHS), ESTIMATED)
    for metric in ("lens_kl_estimated", "lens_kl_error", "lens_kl_difference"):
        assert set(found.sink.largest("c", metric).values()) == {0.0}


def test_batches_and_candidates_change_nothing(kit: Any) -> None:
    """The draws are a hash of suite, prompt, position and layer; each candidate has the same."""
    model, suite = kit.build("llama"), kit.suite([12, 12, 12])
    one, two = kit.perturb(model), kit.perturb(model, seed=2)
    alone = kit.capture(model, {"c": one}, suite, replace(ESTIMATED, batch_tokens=12))
    beside = kit.capture(model, {"d": two, "c": one}, suite, replace(ESTIMATED, batch_tokens=36))
    for prompt in range(3):
        first, _ = alone.sink.row("c", prompt, "lens_kl_estimated", "layers.1")
        second, _ = beside.sink.row("c", prompt, "lens_kl_estimated", "layers.1")
        np.testing.assert_allclose(first, second, rtol=1e-4)


def test_a_nan_is_a_nan_and_only_where_it_is(kit: Any) -> None:
    model = kit.build("llama")
    broken = kit.perturb(model)
    broken.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    found = kit.capture(model, {"c": broken}, kit.suite(LENGTHS), ESTIMATED)
    before, _ = found.sink.row("c", 0, "lens_kl_estimated", "layers.0")
    after, _ = found.sink.row("c", 0, "lens_kl_estimated", "layers.1")
    assert np.isfinite(before).all()
    assert np.isnan(after).all()


def test_what_the_estimate_cannot_answer_is_read_in_full(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a NaN, or a 0, in place of a number that can be had."""
    whole = captured(kit, replace(SAMPLED, lens_positions=256))
    plain = estimated_kl

    def blind(*args: Any) -> Any:
        found = plain(*args)
        unanswered = torch.zeros_like(found.unanswered)
        unanswered[::2] = True
        kl = torch.where(unanswered, torch.nan, found.kl)
        return found._replace(kl=kl, unanswered=unanswered)

    monkeypatch.setattr(estimates, "estimated_kl", blind)
    found = captured(kit, ESTIMATED)
    values, _ = found.sink.row("c", 0, "lens_kl_estimated", "layers.0")
    exact, _ = whole.sink.row("c", 0, "lens_kl", "layers.0")
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values[::2], exact[::2], rtol=1e-4)


def test_a_head_that_is_no_plain_product_falls_back(kit: Any) -> None:
    """phi's head has a bias: its rows are gathered by torch, and that is counted."""
    found = captured(kit, ESTIMATED, "phi")
    assert found.sink.largest("c", "lens_kl_estimated")["layers.0"] > 0
    assert {(f.op, f.used) for f in fallbacks()} >= {("head_rows", "aten")}
    (said,) = (words for words in found.report.events["c"] if words.startswith("head_rows"))
    assert said.startswith("head_rows (aten instead of native), 3 times: the head is more than")


def test_the_floor_has_no_estimates(kit: Any) -> None:
    found = captured(kit, replace(ESTIMATED, isolated_fraction=1.0))
    metrics = {m.metric for o in found.floor.observations for m in o.matrices}
    assert "lens_kl" in metrics
    assert not {m for m in metrics if m.startswith("lens_kl_")}


def test_timings_tell_what_the_sketch_took(kit: Any) -> None:
    timings = captured(kit, ESTIMATED).report.timings_s
    assert timings["sketch"] > 0
    assert timings["estimates"] > 0


RELATIVE = {
    "equal": (2.0, 2.0, 0.0), "both zero": (0.0, 0.0, 0.0), "both infinite": (np.inf, np.inf, 0.0),
    "a tenth less": (0.9, 1.0, 0.1), "a tenth more": (1.0, 0.9, 0.1), "nothing seen": (0.0, 1.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("estimate", "exact", "expected"), RELATIVE.values(), ids=RELATIVE)
def test_relative_differences(estimate: float, exact: float, expected: float) -> None:
    found = relative_difference(np.array([[estimate]]), np.array([[exact]]))
    assert found[0, 0] == pytest.approx(expected)


def test_seeds_are_of_suite_prompt_and_position() -> None:
    prompt = Prompt(3, "c", "test", tuple(range(9)), (), score_start=4)
    seeds = token_seeds("ab", prompt, "sketch").tolist()
    assert len(set(seeds)) == 5
    assert token_seeds("ab", replace(prompt, score_start=6), "sketch").tolist() == seeds[2:]
    assert token_seeds("cd", prompt, "sketch").tolist() != seeds
    assert token_seeds("ab", replace(prompt, index=4), "sketch").tolist() != seeds


def test_plans_without_estimates_have_the_digest_they_had() -> None:
    """Catches an upgrade after which no run can be compared with its baseline."""
    later = ("lens", *SKETCH, "prefill_chunk", "lens_products")
    known = {name: value for name, value in asdict(SAMPLED).items() if name not in later}
    assert SAMPLED.sha == canonical_sha({**known, "version": VERSION})
    assert replace(SAMPLED, sketch_top=9).sha == SAMPLED.sha
    others = replace(ESTIMATED, sketch_top=9), replace(ESTIMATED, sketch_draws=9)
    shas = {plan.sha for plan in (SAMPLED, ESTIMATED, *others)}
    assert len(shas) == 4


def test_a_run_stores_estimates_and_says_that_they_are(kit: Any) -> None:
    """Catches a row of estimates that is taken for a measured one."""
    model = kit.build("llama")
    rows = [list(range(3, 43)), list(range(20, 32))]
    run = quantwatch.compare(model, kit.perturb(model), rows, lens="estimated")
    (candidate,) = run.candidates
    found = {m: candidate.find(m, "layers.1") for m in METRICS if m.startswith("lens_kl")}
    assert {name: (row.method, row.n) for name, row in found.items() if row is not None} == {
        "lens_kl": ("sampled positions", 2),
        "lens_kl_estimated": ("estimated", 52),
        "lens_kl_error": ("sampled positions", 2),
        "lens_kl_difference": ("sampled positions", 2),
    }
    plain = quantwatch.compare(model, kit.perturb(model), rows)
    before, after = (r.candidates[0].find("lens_kl", "layers.1") for r in (plain, run))
    assert before == after
    assert plain.capture_sha != run.capture_sha
    assert plain.candidates[0].find("lens_kl_estimated", "layers.1") is None
