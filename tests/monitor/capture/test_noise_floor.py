"""The reference against itself, beside another text instead of alone."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantwatch.capture import conditions
from quantwatch.capture.plan import CapturePlan
from quantwatch.metrics.registry import METRICS


def test_floor_is_measured_like_a_candidate(kit: Any, architecture: str) -> None:
    """Would catch a floor without isolated errors, of other prompts, or as large as a real fault."""
    model = kit.build(architecture)
    plan = CapturePlan(batch_tokens=64, isolated_fraction=0.7)
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9, 21, 14]), plan)
    floor, sink = captured.floor, captured.sink
    conditions = {"threads"} if architecture == "own" else {"threads", "attention"}
    assert {o.candidate for o in floor.observations} <= {"reference"} | conditions
    isolated = {
        o.prompt for o in sink.observations if any(m.metric == "isolated_error" for m in o.matrices)
    }
    measured = {o.prompt for o in floor.observations if o.candidate == "reference"}
    assert measured
    assert measured < isolated
    for prompt in measured:
        ours, theirs = sink.of("c", prompt), floor.of("reference", prompt)
        places = [
            {(m.metric, m.scopes, m.role) for m in o.matrices if m.role == "sample"}
            for o in (ours, theirs)
        ]
        assert places[0] == places[1]
    for metric in ("rel_error", "isolated_error"):
        noise, fault = floor.largest("reference", metric), sink.largest("c", metric)
        assert set(noise) == set(fault)
        assert max(noise.values()) < 1e-5
        assert np.median(list(fault.values())) > 1e-3
    assert floor.largest("reference", "logit_kl")["model"] < 1e-10


def test_floor_of_one_prompt(kit: Any) -> None:
    """Would catch a suite of one prompt without a floor."""
    model = kit.build("llama")
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30]))
    found = {(o.candidate, o.prompt) for o in captured.floor.observations}
    assert found == {("reference", 0), ("threads", 0), ("attention", 0)}


@pytest.mark.parametrize(("start", "expected"), [(0, 6), (5, 11), (20, 26), (27, 30)])
def test_floor_of_the_first_tokens(kit: Any, start: int, expected: int) -> None:
    """Would catch a floor that costs a long prompt, or whose rows are not the trace's."""
    model = kit.build("llama")
    plan = CapturePlan(floor_tokens=6, isolated_fraction=1.0, isolated_positions=9)
    suite = kit.suite([30], score_start=start)
    captured = kit.capture(model, {"c": kit.perturb(model)}, suite, plan)
    floor = captured.floor
    values, positions = floor.row("reference", 0, "rel_error", "layers.1")
    assert len(values) == expected - start
    assert positions is None
    for metric in ("rel_error", "isolated_error"):
        assert 0 < max(floor.largest("reference", metric).values()) < 1e-5
    for matrix in floor.of("reference", 0).matrices:
        if matrix.positions is not None:
            assert matrix.positions.max() < expected


def test_floor_at_the_end_of_the_context(kit: Any) -> None:
    """Would catch a companion beyond a learned position table."""
    model = kit.build("gpt2", n_positions=30)
    captured = kit.capture(
        kit.load(model, max_positions=30), {"c": kit.perturb(model)}, kit.suite([30, 30])
    )
    assert captured.floor.observations


def test_without_isolated_prompts_there_is_no_floor(kit: Any) -> None:
    """Would catch a floor that nobody asked to pay for."""
    model = kit.build("llama")
    plan = CapturePlan(isolated_fraction=0)
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9]), plan)
    assert not captured.floor.observations
    assert not captured.sink.matrices("c", "isolated_error")
    assert captured.report.num_forwards == {"reference": 2, "c": 2}


