"""Agreement of two routers against loops in Python, and which choices rounding could turn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.compare.routing import Routing, expert_loads, routing_agreement
from quantwatch_kernels.serve.moe_grouped import GroupedRouter
from quantwatch_kernels.serve.moe_margin import Routed, decided_choices, logit_rounding
from quantwatch_kernels.serve.moe_router import AnyRouter, Router, choose_experts

RULES: dict[str, AnyRouter] = {
    "softmax": Router(2),
    "share of all": Router(3, renormalize=False),
    "all": Router(8),
    "grouped": GroupedRouter(3, torch.linspace(-0.1, 0.1, 8), 4, 2, 2.5),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing(logits: Tensor, rule: AnyRouter, decided: bool = True) -> Routing:
    ids, weights = choose_experts(logits, rule)
    return Routing(ids, weights, logits.shape[1], torch.full((len(ids),), decided))


def by_hand(one: Routing, other: Routing) -> list[tuple[float, float, float]]:
    rows = []
    for t in range(len(one.ids)):
        w = dict(zip(one.ids[t].tolist(), one.weights[t].tolist(), strict=True))
        v = dict(zip(other.ids[t].tolist(), other.weights[t].tolist(), strict=True))
        l1 = sum(abs(w.get(e, 0.0) - v.get(e, 0.0)) for e in range(one.experts))
        flip = float(set(w) != set(v) and bool(one.decided[t]))
        rows.append((len(set(w) & set(v)) / len(w), l1, flip))
    return rows


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decided", [True, False], ids=["decided", "ties"])
def test_agreement_by_hand(name: str, decided: bool) -> None:
    """Catches an overlap over the union, an L1 over the chosen only, and flips among ties."""
    z = drawn(40, 8)
    one, other = routing(z, RULES[name], decided), routing(z + drawn(40, 8, seed=1), RULES[name])
    found = routing_agreement(one, other)
    columns = zip(*(column.tolist() for column in found), strict=True)
    for row, wanted in zip(columns, by_hand(one, other), strict=True):
        assert row == pytest.approx(wanted, abs=1e-12)
    assert found.overlap.dtype == torch.float64


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(RULES)))
def test_laws(seed: int, name: str) -> None:
    """Equal choices are exactly 1, 0, 0, in any order of the slots; L1 is symmetric and bounded."""
    one = routing(drawn(9, 8, seed=seed), RULES[name])
    turned = Routing(one.ids.flip(1), one.weights.flip(1), 8, one.decided)
    same = routing_agreement(one, turned)
    assert torch.equal(same.overlap, torch.ones(9).double())
    assert not same.weight_l1.any()
    assert not same.flips.any()
    other = routing(drawn(9, 8, seed=seed + 1), RULES[name])
    there, back = routing_agreement(one, other), routing_agreement(other, one)
    assert torch.equal(there.weight_l1, back.weight_l1)
    total = one.weights.double().sum(-1) + other.weights.double().sum(-1)
    assert bool((there.weight_l1 <= total + 1e-12).all())
    assert torch.equal(there.flips > 0, there.overlap < 1)


def test_a_token_that_is_not_finite_is_none_of_the_others_business() -> None:
    z = drawn(5, 8)
    one, other = (
        routing(z, Router(2)),
        routing(z.clone().index_fill_(0, torch.tensor([3]), torch.nan), Router(2)),
    )
    for pair in ((one, other), (other, one)):
        found = routing_agreement(*pair)
        for column in found:
            assert column.isnan().tolist() == [False, False, False, True, False]
    assert not other.finite[3]


def test_loads() -> None:
    """Catches weights in place of slots, and tokens that aren't counted."""
    ids = torch.tensor([[0, 2], [2, 1], [2, 3]])
    found = Routing(ids, torch.ones(3, 2), 5, torch.ones(3).bool())
    assert expert_loads(found, torch.tensor([True, True, False])).tolist() == [1, 1, 2, 0, 0]
    assert expert_loads(found, torch.zeros(3).bool()).tolist() == [0] * 5
    assert found.first(1).ids.tolist() == [[0, 2]]


def test_what_can_not_be_compared() -> None:
    one = routing(drawn(4, 8), Router(2))
    with pytest.raises(ValueError, match="4 tokens and 8 experts can't be compared with 3 and 8"):
        routing_agreement(one, one.first(3))
    with pytest.raises(ValueError, match="these span 0 … 9"):
        routing_agreement(one._replace(ids=torch.tensor([[0, 9]] * 4)), one)
    with pytest.raises(ValueError, match="differ"):
        routing_agreement(one._replace(weights=torch.ones(4, 3)), one)


# Which choices are decided


