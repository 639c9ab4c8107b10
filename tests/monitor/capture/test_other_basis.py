"""Candidates whose hidden states lie in another basis: compared in the reference's, or said not to be."""

import copy
from typing import Any

import pytest
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch.errors import CaptureError
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import Recipe, RotationSpec, WeightSpec
from quantwatch_kernels.quantize.rotation import rotate_
from quantwatch_kernels.quantize.smoothquant import smooth_

ALL = CapturePlan(batch_tokens=64, isolated_fraction=1.0)
WHOLE = RotationSpec(residual=True, values=True, down=True)
TINY = 1e-5


def spread_gains(model: Any) -> Any:
    """Give the norms gains that a forgotten factor would show in."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_rotated_model_equals_itself(kit: Any, tied: bool) -> None:
    """Would catch rotated hidden states compared as they are: errors of 140 % in every layer."""
    model = spread_gains(kit.build("llama", tie_word_embeddings=tied))
    candidate = copy.deepcopy(model)
    rotate_(candidate, WHOLE)
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    for metric in ("rel_error", "lens_kl", "isolated_error", "logit_kl"):
        largest = captured.sink.largest("c", metric)
        assert largest, metric
        assert max(largest.values()) < TINY, metric
    assert "layers.1" in captured.sink.largest("c", "rel_error")
    told = {scope: by["c"] for scope, by in captured.report.missing.items() if "c" in by}
    assert told["layers.1.attention"] == "no isolated error: its hidden states are rotated"
    assert ("final_norm" in captured.sink.largest("c", "rel_error")) == tied
    assert told["final_norm"].startswith("no isolated error" if tied else "not compared")


def test_a_fault_in_a_rotated_layer_is_found(kit: Any) -> None:
    """Would catch a comparison that became blind with the rotation."""
    model = spread_gains(kit.build("llama"))
    candidate = copy.deepcopy(model)
    rotate_(candidate, WHOLE)
    candidate.model.layers[1].mlp.down_proj.weight.data *= 1.05
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert {scope for scope, value in isolated.items() if value > 1e-3} == {
        "layers.1.mlp.down_proj"
    }
    assert isolated["layers.1.mlp.down_proj"] == pytest.approx(0.05, rel=1e-3)


def test_a_smoothed_model_equals_itself(kit: Any) -> None:
    """Would catch a module behind a smoothed norm being fed inputs that aren't smoothed."""
    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    smooth_(candidate, 0.5, [torch.arange(40).view(2, 20)])
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert max(isolated.values()) < TINY
    assert "layers.1" in isolated
    assert "layers.1.attention" not in isolated
    assert captured.report.missing["layers.1.mlp"]["c"] == (
        "no isolated error: its inputs are smoothed"
    )


def test_awq_scales_are_known_to_the_comparison(kit: Any) -> None:
    """Would catch AWQ's folded scales read as errors of the modules that take them."""
    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    spec = Recipe.named("int8-channel").weights
    recipe = Recipe(WeightSpec(spec.format, spec.granularity, method="awq"))
    quantize_(candidate, recipe, calibration=[(torch.arange(80) % 64).view(2, 40)])
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert 0 < max(isolated.values()) < 0.05
    assert "layers.1.attention.q_proj" not in isolated


def test_a_rotated_reference_is_refused(kit: Any) -> None:
    """Would catch figures of two models in two bases."""
    model = kit.build("llama")
    rotated = copy.deepcopy(model)
    rotate_(rotated, RotationSpec())
    with pytest.raises(CaptureError, match="the reference can't have this recipe"):
        kit.capture(rotated, {"c": model}, kit.suite([20, 9]), ALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_headroom_is_that_of_the_rotated_stream(kit: Any, dtype: torch.dtype) -> None:
    """Would catch the headroom of a stream that is nowhere in the model: an outlier spread out."""
    model = kit.build("llama", tie_word_embeddings=False)
    model.model.layers[0].mlp.down_proj.weight.data[5] *= 400
    candidate = copy.deepcopy(model)
    rotate_(candidate, RotationSpec())
    model, candidate = model.to(dtype), candidate.to(dtype)
    seen: list[torch.Tensor] = []
    suite = kit.suite([20])
    captured = kit.capture(model, {"c": candidate}, suite, ALL)
    candidate.model.layers[0].register_forward_hook(
        lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        candidate(torch.tensor([suite.prompts[0].token_ids]), use_cache=False)
    bits, _ = captured.sink.row("c", 0, "headroom_bits", "layers.0")
    shown, _ = captured.sink.row("c", 0, "max_abs", "layers.0")
    largest = seen[0][0].double().abs().amax(-1)
    expected = torch.log2(torch.finfo(dtype).max / largest)
    assert torch.as_tensor(bits).tolist() == pytest.approx(expected.tolist(), abs=0.02)
    # Its largest value in the reference's basis is three times as large.
    assert float(torch.as_tensor(shown).max()) > 3 * float(largest.max())
