"""The JSON document: exact keys, strict numbers."""

import json
import math
from typing import Any

import pytest

from quantwatch.domain import RunResult, RunStatus, Scope, Verdict
from quantwatch.report.document import document, failure_document, render

TOP = {"run_id", "status", "verdict", "suite", "timings_s", "candidates", "alerts"}
CANDIDATE = {
    "name", "verdict", "fingerprint", "execution", "culprit", "logit_kl", "bit_equal",
    "first_nonfinite", "leaked_mass", "top1_agreement", "topk_logit_deviation_k5",
    "topk_logit_deviation_k3", "ppl_reference", "ppl_candidate", "ppl_ratio", "num_nonfinite",
    "served_kl", "served_tv", "served_tv_most", "served_unseen", "num_missing", "layers", "scopes",
}  # fmt: skip
LAYER = {
    "router",
    "index",
    "name",
    "lens_kl",
    "isolated_error",
    "rel_error",
    "sqnr_db",
    "cosine",
    "feature_kl",
}
SCOPE = {"name", "isolated_error", "rel_error", "sqnr_db", "cosine"}
ALERT = {"rule", "candidate", "scope", "value", "threshold", "severity"}


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def kinds(data: Any) -> list[str]:
    """All numbers that are null without a kind beside them, by key; keys with texts are left out."""
    found = []
    if isinstance(data, dict):
        numeric = {k for k in data if f"{k}_kind" in data}
        found += [k for k in numeric if data[k] is not None]
        for value in data.values():
            found += kinds(value)
    elif isinstance(data, list):
        for value in data:
            found += kinds(value)
    return found


def test_keys_and_nesting_are_those_of_the_contract(fault_run: RunResult) -> None:
    """A renamed or dropped key breaks every CI job that reads the document."""
    data = strict(render(fault_run))
    assert data.keys() >= TOP
    assert data["suite"] == {"name": "core-v1:demo", "hash": "d" * 64, "num_tokens": 3900}
    for candidate in data["candidates"]:
        assert candidate.keys() >= CANDIDATE
        assert candidate["logit_kl"].keys() == {"mean", "se", "p50", "p90", "p99", "p999", "max"}
        assert all(layer.keys() == LAYER for layer in candidate["layers"])
        assert all(
            layer["lens_kl"].keys() == {"mean", "p99", "max"} for layer in candidate["layers"]
        )
    assert all(alert.keys() == ALERT for alert in data["alerts"])
    assert data["verdict"] == "regression"
    assert data["candidates"][1]["culprit"] == "layers.2.mlp.down_proj"


def test_scopes_are_the_other_places_in_forward_order(fault_run: RunResult) -> None:
    """Sorting as text would put layers.10 before layers.2 and the head in the middle."""
    scopes = document(fault_run)["candidates"][0]["scopes"]
    names = [scope["name"] for scope in scopes]
    assert names[0] == "embedding"
    assert names[1:4] == ["layers.0.attention", "layers.0.mlp", "layers.0.mlp.down_proj"]
    assert names[-2:] == ["final_norm", "head"]
    assert all(scope.keys() >= SCOPE for scope in scopes)


def test_layer_order_is_numeric(make: Any) -> None:
    """Twelve layers sorted as text come out as 0, 1, 10, 11, 2."""
    run = make.run(make.candidate(measurements=make.rows(num_layers=12)))
    layers = document(run)["candidates"][0]["layers"]
    assert [layer["index"] for layer in layers] == list(range(12))


def test_perplexities_are_exponentials_of_means(fault_run: RunResult) -> None:
    """Perplexity is exp(mean NLL); the ratio comes from the paired difference."""
    candidate = document(fault_run)["candidates"][0]
    assert candidate["ppl_reference"] == pytest.approx(20, rel=1e-12)
    assert candidate["ppl_candidate"] == pytest.approx(21, rel=1e-12)
    assert candidate["ppl_ratio"] == pytest.approx(1.05, rel=1e-12)