def routed(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Routed:
    return Routed(x, weight, (x.to(dtype) @ weight.to(dtype).T))


@pytest.mark.parametrize(("width", "most"), [(16, 40), (512, 250), (4096, 750)])
def test_rounding_of_logits_is_covered_and_not_by_much(width: int, most: int) -> None:
    """Catches a bound that other orders of summation break, and one that hides everything.

    `most` is twice what the margin is of the mean error of a blocked sum, 20, 119 and 366 times; of
    the worst order's largest error it is 2.5, 12 and 21 times. With H for √H it would be √H more.
    """
    x, weight = drawn(64, width), drawn(8, width, seed=1) / width**0.5
    exact = x.double() @ weight.double().T
    error = logit_rounding(routed(x, weight))
    shuffled = torch.randperm(width, generator=torch.Generator().manual_seed(2))
    sums = [x @ weight.T, x[:, shuffled] @ weight[:, shuffled].T]
    steps = torch.zeros(64, 8)
    for column in range(width):  # one after another, the worst order there is
        steps += x[:, column, None] * weight[:, column]
    for found in (*sums, steps):
        assert bool(((found.double() - exact).abs() <= error).all())
    assert float(error.median()) < most * float((sums[0].double() - exact).abs().mean())
    assert float(error.max()) < 2e-4


@pytest.mark.parametrize("name", ["softmax", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_decided_survives_rounding(name: str, dtype: torch.dtype) -> None:
    """Catches a border of the wrong two experts: no decided choice turns in float64, most are."""
    rule = RULES[name]
    x, weight = drawn(4000, 32).to(dtype), drawn(8, 32, seed=1).to(dtype) / 8
    seen = Routed(x, weight, x @ weight.T)
    ids, _ = choose_experts(seen.logits.float(), rule)
    decided = decided_choices(seen, ids, rule)
    exact, _ = choose_experts(x.double() @ weight.double().T, rule)
    same = (ids.sort(-1).values == exact.sort(-1).values).all(-1)
    assert bool(same[decided].all())
    share = float(decided.double().mean())
    assert share > (0.99 if dtype == torch.float32 else 0.8)
    if dtype == torch.bfloat16:  # logits in bfloat16 tie: there are flips, and none is decided
        assert not bool(same.all())


def test_a_tie_is_not_decided() -> None:
    """Two equal rows of the weight: the border runs between equal logits, or clear of them."""
    weight = torch.eye(4, 8)
    weight[2] = weight[1]
    x = torch.tensor([[0.0, 3.0, 3.0, 1, 0, 0, 0, 0], [0.0, 1.0, 0.0, 2.0, 0, 0, 0, 0]])
    seen = routed(x, weight)
    ids, _ = choose_experts(seen.logits, Router(1))
    assert decided_choices(seen, ids, Router(1)).tolist() == [False, True]
    ids, _ = choose_experts(seen.logits, Router(2))
    assert decided_choices(seen, ids, Router(2)).tolist() == [True, False]
    step = torch.tensor([[3.0 + 2**-21, 3.0, 0.0, 0.0]])  # two spacings apart
    near = Routed(torch.ones(1, 1), torch.full((4, 1), 3.0), step)
    assert decided_choices(near, torch.tensor([[0]]), Router(1)).tolist() == [False]


def test_a_tie_of_groups_is_not_decided() -> None:
    """Catches groups that are taken for granted: the experts inside are far apart."""
    rule = GroupedRouter(1, torch.zeros(4), groups=2, top_groups=1)
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0], [3.0, -3.0, -1.0, -2.0]])
    seen = Routed(torch.zeros(2, 3), torch.zeros(4, 3), logits)
    ids, _ = choose_experts(logits, rule)
    assert ids.tolist() == [[0], [0]]
    assert decided_choices(seen, ids, rule).tolist() == [False, True]


def test_a_module_with_another_rule_is_found_out() -> None:
    """Catches margins taken from a rule that the module doesn't follow."""
    seen = routed(drawn(6, 5), drawn(4, 5, seed=1))
    wrong = seen.logits.argmin(-1, keepdim=True)
    with pytest.raises(ValueError, match="6 of 6 tokens went to other experts than Router chooses"):
        decided_choices(seen, wrong, Router(1))
    broken = seen.logits.clone()
    broken[2] = torch.nan
    ids, _ = choose_experts(broken, Router(1))
    assert not decided_choices(seen._replace(logits=broken), ids, Router(1))[2]
    with pytest.raises(ValueError, match="don't fit"):
        logit_rounding(seen._replace(weight=drawn(4, 6)))


def test_everything_is_chosen() -> None:
    """With as many experts as slots nothing can turn, whatever ties."""
    seen = routed(torch.zeros(2, 3), torch.zeros(4, 3))
    ids, _ = choose_experts(seen.logits, Router(4))
    assert decided_choices(seen, ids, Router(4)).tolist() == [True, True]
    assert decided_choices(
        routed(torch.zeros(0, 3), torch.zeros(4, 3)), ids[:0], Router(4)
    ).shape == (0,)
