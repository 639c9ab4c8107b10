"""Routing of each family: against transformers' own modules, and against a twin by hand."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.serve.moe_families import family_rule, read_choice
from quantwatch_kernels.serve.moe_grouped import GroupedRouter
from quantwatch_kernels.serve.moe_router import AnyRouter, Router, choose_experts, route
from quantwatch_kernels.serve.moe_shared import add_shared, shared_gate
from quantwatch_kernels.testing import assert_close

E, K, H = 12, 4, 24
# Class → module of transformers, whether its configuration decides on renormalizing.
CLASSES = {
    "MixtralTopKRouter": ("mixtral", False),
    "MiniMaxTopKRouter": ("minimax", False),
    "Qwen3_5MoeTopKRouter": ("qwen3_5_moe", False),
    "Qwen3VLMoeTextTopKRouter": ("qwen3_vl_moe", False),
    "Qwen3OmniMoeTextTopKRouter": ("qwen3_omni_moe", False),
    "GptOssTopKRouter": ("gpt_oss", False),
    "GraniteMoeTopKRouter": ("granitemoe", False),
    "GraniteMoeHybridTopKRouter": ("granitemoehybrid", False),
    "GraniteMoeSharedTopKRouter": ("granitemoeshared", False),
    "Qwen2MoeTopKRouter": ("qwen2_moe", True),
    "Qwen3MoeTopKRouter": ("qwen3_moe", True),
    "Qwen3NextTopKRouter": ("qwen3_next", True),
    "OlmoeTopKRouter": ("olmoe", True),
    "FlexOlmoTopKRouter": ("flex_olmo", True),
    "MellumTopKRouter": ("mellum", True),
    "DeepseekV3TopkRouter": ("deepseek_v3", True),
    "DeepseekV32TopkRouter": ("deepseek_v32", True),
    "Dots1TopkRouter": ("dots1", True),
    "Glm4MoeTopkRouter": ("glm4_moe", True),
    "Glm4MoeLiteTopkRouter": ("glm4_moe_lite", True),
    "Glm4vMoeTextTopkRouter": ("glm4v_moe", True),
    "ExaoneMoeTopkRouter": ("exaone_moe", True),
    "MiMoV2FlashTopkRouter": ("mimo_v2_flash", True),
    "SolarOpenTopkRouter": ("solar_open", True),
}
EACH = [(k, n) for k, (_, both) in CLASSES.items() for n in ((True, False) if both else (True,))]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def own_module(kind: str, norm: bool = True, **changes: Any) -> Any:
    """A router of transformers with random values."""
    family = CLASSES[kind][0]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes: dict[str, Any] = {
        **{"num_experts_per_tok": K, "hidden_size": H, "norm_topk_prob": norm},
        **{"num_experts": E, "num_local_experts": E, "n_routed_experts": E},
        **{"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
    }
    module = getattr(modeling, kind)(SimpleNamespace(**{**sizes, **changes}))
    module.weight.data = drawn(E, H, seed=3) / 3
    if hasattr(module, "e_score_correction_bias"):
        module.e_score_correction_bias.copy_(drawn(E, seed=5) / 4)
    return module


def twin(logits: list[float], rule: AnyRouter) -> dict[int, float]:
    """Expert → weight of one token, in plain Python floats."""
    if isinstance(rule, Router):
        chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[: rule.top_k]
        odds = [math.exp((z - max(logits)) / rule.temperature) for z in logits]
        total = math.fsum(odds[e] for e in chosen) if rule.renormalize else math.fsum(odds)
        return {e: odds[e] / total for e in chosen}
    # torch's own sigmoid: where scores tie, its last bit decides whether they do.
    scores = torch.sigmoid(torch.tensor(logits, dtype=torch.float64)).tolist()
    choice = [s + b for s, b in zip(scores, rule.bias.tolist(), strict=True)]
    size = len(logits) // rule.groups
    value = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(rule.groups)]
    best = sorted(range(rule.groups), key=lambda g: (-value[g], g))[: rule.top_groups]
    inside = [e for e in range(len(logits)) if e // size in best]
    chosen = sorted(inside, key=lambda e: (-choice[e], e))[: rule.top_k]
    total = math.fsum(scores[e] for e in chosen) + 1e-20 if rule.renormalize else 1.0
    return {e: scores[e] / total * rule.scaling for e in chosen}


@pytest.mark.parametrize(("kind", "norm"), EACH, ids=str)
def test_a_rule_is_what_the_module_does(kind: str, norm: bool) -> None:
    """Catches a family under another rule: same experts, same weights, and those of the twin."""
    module = own_module(kind, norm)
    rule = family_rule(module)
    assert not isinstance(rule, str)
    x = drawn(64, H, seed=4)
    with torch.no_grad():
        found = read_choice(module(x[None] if CLASSES[kind][0] == "deepseek_v3" else x))
    assert found is not None
    logits, weights, ids = found
    own_ids, own_weights = route(x, module.weight.detach(), rule)
    assert torch.equal(own_ids, route(x, module.weight.detach(), rule, "reference")[0])
    theirs, ours = (
        torch.zeros(64, E).scatter_(1, i, w) for i, w in ((ids, weights), (own_ids, own_weights))
    )
    assert torch.equal(ids.sort(-1).values, own_ids.sort(-1).values)
    assert_close(ours, theirs.double(), rtol=2e-6, atol=1e-7)
    exact = x.double() @ module.weight.detach().double().T
    for row, z in zip(ours.tolist(), exact.tolist(), strict=True):
        wanted = twin(z, rule)
        assert {e for e, w in enumerate(row) if w} == set(wanted)
        assert all(row[e] == pytest.approx(w, rel=3e-6) for e, w in wanted.items())
    assert logits.shape == (64, E)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 4), (6, 3)]),
    st.booleans(),
    st.integers(1, 4),
)
def test_grouped_routing_by_hand(
    seed: int, groups: tuple[int, int], norm: bool, top_k: int
) -> None:
    """Ids exact in float64, values in eighths so that scores, groups and borders tie often."""
    k = min(top_k, groups[1] * E // groups[0])
    bias = (drawn(E, seed=seed + 1) * 2).round().double() / 8
    rule = GroupedRouter(k, bias, *groups, scaling=2.5, renormalize=norm)
    logits = (drawn(9, E, seed=seed) * 2).round().double() / 2
    ids, weights = choose_experts(logits, rule)
    for row, values, z in zip(ids.tolist(), weights.tolist(), logits.tolist(), strict=True):
        wanted = twin(z, rule)
        assert set(row) == set(wanted)
        assert dict(zip(row, values, strict=True)) == pytest.approx(wanted, rel=1e-14)


def test_ties_take_the_lowest_group_and_the_lowest_id() -> None:
    """Catches topk's order between equal groups, and within one."""
    rule = GroupedRouter(2, torch.zeros(8), groups=4, top_groups=1)
    ids, weights = choose_experts(torch.zeros(3, 8), rule)
    assert ids.tolist() == [[0, 1]] * 3
    assert torch.equal(weights, torch.full((3, 2), 0.5))
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    assert choose_experts(logits, rule)[0].tolist() == [[4, 5]]


