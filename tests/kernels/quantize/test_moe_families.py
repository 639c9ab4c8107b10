"""Mixtures of experts, family by family: routers stay, each expert is a matrix, nothing is lost."""

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from tests.kernels.quantize.moe_families import FAMILIES, IDS, build, plain
from torch import Tensor, nn

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.api import QuantReport, quantize_
from quantwatch_kernels.quantize.recipe import ActivationSpec, Recipe
from quantwatch_kernels.quantize.routers import routing_paths, unrouted_experts

INT8, UINT4 = Recipe.named("int8-channel"), Recipe.named("uint4-g32")
RECIPES = {
    "int8": INT8,
    "uint4": UINT4,
    "gptq": UINT4.with_weights(method="gptq"),
    "w8a8": Recipe(INT8.weights, activations=ActivationSpec(INT_FORMATS["int8"])),
}
# Relative: int8 rows of 30 to 100 normal weights stay below 1 %, uint4 groups below 10 %; GPTQ
# gives up some of that for the output.
LARGEST = {"int8": 0.012, "w8a8": 0.012, "uint4": 0.12, "gptq": 0.4}
EACH = [pytest.param(n, marks=[pytest.mark.slow] if f.slow else []) for n, f in FAMILIES.items()]


@cache
def model(family: str) -> Any:
    return build(family)


def matrices(module: nn.Module, family: str) -> dict[str, Tensor]:
    """Return every matrix as [out, in], by the name that a report gives it."""
    flat = FAMILIES[family].in_out
    found = {}
    for path, value in module.named_parameters():
        name = path.removesuffix(".weight")
        experts = value.view(4, -1, 48) if "DbrxExpertGLU" in _kind(module, path) else value
        if re.search(r"experts|input_linear|output_linear", path) and experts.ndim == 3:
            for number, expert in enumerate(experts):
                at, _, parameter = path.rpartition(".")
                turned = expert.T if re.search(flat, path) else expert
                found[f"{at}.{number}.{parameter}"] = turned
        elif value.ndim > 1:
            found["head" if name == "lm_head" else name] = value
    return found


def _kind(module: nn.Module, path: str) -> str:
    return type(module.get_submodule(path.rpartition(".")[0])).__name__


def reported(report: QuantReport, names: list[str]) -> dict[str, str]:
    """Return what became of every matrix; a stack that stays is reported in one line."""
    said = dict.fromkeys(report.converted, "converted") | dict(report.skipped)
    stacks = {name: re.sub(r"\.\d+\.(\w+)$", r".\1", name) for name in names}
    return {name: said.get(name) or said.get(stacks[name]) or "" for name in names}


@pytest.mark.parametrize("family", EACH)
def test_routers_are_found_by_structure_and_name(family: str) -> None:
    """Catches a router of another family's name, and a gate of an MLP that is taken for one."""
    routing = routing_paths(model(family))
    assert {plain(p) for p in routing if p.rpartition(".")[0] not in routing} == set(
        FAMILIES[family].routers
    )
    for path, module in model(family).named_modules():
        if re.search(r"Router|TopKGating|MoEV1Gate", type(module).__name__):
            assert path in routing
        assert not (path in routing and re.search(r"experts\.\d|experts$", path))
    assert not unrouted_experts(model(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["int8", "w8a8"])
@pytest.mark.parametrize("family", EACH)
def test_eight_bits(family: str, name: str, dtype: torch.dtype) -> None:
    """Catches a router that is rounded, a matrix nobody speaks of, and the wrong axis."""
    check(family, name, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["uint4", "gptq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_bits(family: str, name: str, dtype: torch.dtype) -> None:
    """Catches experts that GPTQ can't see: those stored [in, out], in one batch, or flat."""
    check(family, name, dtype)


def check(family: str, name: str, dtype: torch.dtype) -> None:
    quantized = copy.deepcopy(model(family)).to(dtype)
    before = {k: v.clone() for k, v in matrices(quantized, family).items()}
    recipe = RECIPES[name]
    report = quantize_(quantized, recipe, calibration=[IDS] if recipe.calibrated else None)
    after = matrices(quantized, family)
    said = reported(report, list(after))
    assert not [matrix for matrix, what in said.items() if not what]
    for matrix, what in said.items():
        old, new = before[matrix].double(), after[matrix].double()
        if what != "converted":
            assert torch.equal(old, new), f"{matrix}: {what}"
        else:
            assert not torch.equal(old, new), matrix
            assert float((new - old).norm() / old.norm()) < LARGEST[name], matrix
            if name in ("int8", "w8a8"):  # half a step of each output's own scale, one rounding
                half = old.abs().amax(1) / 127 / 2 + old.abs().amax(1) * torch.finfo(dtype).eps
                assert bool(((new - old).abs().amax(1) <= 1.001 * half).all()), matrix
    with torch.no_grad():
        assert bool(torch.isfinite(quantized(IDS, use_cache=False).logits).all())
    routers = [path for path in after if re.search(ROUTERS, path)]
    assert not set(routers) & set(report.converted)


ROUTERS = r"\.(gate|router|router_gate|shared_expert_gate)(\.|$)"


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)


def test_the_gate_of_an_expert_or_a_plain_mlp_is_no_router() -> None:
    """Catches matrices that stay in full precision because they are called gate."""
    block = nn.ModuleDict({
        "mlp": Gated(),
        "moe": nn.ModuleDict({
            "gate": nn.Linear(8, 3), "experts": nn.ModuleList([Gated() for _ in range(3)]),
        }),
    })  # fmt: skip
    report = quantize_(block, INT8)
    assert "mlp.gate" in report.converted
    assert "moe.experts.1.gate" in report.converted
    assert dict(report.skipped) == {"moe.gate": "excluded by 'router'"}


@pytest.mark.parametrize("name", ["chooser", "wg", "gate_proj"])
def test_a_matrix_with_a_row_per_expert_routes_whatever_its_name(name: str) -> None:
    """Catches a router that is quantized because nobody knew its name."""
    experts = nn.ModuleList([Gated() for _ in range(3)])
    shared = nn.Linear(8, 8)
    block = nn.ModuleDict({name: nn.Linear(8, 3), "experts": experts, "mix": shared})
    report = quantize_(block, INT8)
    assert dict(report.skipped) == {name: "excluded by 'router'"}
    assert "mix" in report.converted
