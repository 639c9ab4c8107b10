"""Faults planted where a competitor missed them, or blamed something else."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import NonFinite, Scope

ALL = CapturePlan(batch_tokens=64, isolated_fraction=1.0)


def _copy(model: Any) -> Any:
    return copy.deepcopy(model)


def test_scaled_down_proj_is_named_and_nothing_before_it_differs(kit: Any) -> None:
    """Would catch propagated error taken for the culprit: every later layer differs too."""
    model = kit.build("llama")
    candidate = _copy(model)
    with torch.no_grad():
        candidate.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert {s for s, value in isolated.items() if value > 0} == {
        "layers.1.mlp.down_proj",
        "layers.1.mlp",
        "layers.1",
    }
    assert isolated["layers.1.mlp.down_proj"] == pytest.approx(0.05, rel=1e-5)
    assert isolated["layers.1.mlp"] == pytest.approx(0.05, rel=1e-5)
    propagated = captured.sink.largest("c", "rel_error")
    differing = [s for s, value in propagated.items() if value > 0]
    assert differing[0] == "layers.1.mlp"
    assert "layers.2" in differing
    assert captured.sink.largest("c", "lens_kl")["layers.0"] == 0
    assert captured.report.bit_equal == {"c": False}


def test_fault_stands_out_over_quantization(kit: Any) -> None:
    """Would catch a fault that drowns in int8 everywhere: invisible in KL, first in isolation."""
    model = kit.build("llama")
    candidate = kit.perturb(model, 0.002)
    with torch.no_grad():
        candidate.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert max(isolated, key=isolated.__getitem__).startswith("layers.1.mlp")
    others = [value for scope, value in isolated.items() if "layers.1" not in scope]
    assert isolated["layers.1.mlp.down_proj"] > 5 * max(others)


def test_nan_weight_is_located_and_spoils_no_other_prompt(kit: Any) -> None:
    """Would catch NaN passing (`nan > limit` is False), or the layer blamed instead of attention.

    Eager attention: torch's fused one on CPU swallows the NaN of a query for some lengths.
    """
    model = kit.build("llama", attn_implementation="eager")
    candidate = _copy(model)
    with torch.no_grad():
        candidate.model.layers[1].self_attn.q_proj.weight[3, 5] = torch.nan
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9, 9]), ALL)
    scope = Scope("layers.1.attention")
    assert captured.report.first_nonfinite == {"c": NonFinite(scope, 0, 0)}
    for prompt in range(3):
        observation = captured.sink.of("c", prompt)
        assert observation.first_nonfinite == NonFinite(scope, prompt, 0)
        assert np.isnan(captured.sink.row("c", prompt, "logit_kl", "model")[0]).all()
        assert (captured.sink.row("c", prompt, "rel_error", "layers.0")[0] == 0).all()
    assert captured.report.bit_equal == {"c": False}
    assert captured.report.observer_effect["c"] == 0
    isolated = captured.sink.largest("c", "isolated_error")
    assert {s for s, value in isolated.items() if value != 0} == {
        *("layers.1.attention.q_proj", "layers.1.attention", "layers.1"),
    }


def test_nan_that_depends_on_the_token_is_located_there(kit: Any) -> None:
    """Would catch a position relative to the batch or to the scored part."""
    model = kit.build("llama")
    candidate, suite = _copy(model), kit.suite([20, 9, 14], score_start=3)
    prompt = suite.prompts[2]
    with torch.no_grad():
        candidate.model.embed_tokens.weight[prompt.token_ids[1]] = torch.inf
    captured = kit.capture(model, {"c": candidate}, suite, CapturePlan(batch_tokens=64))
    found = captured.sink.of("c", 2).first_nonfinite
    assert found == NonFinite(Scope("embedding"), 2, 1)
    for other in suite.prompts[:2]:
        at = [n for n, t in enumerate(other.token_ids) if t == prompt.token_ids[1]]
        seen = captured.sink.of("c", other.index).first_nonfinite
        assert (seen is None) == (not at)


def test_nan_in_padding_never_counts(kit: Any) -> None:
    """Would catch padding positions in a statistic: a NaN for the padding id, hidden by the mask."""
    model = kit.build("own")
    candidate, suite = _copy(model), kit.suite([20, 9, 14])
    with torch.no_grad():
        candidate.tokens.weight[0] = torch.nan
    captured = kit.capture(model, {"c": candidate}, suite, CapturePlan(isolated_fraction=0))
    assert captured.report.num_padding_tokens > 0
    assert captured.report.first_nonfinite == {}
    assert captured.report.bit_equal == {"c": True}


def test_non_finite_reference_is_the_references(kit: Any) -> None:
    """Would catch a candidate that is blamed for what the reference has itself."""
    model = kit.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    captured = kit.capture(model, {"c": _copy(model)}, kit.suite([9, 20]))
    assert set(captured.report.first_nonfinite) == {"reference"}
    assert captured.report.first_nonfinite["reference"].scope == "layers.1.mlp"
    assert captured.sink.of("c", 0).first_nonfinite is None
    assert captured.report.bit_equal == {"c": False}


def test_nan_in_the_head_is_the_heads(kit: Any) -> None:
    """Would catch a non-finite value that no tap sees because the head runs in chunks."""
    model = kit.build("llama")
    candidate = _copy(model)
    with torch.no_grad():
        candidate.lm_head.weight[7, 0] = torch.nan
    captured = kit.capture(model, {"c": candidate}, kit.suite([9, 20], score_start=2))
    assert captured.report.first_nonfinite == {"c": NonFinite(Scope("head"), 0, 2)}
    assert captured.report.head_rows == {"c": (7,)}
    captured = kit.capture(candidate, {"c": model}, kit.suite([9, 20]))
    assert captured.report.first_nonfinite == {"reference": NonFinite(Scope("head"), 0, 0)}


def test_rotated_head_rows_are_named_and_no_layer_is_blamed(kit: Any) -> None:
    """Would catch a lens through each model's own head: it blames layer 0 for this."""
    model = kit.build("llama")
    candidate = _copy(model)
    with torch.no_grad():
        candidate.lm_head.weight[[26, 28, 31]] = model.lm_head.weight[[28, 31, 26]]
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    assert captured.report.head_rows == {"c": (26, 28, 31)}
    for metric in ("rel_error", "isolated_error"):
        values = captured.sink.largest("c", metric)
        assert {scope for scope, value in values.items() if value > 0} == {"head"}
    assert not any(captured.sink.largest("c", "lens_kl").values())
    assert captured.sink.largest("c", "logit_kl")["model"] > 1e-3


