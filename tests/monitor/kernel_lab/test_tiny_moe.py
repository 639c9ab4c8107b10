"""The small mixture has learned something, and what its parts cost alone is what is claimed."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch.kernel_lab.tables.sensitivity import rank_correlation
from quantwatch.kernel_lab.tiny_moe import TinyMoE, train_tiny_moe
from quantwatch.prompts.shipped import shipped_suite
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.groups import find_groups
from quantwatch_kernels.quantize.recipe import LayerRule, Recipe
from quantwatch_kernels.quantize.sensitivity import Sensitivity, measure_sensitivity
from quantwatch_kernels.quantize.suffix import SuffixRun

pytestmark = pytest.mark.slow

INT4 = Recipe.named("int4-channel").weights
TEXTS = [prompt.text for prompt in shipped_suite("core-v1") if prompt.text]


@pytest.fixture(scope="module")
def moe() -> TinyMoE:
    return train_tiny_moe(TEXTS, steps=150)


@pytest.fixture(scope="module")
def rows(moe: TinyMoE) -> dict[tuple[str, int | None], list[Sensitivity]]:
    found: dict[tuple[str, int | None], list[Sensitivity]] = {}
    inputs = [torch.cat(moe.windows(16))]
    for row in measure_sensitivity(moe.model, inputs, find_groups(moe.model), {"int4": INT4}):
        found.setdefault((row.group.kind, row.group.layer), []).append(row)
    return found


def test_it_has_learned(moe: TinyMoE) -> None:
    """Catches a loss that doesn't move, on held-out text too: uniform bytes would be ln 256."""
    assert moe.last_loss < 0.6 * moe.first_loss
    with torch.no_grad():
        losses = [moe.model(ids, labels=ids).loss.item() for ids in moe.windows(8)]
    assert sum(losses) / len(losses) < 0.55 * math.log(256)
    assert not moe.model.training
    assert not any(parameter.requires_grad for parameter in moe.model.parameters())


def test_its_routers_choose(moe: TinyMoE) -> None:
    """Catches a router that sends everything to the same two of six experts."""
    counts = torch.zeros(2, 6)

    def counter(layer: int) -> Any:
        def count(_module: object, _inputs: object, output: tuple[Tensor, ...]) -> None:
            counts[layer] += torch.bincount(output[2].flatten(), minlength=6)

        return count

    hooks = [
        layer.mlp.gate.register_forward_hook(counter(number))
        for number, layer in enumerate(moe.model.model.layers)  # type: ignore[union-attr,arg-type]
    ]
    try:
        for ids in moe.windows(16):
            moe.model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    shares = counts / counts.sum(1, keepdim=True)
    assert (shares > 0.02).sum() >= 10
    assert shares.max() < 0.45


def test_the_same_seed_trains_the_same_model(moe: TinyMoE) -> None:
    """Catches an unseeded step, and a trainer that moves the caller's random numbers."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    short = [train_tiny_moe(TEXTS, steps=3, seed=s).model.state_dict() for s in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    same = [all(torch.equal(short[0][k], short[n][k]) for k in short[0]) for n in (1, 2)]
    assert same == [True, False]


def test_a_router_costs_more_per_byte_than_an_expert(
    rows: dict[tuple[str, int | None], list[Sensitivity]],
) -> None:
    """Catches routers among what is quantized by default."""

    def per_byte(row: Sensitivity) -> float:
        return row.difference.kl / row.num_bytes

    for layer in range(2):
        (router,) = rows["router", layer]
        experts = rows["expert", layer]
        assert len(experts) == 6
        assert per_byte(router) > 1.5 * max(map(per_byte, experts))


def test_all_experts_cost_about_what_each_costs(
    rows: dict[tuple[str, int | None], list[Sensitivity]],
) -> None:
    """Catches an expert counted twice or swapped for another: the sum within a factor of 2."""
    for layer in range(2):
        (together,) = rows["experts", layer]
        alone = sum(row.difference.kl for row in rows["expert", layer])
        assert 0.5 < together.difference.kl / alone < 2


def test_nothing_swapped_is_exactly_nothing(moe: TinyMoE) -> None:
    """Catches a control run through other kernels of the experts."""
    run = SuffixRun(moe.model, moe.windows(4))
    run.walk.run(0)
    assert run.difference() == (0.0, 0.0, 0.0)


def test_gptq_of_the_experts_helps(moe: TinyMoE) -> None:
    """Catches Hessians of other experts' tokens: on trained experts theirs must pay."""
    kls = {}
    for method in ("nearest", "gptq"):
        model = copy.deepcopy(moe.model)
        recipe = Recipe.named("uint3-g16").with_weights(method=method)
        rules = tuple(LayerRule(f"*.{part}.*", None) for part in ("self_attn", "shared_expert"))
        held = [torch.cat(moe.windows(48)[16:])]
        measured = SuffixRun(moe.model, moe.windows(16))
        quantize_(model, Recipe(recipe.weights, layers=rules), calibration=held)
        measured.model = model
        kls[method] = measured.difference(from_start=True).kl
    assert kls["gptq"] < 0.9 * kls["nearest"]


def test_bad_input() -> None:
    """Catches a model trained on nothing."""
    with pytest.raises(ValueError, match="too few to train on"):
        train_tiny_moe(["a", "bcd"])
    with pytest.raises(ValueError, match="0 steps are too few"):
        train_tiny_moe(TEXTS, steps=0)
    with pytest.raises(ValueError, match="are no 100000"):
        train_tiny_moe(TEXTS, steps=1).windows(100000)


def test_rank_correlation() -> None:
    """Catches Pearson in place of Spearman."""
    a = torch.arange(9.0).numpy()
    assert rank_correlation(a, a**5) == pytest.approx(1)
    assert rank_correlation(a, -(a**3)) == pytest.approx(-1)
    assert math.isnan(rank_correlation(a, 0 * a))
