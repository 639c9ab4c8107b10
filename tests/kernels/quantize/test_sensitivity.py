"""Sensitivity by re-running the suffix: nothing swapped is exactly nothing, and the rest is right."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.quantize.activation_entropy import entropy
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.groups import Group, find_groups
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.sensitivity import Sensitivity, measure_sensitivity
from quantwatch_kernels.quantize.suffix import SuffixRun, swapped

FAMILIES = ["llama", "llama-tied", "gpt2", "qwen2", "gemma", "mixtral", "qwen2-moe"]
INT4 = {"int4-g16": Recipe.named("int4-g16").weights}
BITS = {f"uint{b}-g16": Recipe.named(f"uint{b}-g16").weights for b in (3, 4, 5, 8)}


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: Any, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def of_kind(groups: list[Group], *kinds: str) -> list[Group]:
    return [group for group in groups if group.kind in kinds]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_swapped_costs_exactly_nothing(
    family: str, decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches a suffix that is another computation than the reference: control run."""
    model = decoder(family)
    run = SuffixRun(model, calibration)
    assert run.difference(from_start=True) == (0.0, 0.0, 0.0)
    for index in range(len(run.walk.layers)):
        assert run.difference() == (0.0, 0.0, 0.0)
        run.walk.run(index)
    assert run.difference() == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "qwen2-moe"])
