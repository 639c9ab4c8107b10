"""Stacked experts: each is quantized as a matrix of its own, on its own tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.experts import collect_expert_stats, expert_layers
from quantwatch_kernels.quantize.gptq import gptq
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    LayerRule,
    PerTensor,
    Recipe,
    WeightSpec,
)
from quantwatch_kernels.quantize.selection import Layer, select

INT4 = Recipe.named("int4-g16")
GPTQ = Recipe.named("uint3-g16").with_weights(method="gptq")
FAMILIES = ["mixtral", "qwen2-moe"]


def stack(model: Any, parameter: str, layer: int = 0) -> Tensor:
    found: Tensor = model.model.layers[layer].mlp.experts.get_parameter(parameter)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_is_a_matrix(family: str, decoder: Callable[[str], Any]) -> None:
    """Catches a stack quantized along the wrong dimension, or with scales across experts."""
    model, plain = decoder(family), decoder(family)
    report = quantize_(model, INT4)
    for parameter in ("gate_up_proj", "down_proj"):
        for expert in range(4):
            before = stack(plain, parameter)[expert].clone()
            expected = fake_quantize(before, INT4.weights)
            assert torch.equal(stack(model, parameter)[expert], expected)
            assert f"model.layers.0.mlp.experts.{expert}.{parameter}" in report.converted


def test_a_scale_per_tensor_is_a_scale_per_expert(decoder: Callable[[str], Any]) -> None:
    """Catches one large expert that takes the range of all others (bug log 42)."""
    model = decoder("mixtral")
    with torch.no_grad():
        stack(model, "down_proj")[2].mul_(1000)
    before = stack(model, "down_proj").clone()
    spec = WeightSpec(INT_FORMATS["int8"], PerTensor())
    quantize_(model, Recipe(spec))
    for expert in range(4):
        error = (stack(model, "down_proj")[expert] - before[expert]).abs().max()
        assert error <= before[expert].abs().max() / 127 / 2 * 1.001


def test_bytes_count_every_expert(decoder: Callable[[str], Any]) -> None:
    """Catches a stack that is counted once, or as floats: the sum of its parts, to the byte."""
    recipe = Recipe.named("int4-g16")
    keeps_experts = Recipe(
        recipe.weights,
        layers=(LayerRule("*experts.gate_up_proj", None), LayerRule("*.experts.down_proj", None)),
    )
    with_experts = quantize_(decoder("mixtral"), recipe)
    without = quantize_(decoder("mixtral"), keeps_experts)
    floats = quantized = 0
    for rows, columns in ((160, 48), (48, 80)):
        floats += 2 * 4 * 4 * rows * columns
        quantized += 2 * 4 * recipe.weights.num_bytes(rows, columns)
    assert without.size_bytes - with_experts.size_bytes == floats - quantized
    reasons = dict(without.skipped)
    assert reasons["model.layers.1.mlp.experts.down_proj"] == "kept by a rule of the recipe"


def test_rules_reach_single_experts(decoder: Callable[[str], Any]) -> None:
    """Catches a rule that changes all experts or none; and scopes that stop at the MLP."""
    rules = (
        LayerRule("layers.0.mlp.experts.1.*", None),
        LayerRule("layers.1.mlp.experts.down_proj", None),
    )
    scopes = {f"model.layers.{n}.mlp": f"layers.{n}.mlp" for n in range(2)}
    model, plain = decoder("mixtral"), decoder("mixtral")
    report = quantize_(model, Recipe(INT4.weights, layers=rules), scopes=scopes)
    same = [
        torch.equal(stack(model, "down_proj")[e], stack(plain, "down_proj")[e]) for e in range(4)
    ]
    assert same == [False, True, False, False]
    assert "layers.0.mlp.experts.0.down_proj" in report.converted
    kept = {name for name, reason in report.skipped if "rule" in reason}
    assert kept == {
        "layers.0.mlp.experts.1.gate_up_proj",
        "layers.0.mlp.experts.1.down_proj",
        "model.layers.1.mlp.experts.down_proj",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_those_of_each_experts_tokens(
    family: str, decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches tokens of other experts in a Hessian: a slow twin routes by hand."""
    model = decoder(family)
    block = model.model.layers[0].mlp
    fed: list[Tensor] = []
    hook = block.register_forward_pre_hook(lambda _, args: fed.append(args[0].flatten(0, 1)))
    forwards = [lambda ids=ids: model(ids, use_cache=False) for ids in calibration]
    whole = Layer(
        "model.layers.0.mlp.experts", "experts", block.experts, INT4.weights, "gate_up_proj"
    )
    layers = list(expert_layers(whole))
    stats = collect_expert_stats(model, layers, forwards)
    hook.remove()
    x = torch.cat(fed)
    chosen = block.gate(x)[2]
    for layer in layers:
        mine = x[(chosen == layer.expert).any(-1)].double()
        found = stats[layer.key]
        assert found.tokens == len(mine)
        torch.testing.assert_close(
            found.hessian, 2 * mine.T @ mine / max(len(mine), 1), rtol=1e-5, atol=1e-6
        )
    assert sum(found.tokens for found in stats.values()) == 2 * len(x)