def test_nan_is_null_beside_its_kind(make: Any) -> None:
    """NaN weights must never become a bare NaN, a 0, or a silently missing key."""
    text = render(make.run(make.nan()))
    candidate = strict(text)["candidates"][0]
    assert candidate["logit_kl"]["mean"] is None
    assert candidate["logit_kl"]["mean_kind"] == "nan"
    assert candidate["ppl_ratio"] is None
    assert candidate["ppl_ratio_kind"] == "nan"
    assert candidate["ppl_reference"] == pytest.approx(20)
    assert candidate["num_nonfinite"] == 200
    place = {"scope": "layers.3.attention", "prompt": 0, "position": 0}
    assert candidate["first_nonfinite"] == place
    assert kinds(candidate) == []


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ({"n_posinf": 100}, "posinf"),
        ({"n_neginf": 100}, "neginf"),
        ({"n_posinf": 50, "n_neginf": 50}, "nan"),
        ({"n_nan": 1, "n_posinf": 99}, "nan"),
        ({"n_missing": 100}, "missing"),
    ],
    ids=str,
)
def test_kind_of_a_mean_without_finite_values(make: Any, counts: dict[str, int], kind: str) -> None:
    """An equal layer has SQNR +∞, which is good; mistaking it for missing hides that."""
    row = make.row("sqnr_db", "layers.0", None, **counts)
    layer = document(make.run(make.candidate(measurements=(row,))))["candidates"][0]["layers"][0]
    assert (layer["sqnr_db"], layer["sqnr_db_kind"]) == (None, kind)


def test_a_statistic_without_value_beside_a_finite_mean_is_missing(make: Any) -> None:
    """One prompt has a mean but no standard error; 0 would claim certainty."""
    row = make.row("logit_kl", "model", 0.1, se=None)
    kl = document(make.run(make.candidate(measurements=(row,))))["candidates"][0]["logit_kl"]
    assert (kl["mean"], kl["se"], kl["se_kind"]) == (0.1, None, "missing")


def test_what_was_not_measured_is_missing_not_zero(make: Any) -> None:
    """With lens_positions = 0 there is no lens KL: 0 would be a perfect score."""
    rows = tuple(row for row in make.rows() if row.metric != "lens_kl")
    layer = document(make.run(make.candidate(measurements=rows)))["candidates"][0]["layers"][0]
    assert (layer["lens_kl"]["mean"], layer["lens_kl"]["mean_kind"]) == (None, "missing")


def test_leaked_mass_is_zero_when_all_ids_are_shared(make: Any) -> None:
    """Equal vocabularies leak exactly nothing; a wider one leaks what was measured."""
    wider = (*make.rows(), make.row("leaked_mass", "model", 0.0272))
    run = make.run(make.candidate(), make.candidate("wide", measurements=wider))
    assert [c["leaked_mass"] for c in document(run)["candidates"]] == [0.0, 0.0272]


def test_huge_nll_is_positive_infinity_not_a_crash(make: Any) -> None:
    """exp(800) overflows: the report of a broken model must still be written."""
    row = make.row("nll_candidate", "model", 800.0)
    candidate = strict(render(make.run(make.candidate(measurements=(row,)))))["candidates"][0]
    assert (candidate["ppl_candidate"], candidate["ppl_candidate_kind"]) == (None, "posinf")


def test_failed_candidate_has_every_key_and_its_reason(make: Any) -> None:
    """A candidate that could not be loaded must not look like one that passed."""
    failed = make.candidate(
        "broken", variant=None, verdict=None, measurements=(), culprit=None, failure="corrupt file"
    )
    candidate = strict(render(make.run(failed, make.candidate())))["candidates"][0]
    assert candidate.keys() >= CANDIDATE
    assert (candidate["verdict"], candidate["fingerprint"]) == (None, None)
    assert candidate["failure"] == "corrupt file"
    assert candidate["leaked_mass_kind"] == "missing"


@pytest.mark.parametrize("status", [s for s in RunStatus if s != RunStatus.SUCCEEDED], ids=str)
def test_verdict_is_null_unless_succeeded(make: Any, status: RunStatus) -> None:
    """The monitor's own trouble never looks like a verdict on the model."""
    run = make.run(make.candidate(), status=status, verdict=Verdict.PASS)
    assert (document(run)["verdict"], document(run)["status"]) == (None, status.value)


def test_alert_on_nan_carries_the_kind(make: Any) -> None:
    """A NaN alert has no value; its kind says why."""
    alert = make.alert(value=None, value_kind="nan", scope=Scope("layers.3"))
    data = strict(render(make.run(make.nan(), alerts=(alert,))))["alerts"][0]
    assert (data["value"], data["value_kind"], data["threshold"]) == (None, "nan", 0.012)


def test_nan_that_slips_through_is_refused(make: Any) -> None:
    """allow_nan=False: a NaN in timings raises instead of writing invalid JSON."""
    with pytest.raises(ValueError, match="JSON"):
        render(make.run(make.candidate(), timings_s={"load": math.nan}))


def test_failure_document_has_the_same_top_level(fault_run: RunResult) -> None:
    """Scripts read the same keys whether a run began or not."""
    failed = failure_document(RunStatus.FAILED, "disk full")
    assert failed.keys() == document(fault_run).keys()
    assert failed["suite"].keys() == document(fault_run)["suite"].keys()
    assert (failed["status"], failed["verdict"], failed["reason"]) == ("failed", None, "disk full")
