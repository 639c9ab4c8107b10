"""The rescale that takes a model off its grid: the same function, other weights."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantwatch_kernels.compare.rows import kl_rows
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.off_grid import take_off_grid_
from quantwatch_kernels.quantize.recipe import Recipe

Decoder = Callable[[str], Any]
IDS = torch.arange(2, 42).view(2, 20)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS, use_cache=False).logits.flatten(0, 1)
        return found


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gemma"])
def test_the_function_stays_and_the_weights_move(decoder: Decoder, family: str) -> None:
    """Catches a scale that is not undone: value heads shared by query heads, biases, 1 + w gains."""
    model = decoder(family)
    before = copy.deepcopy(model)
    assert take_off_grid_(model, seed=3) == 2
    assert kl_rows("test", logits(before), logits(model)).max() < 1e-8
    for layer, old in zip(model.model.layers, before.model.layers, strict=True):
        for name in (
            "self_attn.q_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ):
            ratio = layer.get_submodule(name).weight / old.get_submodule(name).weight
            assert ratio.std() > 0.05, name
            assert 0.6 < ratio.min() <= ratio.max() < 1.7, name


def test_embedding_and_head_stay(decoder: Decoder) -> None:
    """Catches a tied embedding that is scaled with the last norm (T5: it is the head, too)."""
    model = decoder("llama-tied")
    before = model.lm_head.weight.clone()
    take_off_grid_(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, before)


def test_a_seed_is_a_model(decoder: Decoder) -> None:
    """Catches a rescale that depends on global random state: two nights must measure one model."""
    one, same, other = decoder("llama"), decoder("llama"), decoder("llama")
    take_off_grid_(one, 5)
    torch.rand(7)
    take_off_grid_(same, 5)
    take_off_grid_(other, 6)
    name = "model.layers.1.mlp.down_proj.weight"
    weights = [model.get_parameter(name) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_it_leaves_the_grid_it_was_on(decoder: Decoder) -> None:
    """Trap T1: re-quantizing dequantized Q4_1 to the same grid costs nothing and proves nothing."""
    spec = replace(Recipe.named("uint4-g16").weights, zero="float")
    model = decoder("llama")
    with torch.no_grad():
        for linear in (m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)):
            linear.weight.copy_(fake_quantize(linear.weight, spec))

    def cost() -> float:
        weight = model.model.layers[0].mlp.gate_proj.weight
        return float((fake_quantize(weight, spec) - weight).norm() / weight.norm())

    assert cost() < 1e-6
    take_off_grid_(model)
    assert cost() > 0.03


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral", "olmo2", "gemma2"])
def test_what_cannot_be_rescaled_is_refused_whole(decoder: Decoder, family: str) -> None:
    """Catches half a rescale, or a norm taken for another: Gemma 2's second norm is no MLP norm."""
    model = decoder(family)
    before = logits(model)
    with pytest.raises(ValueError, match=r"layers|no decoder layer"):
        take_off_grid_(model)
    assert torch.equal(logits(model), before)


def test_shared_weights_are_refused(decoder: Decoder) -> None:
    """Catches two layers that share a weight, which would be scaled twice."""
    model = decoder("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"layers\.0: the weight of up is shared"):
        take_off_grid_(model)
