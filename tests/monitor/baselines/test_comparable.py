"""When two runs can be compared, and what differs when they can."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.differences import changes, differences, noise_of_difference
from quantwatch.domain import CandidateResult, Measurement, RunResult, Variant

Run = Callable[..., RunResult]
Row = Callable[..., Measurement]
Make = Callable[..., Variant]


def test_a_run_is_comparable_with_itself(run: Run) -> None:
    """Catches a digest that is never equal."""
    assert mismatches(run(), run()) == ()


IDENTITY: dict[str, tuple[dict[str, Any], str]] = {
    "suite": ({"suite_hash": "6" * 64}, "suite hash 666666666666, baseline 555555555555: other"),
    "capture": ({"capture_sha": "d" * 64}, "capture_sha dddddddddddd, baseline cccccccccccc: "),
    "metrics": ({"metrics_version": 2}, "metrics_version 2, baseline 1: the metrics are computed"),
    "prompts": ({"num_prompts": 15}, "num_prompts 15, baseline 16: another number of prompts"),
    "no reference": ({"reference": None}, "reference: this run has none"),
}


@pytest.mark.parametrize(("change", "words"), IDENTITY.values(), ids=IDENTITY)
def test_identity_is_named_with_both_digests(run: Run, change: dict[str, Any], words: str) -> None:
    """Catches other prompts reported as a layer-0 regression (competitors.md, trap 7)."""
    [sentence] = mismatches(run(**change), run())
    assert sentence.startswith(words)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one": ({"lens_positions": 16}, {"lens_positions": 8}, "lens_positions is 16, there 8"),
    "two": (
        {"lens": "estimated", "prefill_chunk": 256, "batch_tokens": 256},
        {"lens": "sampled", "prefill_chunk": None, "batch_tokens": 256},
        'lens is "estimated", there "sampled"; prefill_chunk is 256, there absent',
    ),
    "not there yet": (
        {"lens": "estimated", "lens_positions": 8},
        {"lens_positions": 8},
        'lens is "estimated", there "sampled"',
    ),
    "not known": ({"lens_positions": 16}, {}, "the settings of one of them aren't known"),
    "an equal file": (
        {"lens_positions": 8},
        {"lens_positions": 8},
        "its settings are equal: another version of quantwatch captures otherwise",
    ),
}


@pytest.mark.parametrize(("now", "before", "words"), SETTINGS.values(), ids=SETTINGS)
def test_the_setting_that_differs_is_named(
    run: Run, now: dict[str, Any], before: dict[str, Any], words: str
) -> None:
    """Catches a list of all settings, in which somebody has to find the one that was changed."""
    ours, theirs = run(config=now, capture_sha="d" * 64), run(config=before)
    [sentence] = mismatches(ours, theirs)
    assert sentence == f"capture_sha dddddddddddd, baseline cccccccccccc: {words}"


DIGESTS = [
    ("weights_sha", "the reference has other weights"),
    ("config_sha", "configured differently"),
    ("tokenizer_sha", "token ids mean something else"),
    ("recipe_sha", "quantized differently"),
    ("serve_sha", "served differently"),
    ("fault_sha", "other faults"),
]


@pytest.mark.parametrize(("digest", "words"), DIGESTS)
def test_a_reference_that_drifted_is_said_how(
    run: Run, variant: Make, digest: str, words: str
) -> None:
    """Catches one opaque hash that can't say what drifted."""
    [sentence] = mismatches(run(reference=variant("ref", **{digest: "other"})), run())
    assert sentence.startswith(f"reference {digest} other, baseline ref-")
    assert words in sentence


def test_several_differences_are_all_named(run: Run, variant: Make) -> None:
    """Catches stopping at the first."""
    other = run(suite_hash="x", reference=variant("ref", weights_sha="w", tokenizer_sha=""))
    assert len(mismatches(other, run())) == 3


def changed_candidate(run: RunResult, **fields: Any) -> RunResult:
    return replace(run, candidates=(replace(run.candidates[0], **fields),))


