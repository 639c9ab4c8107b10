"""Whole recipes: rotation, smoothing, weights, activations and residual dtype in one call."""

from typing import Any

import pytest
import torch
from tests.kernels.quantize.outputs import IDS, logits, moved

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize.activations import fake_quantize_input
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
    WeightSpec,
)

W8 = WeightSpec(INT8, PerChannel())
W4 = WeightSpec(INT_FORMATS["uint4"], PerGroup(16), "integer")
STATIC = ActivationSpec(INT_FORMATS["uint8"], PerTensor(), static=True)
DYNAMIC = ActivationSpec(INT_FORMATS["uint8"])


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "mixtral", "qwen2-moe"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(W8, activations=DYNAMIC),
        Recipe(W8, activations=STATIC),
        Recipe(W8, activations=DYNAMIC, smooth=0.5),
        Recipe(W8, activations=DYNAMIC, smooth=0.5, rotation=RotationSpec(True, True, True)),
        Recipe(W8, residual_dtype=(("*", torch.bfloat16),)),
    ],
    ids=["dynamic", "static", "smooth", "rotated", "residual"],
)
def test_eight_bits_stay_close(family: str, recipe: Recipe, decoder: Any, calibration: Any) -> None:
    """Catches a step that undoes another one: any of them in the wrong order is far off."""
    model = decoder(family)
    before = logits(model)
    quantize_(model, recipe, calibration=calibration)
    assert 0 < moved(logits(model), before) < 0.2


@pytest.mark.parametrize("execution", ["dequantized", "aten", "reference"])
def test_packed_layers_keep_rotation_and_rounding(
    execution: Any, decoder: Any, calibration: Any
) -> None:
    """Catches a packed layer that replaces a rotated one and forgets the rotation of its input."""
    recipe = Recipe(W8, activations=DYNAMIC, rotation=RotationSpec(True, True, True))
    models = [decoder("llama"), decoder("llama")]
    quantize_(models[0], recipe, calibration=calibration)
    quantize_(models[1], recipe, calibration=calibration, execution=execution)
    down = models[1].model.layers[0].mlp.down_proj
    assert isinstance(down, PackedLinear) == (execution != "dequantized")
    assert moved(logits(models[1]), logits(models[0])) < 0.02
    assert 0 < moved(logits(models[1]), logits(decoder("llama"))) < 0.2


def test_weights_first_then_inputs(decoder: Any) -> None:
    """Each linear layer computes rounded weight times rounded input, and nothing else is rounded."""
    model, plain = decoder("llama"), decoder("llama")
    quantize_(model, Recipe(W8, activations=DYNAMIC))
    x = torch.randn(3, 48)
    q, kept = model.model.layers[0].self_attn.q_proj, plain.model.layers[0].self_attn.q_proj
    expected = fake_quantize_input(x, DYNAMIC) @ fake_quantize(kept.weight, W8).T
    assert torch.equal(q(x), expected)
    assert torch.equal(model.lm_head(x), plain.lm_head(x))


def test_notes(decoder: Any, calibration: Any) -> None:
    recipe = Recipe(
        W8,
        rotation=RotationSpec(True, True, True),
        smooth=0.5,
        activations=DYNAMIC,
        embedding=W8,
        residual_dtype=(("0", torch.float16),),
    )
    model = decoder("qwen2-moe").to(torch.bfloat16)
    report = quantize_(model, recipe, calibration=calibration)
    notes = [(place, note) for place, note in report.notes]
    assert any(place == "rotation" and "moved the logits" in note for place, note in notes)
    assert any(place == "smoothing" and "places" in note for place, note in notes)
    assert any("router logits are float32" in note for _, note in notes)
    assert any(
        place.endswith("experts.down_proj") and "not rotated" in note for place, note in notes
    )
    assert any("embedding is looked up" in note for _, note in notes)
    assert any("rounded to float16" in note for _, note in notes)
    assert logits(model).isfinite().all()


def test_static_needs_calibration(decoder: Any) -> None:
    with pytest.raises(ValueError, match="needs calibration inputs"):
        quantize_(decoder("llama"), Recipe(W8, activations=STATIC))


def test_each_input_is_observed_once(decoder: Any, monkeypatch: Any, calibration: Any) -> None:
    """Catches the walk's own first call counted as calibration data, which moves an average."""
    from quantwatch_kernels.quantize.activations import ActivationQuantizer
    from quantwatch_kernels.quantize.observers import MinMaxObserver

    counts: dict[int, int] = {}
    update = MinMaxObserver.update

    def counting(self: Any, x: Any) -> None:
        counts[id(self)] = counts.get(id(self), 0) + 1
        update(self, x)

    monkeypatch.setattr(MinMaxObserver, "update", counting)
    model = decoder("llama")
    quantize_(model, Recipe(W8, exclude=(), activations=STATIC), calibration=calibration)
    quantizers = [m for m in model.modules() if isinstance(m, ActivationQuantizer)]
    assert len(quantizers) == len(counts) == 2 * 7 + 1
    assert set(counts.values()) == {len(calibration)}


def test_an_expert_that_is_never_reached_is_named(decoder: Any) -> None:
    """Catches a range 0 … 0 for a layer without a token (bug log 21)."""
    model = decoder("qwen2-moe")
    down = model.model.layers[0].mlp.shared_expert.down_proj
    model.model.layers[0].mlp.shared_expert.forward = torch.zeros_like
    assert down.in_features == 40
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.shared_expert\.\w+: no activation was observed"
    ):
        quantize_(model, Recipe(W8, activations=STATIC), calibration=[IDS])


def test_gptq_sees_the_rotated_input(decoder: Any, calibration: Any) -> None:
    """Catches a Hessian in another basis than the weight: worse than rounding to nearest."""
    errors = {}
    for method in ("nearest", "gptq"):
        model = decoder("llama")
        before = logits(model)
        spec = WeightSpec(W4.format, W4.granularity, "integer", method=method)
        recipe = Recipe(spec, rotation=RotationSpec(True, True, True))
        quantize_(model, recipe, calibration=[IDS])
        errors[method] = moved(logits(model), before)
    assert errors["gptq"] < errors["nearest"]