def test_many_differing_head_rows_are_not_listed(kit: Any) -> None:
    """Would catch a list of 50,000 ids for a quantized head."""
    model = kit.build("llama")
    candidate = _copy(model)
    with torch.no_grad():
        candidate.lm_head.weight.mul_(1.01)
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    assert captured.report.head_rows == {"c": ()}
    assert captured.sink.largest("c", "isolated_error")["head"] == pytest.approx(0.01, rel=1e-5)


def _widened(model: Any, extra: int) -> Any:
    wide = _copy(model)
    weight = torch.zeros(64 + extra, 32)
    weight[:64] = model.lm_head.weight.detach()
    wide.lm_head = nn.Linear(32, 64 + extra, bias=False)
    wide.lm_head.weight = nn.Parameter(weight)
    return wide


def test_wider_vocabulary_compares_shared_ids_and_reports_the_leak(kit: Any) -> None:
    """Would catch padding ids that win top-1, or KL taken without renormalising."""
    model = kit.build("llama")
    captured = kit.capture(model, {"c": _widened(model, 16)}, kit.suite([20, 9]), ALL)
    assert not any(captured.sink.largest("c", "logit_kl").values())
    assert {m.values.min() for m in captured.sink.matrices("c", "top1_agreement")} == {1.0}
    assert not any(captured.sink.largest("c", "isolated_error").values())
    for prompt in (0, 1):
        leaked, _ = captured.sink.row("c", prompt, "leaked_mass", "model")
        ids = torch.tensor([captured_ids(kit, prompt)])
        with torch.no_grad():
            z = model(ids).logits[0].double()
        wanted = 16 / (16 + z.exp().sum(-1))  # the added logits are 0
        assert leaked == pytest.approx(wanted.numpy(), rel=1e-5)


def captured_ids(kit: Any, prompt: int) -> tuple[int, ...]:
    ids: tuple[int, ...] = kit.suite([20, 9]).prompts[prompt].token_ids
    return ids


def test_padded_reference_is_cut_to_its_real_ids(kit: Any) -> None:
    """Would catch the reference's own padding ids in the comparison with a narrower candidate."""
    model = kit.build("llama")
    wide = kit.load(_widened(model, 16), num_tokens=60)
    captured = kit.capture(wide, {"c": kit.perturb(model)}, kit.suite([20, 9], vocabulary=60), ALL)
    ids = torch.tensor([kit.suite([20, 9], vocabulary=60).prompts[0].token_ids])
    with torch.no_grad():
        z, w = (m(ids).logits[0, :, :60].double() for m in (model, kit.perturb(model)))
    p, q = (x.log_softmax(-1) for x in (z, w))
    wanted = (p.exp() * (p - q)).sum(-1).numpy()
    assert captured.sink.row("c", 0, "logit_kl", "model")[0] == pytest.approx(wanted, rel=1e-4)


def test_bfloat16_candidate_is_compared_in_float32(kit: Any) -> None:
    """Would catch an error floor of bfloat16 in the comparison itself, or a wrong headroom."""
    model = kit.build("llama")
    half = _copy(model).to(torch.bfloat16)
    captured = kit.capture(model, {"half": half}, kit.suite([20, 9]), ALL)
    rounded = _copy(half).float()
    twin = kit.capture(model, {"half": rounded}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("half", "isolated_error")
    same = twin.sink.largest("half", "isolated_error")
    assert isolated["embedding"] == pytest.approx(same["embedding"], rel=1e-6)
    assert 1e-4 < isolated["layers.1.mlp.down_proj"] < 0.02
    bits, _ = captured.sink.row("half", 0, "headroom_bits", "layers.0")
    magnitude, _ = captured.sink.row("half", 0, "max_abs", "layers.0")
    largest = float(torch.finfo(torch.bfloat16).max)
    assert bits == pytest.approx(np.log2(largest / magnitude))
    assert captured.report.observer_effect["half"] == 0