def test_against_the_whole_model(
    family: str, decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches a wrong layer, position or weight: quantize the group, run everything, compare."""
    model = decoder(family)
    groups = find_groups(model)
    before = state(model)
    rows = list(measure_sensitivity(model, calibration, groups, INT4))
    assert unchanged(model, before)
    assert [row.group for row in rows] == sorted(groups, key=groups.index)
    references = [model(ids).logits for ids in calibration]
    for row in rows:
        values = [fake_quantize(part.weight, INT4["int4-g16"]) for part in row.group.parts]
        with swapped(row.group.parts, values), torch.no_grad():
            found = [model(ids).logits for ids in calibration]
        kl = torch.cat([twin(a, b) for a, b in zip(references, found, strict=True)]).mean().item()
        assert kl > 0, row.group.name
        # Attention of fewer positions is the same; only the order of float32 sums may differ.
        assert row.difference.kl == pytest.approx(kl, rel=1e-3, abs=1e-10), row.group.name
    assert unchanged(model, before)


def twin(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL of the scored positions by its definition, float64."""
    scored = slice(reference.shape[1] // 2, reference.shape[1] - 1)
    log_p, log_q = (z[:, scored].double().log_softmax(-1) for z in (reference, candidate))
    return (log_p.exp() * (log_p - log_q)).sum(-1).flatten()


def test_accuracy_and_agreement(decoder: Callable[[str], Any], calibration: list[Tensor]) -> None:
    """Catches targets shifted by one, and a gain that is counted as a loss."""
    model = decoder("llama")
    (group,) = of_kind(find_groups(model), "head")
    run = SuffixRun(model, calibration)
    scrambled = group.parts[0].weight.roll(1, 0)  # every likeliest token becomes the one after it
    with swapped(group.parts, [scrambled]):
        found = run.difference(from_start=True)
    logits = [model(ids).logits[:, 10:19].argmax(-1) for ids in calibration]
    targets = torch.cat([ids[:, 11:20].flatten() for ids in calibration])
    best = torch.cat([ids.flatten() for ids in logits])
    right = [(guess == targets).double().mean().item() for guess in (best, (best + 1) % 96)]
    assert found.agreement_lost == 1
    assert found.accuracy_lost == pytest.approx(right[0] - right[1])


def test_the_groups_of_a_mixture(decoder: Callable[[str], Any]) -> None:
    """Catches routers among what is quantized, and experts that aren't told apart."""
    model = decoder("qwen2-moe")
    groups = find_groups(model)
    inside = {kind: of_kind([g for g in groups if g.layer == 0], kind) for kind in
              ("layer", "attention", "mlp", "experts", "expert", "shared expert", "router",
               "shared gate", "linear")}  # fmt: skip
    assert {kind: len(found) for kind, found in inside.items()} == {
        "layer": 1, "attention": 1, "mlp": 1, "experts": 1, "expert": 4, "shared expert": 1,
        "router": 1, "shared gate": 1, "linear": 7,
    }  # fmt: skip
    path = "model.layers.0.mlp"
    assert [g.name for g in inside["expert"]] == [f"{path}.experts.{e}" for e in range(4)]
    assert inside["router"][0].name == f"{path}.gate"
    weights = {kind: sum(g.num_weights for g in found) for kind, found in inside.items()}
    assert weights["expert"] == weights["experts"] == 4 * 3 * 32 * 48
    assert weights["layer"] == weights["attention"] + weights["mlp"]
    assert weights["mlp"] == weights["experts"] + weights["shared expert"]
    assert weights["router"] == 4 * 48
    assert weights["shared gate"] == 48
    assert len({g.name for g in groups}) == len(groups)
    assert [g.kind for g in groups if g.layer is None] == ["embedding", "head"]


def test_a_tied_head_is_the_embedding(decoder: Callable[[str], Any]) -> None:
    """Catches one matrix that is counted and swapped twice (bug log 19)."""
    groups = find_groups(decoder("llama-tied"), {"model.embed_tokens": "embedding"})
    assert [g.name for g in groups if g.layer is None] == ["embedding"]


def test_probes_and_what_is_scaled(
    decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches a scale taken from the wrong format: KL goes by 4 a bit, so that would be a factor.

    In a mixture it isn't as smooth: a format that flips an expert's choice costs a jump.
    """
    model = decoder("llama")
    groups = of_kind(find_groups(model), "embedding", "linear", "head")
    measured = {
        (r.group.name, r.format): r for r in measure_sensitivity(model, calibration, groups, BITS)
    }
    scaled = list(measure_sensitivity(model, calibration, groups, BITS, probes=["uint5-g16"]))
    assert len(scaled) == len(measured)
    ratios = []
    for row in scaled:
        true = measured[row.group.name, row.format]
        assert row.measured == (row.format == "uint5-g16")
        assert row.num_bytes == true.num_bytes
        assert math.isnan(row.difference.accuracy_lost) != row.measured
        ratios.append(math.log(row.difference.kl / true.difference.kl))
        if row.measured:
            assert row.difference == true.difference
    assert abs(sum(ratios) / len(ratios)) < math.log(1.25)
    assert max(map(abs, ratios)) < math.log(3)


def test_more_bits_cost_less(decoder: Callable[[str], Any], calibration: list[Tensor]) -> None:
    """Catches formats mixed up: KL falls by about 4 per bit; bytes rise."""
    model = decoder("llama")
    for group in of_kind(find_groups(model), "layer", "embedding"):
        rows = list(measure_sensitivity(model, calibration, [group], BITS))
        kls = [row.difference.kl for row in rows]
        assert kls == sorted(kls, reverse=True)
        assert kls[0] / kls[-1] > 4**3
        assert [row.num_bytes for row in rows] == sorted(row.num_bytes for row in rows)
        fewest = sum(BITS["uint3-g16"].num_bytes(*part.weight.shape) for part in group.parts)
        assert rows[0].num_bytes == fewest


def test_gptq_costs_less_than_nearest(
    decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches a calibrated spec that is rounded to nearest after all, experts included."""
    model = decoder("qwen2-moe")
    groups = of_kind(find_groups(model), "layer", "experts")
    nearest = Recipe.named("uint3-g16").weights
    gptq = Recipe.named("uint3-g16").with_weights(method="gptq").weights
    both = {"nearest": nearest, "gptq": gptq}
    generator = torch.Generator().manual_seed(5)
    more = [torch.randint(0, 96, (8, 40), generator=generator)]
    rows = list(measure_sensitivity(model, calibration, groups, both, calibration=more))
    sums = {name: sum(r.difference.kl for r in rows if r.format == name) for name in both}
    assert sums["gptq"] < 0.8 * sums["nearest"]


def test_entropy() -> None:
    """Catches another base, empty bins that count, and outliers that don't lower it."""
    assert entropy(torch.arange(256.0)) == pytest.approx(math.log(256))
    assert entropy(torch.tensor([0.0, 1.0, 1.0, 0.0])) == pytest.approx(math.log(2))
    assert entropy(torch.full((3, 4), 7.0)) == 0
    normal = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert entropy(torch.cat([normal, torch.tensor([1e3])])) < 0.3 * entropy(normal)
    for bad in (torch.empty(0), torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match="finite"):
            entropy(bad)


def test_entropies_are_those_of_the_outputs(
    decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches a module's input taken for its output, and experts that share one."""
    model = decoder("qwen2-moe")
    rows = {
        r.group.name: r for r in measure_sensitivity(model, calibration, find_groups(model), INT4)
    }
    kept: list[Tensor] = []
    path = "model.layers.1.self_attn.v_proj"
    hook = model.get_submodule(path).register_forward_hook(lambda _, __, y: kept.append(y))
    for ids in calibration:
        model(ids)
    hook.remove()
    assert rows[path].entropy == entropy(torch.cat([y.flatten() for y in kept]))
    experts = [rows[f"model.layers.1.mlp.experts.{e}"].entropy for e in range(4)]
    assert len({e for e in experts if e is not None}) > 1


def test_an_expert_that_no_token_reaches(decoder: Callable[[str], Any]) -> None:
    """Catches NaN for an unused expert (bug log 21): it costs nothing and has no entropy."""
    model = decoder("mixtral")
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad():
        gate.weight.zero_()
        # Logits are all equal then: top-k takes the first two experts.
    ids = [torch.arange(12)[None] + 5]
    groups = of_kind([g for g in find_groups(model) if g.layer == 0], "expert")
    specs = {"uint4-g16": Recipe.named("uint4-g16").with_weights(method="gptq").weights}
    rows = list(measure_sensitivity(model, ids, groups, specs))
    unused = [row for row in rows if row.entropy is None]
    assert len(unused) == 2
    assert all(row.difference == (0.0, 0.0, 0.0) for row in unused)
    assert all(row.difference.kl > 0 for row in rows if row.entropy is not None)


def test_bad_input(decoder: Callable[[str], Any], calibration: list[Tensor]) -> None:
    """Catches a probe that isn't measured, texts with nothing to score, and a broken reference."""
    model = decoder("llama")
    groups = find_groups(model)

    def run(**changes: Any) -> Iterator[Sensitivity]:
        arguments: dict[str, Any] = {
            "inputs": calibration,
            "groups": groups,
            "specs": INT4,
            **changes,
        }
        return measure_sensitivity(model, **arguments)

    with pytest.raises(ValueError, match=r"probes must be some of int4-g16; they are \['x'\]"):
        list(run(probes=["x"]))
    with pytest.raises(ValueError, match="at least 4 tokens; one has 3"):
        list(run(inputs=[torch.tensor([[1, 2, 3]])]))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="reference's logits of input 0 aren't finite"):
        list(run())


def test_a_kl_that_is_not_finite_is_an_error(
    decoder: Callable[[str], Any], calibration: list[Tensor]
) -> None:
    """Catches an infinite cost that an allocation would silently avoid or take."""
    model = decoder("llama")
    (group,) = of_kind([g for g in find_groups(model) if g.layer == 1], "layer")
    part = group.parts[0]
    with torch.no_grad():
        part.weight[0, 0] = torch.inf
    spec = {"int8-channel": Recipe.named("int8-channel").weights}
    with pytest.raises(ValueError, match="finite"):
        list(measure_sensitivity(model, calibration, [group], spec))