def test_causes_are_shown_and_refuse_nothing(run: Run, variant: Make) -> None:
    """Catches a refusal after a driver update: that is what the comparison is for."""
    avx2 = {"python": "3.11", "cpu": {"capability": "AVX2"}, "gpus": [], "commit": "abc"}
    now = changed_candidate(run(environment=avx2), variant=variant("int8", weights_sha="new"))
    assert mismatches(now, run()) == ()
    assert changes(now, run(), "int8") == (
        {"name": "environment.cpu.capability", "value": "AVX2", "baseline": "AVX512"},
        {"name": "environment.commit", "value": "abc", "baseline": "absent"},
        {"name": "weights_sha", "value": "new", "baseline": "int8-weights"},
    )


def only(*rows: Measurement) -> CandidateResult:
    return CandidateResult("int8", None, None, rows)


def test_rounding_of_another_instruction_set_is_below_the_noise(row: Row) -> None:
    """Catches calling it a change: KLs of an INT8 candidate move by 1e-8 where the floor is 1e-10."""
    floor = {("logit_kl", "model"): 1e-10, ("rel_error", "layers.3"): 1e-6}
    before = only(row("logit_kl", "model", 0.002), row("rel_error", "layers.3", 0.01))
    now = only(row("logit_kl", "model", 0.002 + 1e-8), row("rel_error", "layers.3", 0.01 + 4e-7))
    records = differences(now, before, floor)
    assert [(r["metric"], r["below_noise"], r["worse"]) for r in records] == [
        ("logit_kl", True, True), ("rel_error", True, True),
    ]  # fmt: skip


def test_a_real_change_is_above_the_noise_and_has_a_direction(row: Row) -> None:
    """Catches a floor that swallows everything, and a mirrored direction."""
    floor = {("logit_kl", "model"): 1e-10}
    before = only(row("logit_kl", "model", 0.002), row("top1_agreement", "model", 0.98))
    now = only(row("logit_kl", "model", 0.004), row("top1_agreement", "model", 0.99))
    kl, top1 = differences(now, before, floor)
    assert (kl["difference"], kl["below_noise"], kl["worse"]) == (0.002, False, True)
    assert (top1["below_noise"], top1["worse"]) == (False, False)


def test_what_is_equal_or_no_distance_is_left_out(row: Row) -> None:
    """Catches a thousand rows of nothing, and NLLs taken for distances."""
    rows = (row("logit_kl", "model", 0.1), row("nll_candidate", "model", 3.0))
    moved = (rows[0], row("nll_candidate", "model", 3.1))
    assert differences(only(*moved), only(*rows), {}) == ()


NON_FINITE: dict[str, tuple[Any, Any]] = {
    "became NaN": ((None, {"n_nan": 1}), (0.1, {})),
    "one NaN behind a good mean": ((0.1, {"n_nan": 1}), (0.1, {})),
    "recovered": ((0.1, {}), (None, {"n_posinf": 9})),
    "new": ((0.1, {}), None),
}


@pytest.mark.parametrize(("now", "before"), NON_FINITE.values(), ids=NON_FINITE)
def test_a_non_finite_side_is_a_difference_without_a_number(
    row: Row, now: Any, before: Any
) -> None:
    """Catches NaN arithmetic, and JSON with bare NaN."""
    then = [row("logit_kl", "model", before[0], **before[1])] if before else []
    [record] = differences(only(row("logit_kl", "model", now[0], **now[1])), only(*then), {})
    assert (record["difference"], record["below_noise"]) == (None, False)
    assert record["value_kind"] != record["baseline_kind"]
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize("floor", [0.0, 1e-10])
def test_avx2_against_avx512_is_noise_even_where_batches_make_none(row: Row, floor: float) -> None:
    """Catches a floor of exactly 0 turning the measured 2.0e-9 of another CPU into a change."""
    before = only(row("logit_kl", "model", 0.003698866810635828))
    now = only(row("logit_kl", "model", 0.0036988688365470835))
    [record] = differences(now, before, {("logit_kl", "model"): floor})
    assert record["below_noise"]


@pytest.mark.parametrize("kl", [0.0, 1e-6, 0.002, 0.6])
def test_noise_moves_a_kl_as_the_triangle_inequality_says(kl: float) -> None:
    """Catches the floor itself being used: noise of size f moves √k by at most √f."""
    floor = 1e-4
    noise = noise_of_difference("logit_kl", floor, kl, kl)
    assert kl + noise == pytest.approx((math.sqrt(kl) + math.sqrt(floor)) ** 2, rel=1e-12)
    assert noise_of_difference("rel_error", floor, kl, kl) == floor