@pytest.mark.parametrize("start", [0, 6])
def test_only_scored_positions_are_emitted(kit: Any, start: int) -> None:
    """Would catch llama.cpp's unscored first half in a mean, or positions off by its length."""
    model = kit.build("llama")
    candidate = kit.perturb(model)
    suite = kit.suite([30, 9, 8], score_start=start)
    plan = CapturePlan(batch_tokens=64, lens_positions=128, isolated_fraction=1.0)
    scored = kit.capture(model, {"c": candidate}, suite, plan)
    whole = kit.capture(model, {"c": candidate}, kit.suite([30, 9, 8]), plan)
    for prompt in suite.prompts:
        length = len(prompt.token_ids)
        for matrix in scored.sink.of("c", prompt.index).matrices:
            where = matrix.positions
            assert METRICS[matrix.metric]
            assert matrix.values.shape[1] == (length - start if where is None else len(where))
            if where is not None:
                assert where.min() >= start
                assert where.max() < length
        for metric, scope in [("logit_kl", "model"), ("rel_error", "layers.1")]:
            ours, _ = scored.sink.row("c", prompt.index, metric, scope)
            theirs, _ = whole.sink.row("c", prompt.index, metric, scope)
            np.testing.assert_allclose(ours, theirs[start:], rtol=1e-4)
        ours, at = scored.sink.row("c", prompt.index, "nll_candidate", "model")
        assert at.tolist() == list(range(start, length - 1))
        top = scored.sink.of("c", prompt.index).top
        assert top is not None
        assert len(top.reference_ids) == length - start


def test_prompt_of_one_token(kit: Any) -> None:
    """Would catch a crash, or a target that belongs to the next prompt."""
    model = kit.build("gemma2")
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([1, 1, 12, 1]))
    observation = captured.sink.of("c", 1)
    metrics = {matrix.metric for matrix in observation.matrices}
    assert "logit_kl" in metrics
    assert "nll_candidate" not in metrics
    assert captured.sink.row("c", 1, "lens_kl", "layers.0")[1].tolist() == [0]


@pytest.mark.parametrize("before", [1, 2])
def test_thread_count_and_attention_are_put_back(kit: Any, before: int) -> None:
    """Would catch a run that goes on with other threads or attention than it was asked for."""
    model = kit.build("llama")
    torch.set_num_threads(before)
    kept = model.config._attn_implementation
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9]))
    assert torch.get_num_threads() == before
    assert model.config._attn_implementation == kept
    assert captured.report.noise_floor_sources == {"threads": "measured", "attention": "measured"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("own", "can't switch"), ("gemma2", "no second attention"), ("bloom", "can't switch")],
)
def test_a_condition_that_can_not_be_had_says_why(kit: Any, kind: str, reason: str) -> None:
    """Would catch "not measurable" stored as a floor of 0."""
    model = kit.build(kind)
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9]))
    assert reason in captured.report.noise_floor_sources["attention"]
    assert "attention" not in {o.candidate for o in captured.floor.observations}


def test_another_computation_is_no_noise(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a floor that hides every fault: an attention that leaves something out."""
    model = kit.build("llama")

    def wrong(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", wrong)
    model.set_attn_implementation("eager")
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9]))
    assert "more than rounding does" in captured.report.noise_floor_sources["attention"]
    assert max(captured.floor.largest("reference", "rel_error").values()) < 1e-5
    assert "attention" not in {o.candidate for o in captured.floor.observations}


def test_without_condition_tokens_only_the_batch_is_a_condition(kit: Any) -> None:
    """Would catch a switch that does nothing."""
    model = kit.build("llama")
    plan = CapturePlan(condition_tokens=0)
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30, 9]), plan)
    assert {o.candidate for o in captured.floor.observations} == {"reference"}
    assert captured.report.noise_floor_sources == {}


def test_another_attention_is_put_back(kit: Any) -> None:
    """Would catch a reference that goes on with eager attention after an error in between."""
    loaded = kit.load(kit.build("llama"))
    inner = loaded.module.model.layers[0].self_attn.config
    before = inner._attn_implementation
    with conditions._other_attention(loaded):
        assert inner._attn_implementation != before
    assert inner._attn_implementation == before
    with pytest.raises(ZeroDivisionError), conditions._other_attention(loaded):
        print(1 // 0)
    assert inner._attn_implementation == loaded.module.config._attn_implementation == before