def test_gptq_of_experts(decoder: Callable[[str], Any], calibration: list[Tensor]) -> None:
    """Catches experts that share a Hessian: the first layer's equal GPTQ on their own tokens."""
    model, plain = decoder("mixtral"), decoder("mixtral")
    only_experts = Recipe(
        GPTQ.weights, layers=tuple(LayerRule(f"*.self_attn.{n}_proj", None) for n in "qkvo")
    )
    quantize_(model, only_experts, calibration=calibration)
    experts = plain.model.layers[0].mlp.experts
    whole = Layer("model.layers.0.mlp.experts", "experts", experts, GPTQ.weights, "gate_up_proj")
    forwards = [lambda ids=ids: plain(ids, use_cache=False) for ids in calibration]
    layers = list(expert_layers(whole))
    stats = collect_expert_stats(plain, layers, forwards)
    for layer in layers:
        expected, _ = gptq(layer.weight, GPTQ.weights, stats[layer.key].hessian)
        found = stack(model, "gate_up_proj")[layer.expert or 0]
        assert (found - expected.values).abs().max() <= 1e-6 * expected.values.abs().max()


def test_an_expert_without_tokens_is_rounded(decoder: Callable[[str], Any]) -> None:
    """Catches garbage where no calibration token went (bug log 21, 22), and silence about it."""
    model, plain = decoder("mixtral"), decoder("mixtral")
    for each in (model, plain):
        with torch.no_grad():
            for layer in each.model.layers:
                layer.mlp.gate.weight.zero_()
            stack(each, "down_proj")[3].zero_()
    report = quantize_(model, GPTQ, calibration=[torch.arange(12)[None] + 5])
    notes = [name for name, note in report.notes if "no calibration token reached it" in note]
    unused = {name.split(".")[5] for name in notes}
    assert len(unused) == 2
    assert len(notes) == 2 * 2 * 2
    for expert in map(int, unused):
        expected = fake_quantize(
            stack(plain, "gate_up_proj")[expert].clone(), Recipe.named("uint3-g16").weights
        )
        assert torch.equal(stack(model, "gate_up_proj")[expert], expected)
    assert not stack(model, "down_proj")[3].any()


@pytest.mark.parametrize("execution", ["aten", "reference"])
def test_other_executions_say_that_experts_are_floats(
    execution: Any, decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches experts whose module is replaced by one packed matrix, and a silent fallback."""
    recipe = Recipe(INT4.weights, activations=ActivationSpec(INT_FORMATS["int8"]))
    model, plain = decoder("mixtral"), decoder("mixtral")
    report = quantize_(model, recipe, execution=execution)
    quantize_(plain, recipe)
    experts = [(name, why) for name, why in report.fallbacks if "experts" in name]
    assert len(experts) == 2 * 2 * 4
    assert {why for _, why in experts} == {"stacked experts are multiplied in floats"}
    assert torch.equal(stack(model, "down_proj"), stack(plain, "down_proj"))
    unrounded = [name for name, note in report.notes if "no modules of their own" in note]
    assert len(unrounded) == 2 * 2 * 4
    assert isinstance(model(calibration[0]).logits, Tensor)


def test_three_dimensions_that_are_no_experts() -> None:
    """Catches a convolution [out, in, width] that is quantized as if it were a stack."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3)
            self.proj = nn.Linear(8, 8)

    selection = select(
        Mixer(), Recipe.named("int8-channel"), {"": "", "conv": "conv", "proj": "proj"}
    )
    assert [layer.name for layer in selection.layers] == ["proj"]
    assert "aren't known to be experts" in dict(selection.skipped)["conv"]


def test_experts_that_are_not_multiplied_one_by_one(decoder: Callable[[str], Any]) -> None:
    """Catches a calibration that saw nothing and rounds every expert to nearest."""
    model = decoder("mixtral")
    experts = model.model.layers[0].mlp.experts
    whole = Layer(
        "model.layers.0.mlp.experts", "layers.0.experts", experts, INT4.weights, "down_proj"
    )
    with pytest.raises(
        ValueError, match=r"layers\.0\.experts\.0\.down_proj: no product with it was seen"
    ):
        collect_expert_stats(model, list(expert_layers(whole)), [lambda: None])
    assert model.config._experts_implementation != "eager"