def test_the_bias_chooses_and_never_weighs() -> None:
    """Catches weights of s + b: expert 3 is chosen by its bias and weighs what its score is."""
    rule = GroupedRouter(2, torch.tensor([0.0, 0.0, 0.0, 9.0]), scaling=3.0)
    ids, weights = choose_experts(torch.tensor([[2.0, 0.0, -1.0, -2.0]]), rule)
    assert ids.tolist() == [[3, 0]]
    s = [1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2))]
    assert weights[0].tolist() == pytest.approx([3 * v / sum(s) for v in s], rel=1e-6)


def test_a_group_is_worth_its_two_best() -> None:
    """Catches a maximum in place of the sum of two: group 0 has the best expert, 1 the best two."""
    rule = GroupedRouter(2, torch.tensor([3.0, 0.0, 2.0, 2.0]), groups=2, top_groups=1)
    assert choose_experts(torch.zeros(1, 4), rule)[0].tolist() == [[2, 3]]


def test_a_nan_stays_with_its_token() -> None:
    rule = GroupedRouter(2, torch.zeros(4), groups=2, top_groups=2)
    logits = drawn(3, 4)
    clean = choose_experts(logits, rule)
    logits[1, 2] = torch.nan
    ids, weights = choose_experts(logits, rule)
    assert weights[1].isnan().all()
    assert torch.equal(ids[[0, 2]], clean[0][[0, 2]])
    assert torch.equal(weights[[0, 2]], clean[1][[0, 2]])
    assert choose_experts(torch.empty(0, 4), rule)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (GroupedRouter(2, torch.zeros(7)), r"bias must be \[8\]; it is \[7\]"),
        (GroupedRouter(2, torch.zeros(8), groups=3), "don't fall into 3 groups"),
        (GroupedRouter(2, torch.zeros(8), groups=8), "don't fall into 8 groups"),
        (GroupedRouter(2, torch.zeros(8), groups=2, top_groups=3), "top_groups must be in 1 … 2"),
        (GroupedRouter(5, torch.zeros(8), groups=2), r"top_k must be in 1 … 4 experts of 1"),
        (GroupedRouter(2, torch.zeros(8), scaling=math.nan), "factor must be positive; it is nan"),
    ],
    ids=["bias", "groups", "lonely", "top-groups", "top-k", "factor"],
)
def test_what_can_not_be_routed(rule: GroupedRouter, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_experts(torch.zeros(1, 8), rule)


def test_what_is_not_known_says_so() -> None:
    """Catches a router that is guessed at, and one that only looks like the known one."""
    assert family_rule(nn.Linear(3, 2)) == "how Linear chooses experts is not known"
    module = own_module("MixtralTopKRouter")
    del module.top_k
    assert "this version of MixtralTopKRouter is another" in str(family_rule(module))
    pair = torch.zeros(2, 3)
    assert read_choice(pair) is None
    assert read_choice((pair, pair, pair)) is None  # ids are whole numbers
    assert read_choice((pair, pair, torch.zeros(3, 2).long())) is None


def test_the_gate_of_the_shared_expert() -> None:
    """As Qwen2-MoE's block has it; catches a softmax, and a gate per feature."""
    x, gate, routed, shared = drawn(5, H), drawn(1, H, seed=1), drawn(5, H, seed=2), drawn(5, H)
    weight = shared_gate(x, gate)
    wanted = routed.double() + torch.sigmoid(x.double() @ gate.double().T) * shared.double()
    assert weight.shape == (5, 1)
    assert_close(add_shared(routed, shared, weight), wanted, rtol=1e-5, atol=1e-6)
    half = add_shared(routed.bfloat16(), shared.bfloat16(), weight)
    assert half.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"the gate \[1, H\]"):
        shared_gate(x, gate.T)
    with pytest.raises(ValueError, match="don't fit"):
        add_shared(routed, shared, weight.T)
