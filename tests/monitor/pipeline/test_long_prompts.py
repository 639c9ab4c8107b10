"""Long prompts in a check: what is refused and when, what is said, what stays comparable."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.tiny_models import llama

import quantwatch
from quantwatch.domain import RunResult, Suite, ranges_of
from quantwatch.errors import ConfigError, ModelError, PromptError

IDS = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    reference, candidate = llama(64, scale=4.0), llama(64, scale=4.0)
    with torch.no_grad():
        candidate.model.layers[1].mlp.down_proj.weight *= 1.05
    return reference, candidate


def compared(pair: tuple[Any, Any], ids: Any = IDS, **settings: Any) -> RunResult:
    return quantwatch.compare(*pair, ids, **settings)


def test_a_run_in_chunks_is_a_run(pair: tuple[Any, Any]) -> None:
    """Catches figures that chunks change beyond rounding, a culprit that is lost, a silent part."""
    whole, pieces = compared(pair), compared(pair, prefill_chunk=12)
    ours, theirs = pieces.candidates[0], whole.candidates[0]
    for metric in ("logit_kl", "nll_difference", "tv"):
        a, b = ours.find(metric), theirs.find(metric)
        assert a is not None
        assert b is not None
        assert (a.n, a.max_position, a.method) == (b.n, b.max_position, b.method)
        assert a.mean == pytest.approx(b.mean, rel=1e-3, abs=1e-9)
    assert ours.culprit is not None
    assert ours.culprit.scope == "layers.1.mlp.down_proj"
    assert ours.variant is not None
    assert any("1 prompt went through in chunks" in note for note in ours.variant.notes)
    assert pieces.capture["prefill_effect"].keys() == {"reference", "candidate"}
    assert pieces.capture_sha != whole.capture_sha
    isolated = ours.find("isolated_error", "layers.1")
    assert isolated is not None
    assert (isolated.n, isolated.method) == (12, "sampled positions")


def test_a_chunk_that_nobody_needs_changes_nothing(pair: tuple[Any, Any]) -> None:
    """Catches a baseline that is refused though every number has the same bits."""
    whole, longer = compared(pair), compared(pair, prefill_chunk=40)
    assert longer.capture_sha == whole.capture_sha
    assert longer.candidates[0].measurements == whole.candidates[0].measurements
    assert longer.capture["chunked_prompts"] == 0


def test_kl_by_position_is_in_the_run(pair: tuple[Any, Any]) -> None:
    """Catches ranges that chunks cut, and means that don't add up to the run's."""
    found = compared(pair, prefill_chunk=7)
    ranges = [r for r in ranges_of(found.capture, "candidate") if r.metric == "logit_kl"]
    assert [(r.first, r.last, r.n) for r in ranges] == [(0, 15, 16), (16, 31, 16), (32, 63, 8)]
    row = found.candidates[0].find("logit_kl")
    assert row is not None
    assert sum(r.n * (r.mean or 0) for r in ranges) / 40 == pytest.approx(row.mean, rel=1e-12)
    assert all(r.se is None for r in ranges)  # one prompt has no error


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_bad_chunks_are_named(pair: tuple[Any, Any], size: Any) -> None:
    """Catches an endless loop, and a part of a token."""
    with pytest.raises(ConfigError, match="prefill_chunk"):
        compared(pair, prefill_chunk=size)


def test_prompts_beyond_the_context_stay_refused(pair: tuple[Any, Any]) -> None:
    """Catches chunks as a way around the number of positions a model was made for."""
    ids = torch.randint(0, 64, (1, 65), generator=torch.Generator().manual_seed(0))
    with pytest.raises(PromptError, match="the model's context is 64"):
        compared(pair, ids, prefill_chunk=16)
    allowed = compared(pair, ids, prefill_chunk=16, allow_beyond_context=True)
    assert allowed.num_tokens == 65


def test_a_candidate_that_can_not_fails_alone(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches one served candidate that takes all others down, or is measured wrongly."""
    from quantwatch.config.schema import CheckConfig
    from quantwatch.models.loading import from_module
    from quantwatch.pipeline import measure
    from quantwatch.pipeline.request import RunRequest
    from quantwatch.prompts.loading import suite_from_token_ids
    from quantwatch_kernels.serve.kv_scheme import scheme_named
    from quantwatch_kernels.serve.kv_single_pass import serve_through_

    served = llama(64, scale=4.0)
    serve_through_(served, scheme_named("int8"), gains=None)
    modules = {"plain": pair[1], "served": served}
    suite: Suite = suite_from_token_ids(IDS.tolist())
    one: Any = {"factory": "a:b", "allow_code": True}
    named: Any = {"candidates": [{**one, "name": name} for name in modules], "suite": "core-v1"}
    check = CheckConfig(reference=one, **named, prefill_chunk=16)
    monkeypatch.setattr(measure, "load_one", lambda _, name, __: from_module(name, modules[name]))
    request = RunRequest("n", check, tmp_path, tmp_path)
    found = measure._load_candidates(request, from_module("reference", pair[0], None), suite)
    assert list(found.candidates) == ["plain"]
    assert (
        "can't go through it in chunks: this attention takes whole texts"
        in found.failures["served"]
    )
    with pytest.raises(ModelError, match="unset prefill_chunk"):
        compared((pair[0], served), prefill_chunk=16)


def test_a_stored_run_keeps_its_ranges(folder: Path, database: Any) -> None:
    """Catches ranges that JSON or the database changes, and pieces that the store can't take."""
    from tests.monitor.pipeline.test_streamed_check import Quiet, _request

    from quantwatch.pipeline import run_check
    from quantwatch.store import blocks, runs

    run = run_check(_request(folder, prefill_chunk=6), database=database, progress=Quiet())
    stored = runs.get_result(database, run.run_id)
    assert stored.capture["chunked_prompts"] > 5
    for name in ("int8", "faulty"):
        ranges = ranges_of(stored.capture, name)
        assert ranges == ranges_of(run.capture, name)
        assert {each.metric for each in ranges} == {"logit_kl", "lens_kl"}
        assert all(each.se is not None for each in ranges)
    kept = blocks.get_block(database, run.run_id, "int8", "per_token", "logit_kl", 15)
    assert kept is not None
    assert kept.values.shape == (1, 21)
    assert (kept.values >= 0).all()  # NaN marks what wasn't measured
