"""Z-order: the curve by hand, attention that doesn't notice it, and what it does for locality."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.serve.key_order import (
    attention_by_position,
    morton,
    neighbour_distance,
    window_blocks,
    z_order,
)
from quantwatch_kernels.serve.paged_attention import AttentionRule

RULES = {
    "plain": AttentionRule(),
    "soft-cap": AttentionRule(softcap=0.8),
    "window of 5": AttentionRule(window=5),
    "window, soft-cap, scaled": AttentionRule(scaling=0.7, softcap=1.1, window=9),
}


def test_the_curve_by_hand() -> None:
    """Catches rows and columns that are swapped, and bits in another order."""
    assert z_order(4, 4).view(4, 4).tolist() == [
        [0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15],
    ]  # fmt: skip
    assert z_order(2, 3).tolist() == [0, 1, 3, 4, 2, 5]
    assert morton(torch.tensor([0, 1, 3, 2**31 - 1]), torch.tensor([5, 0, 3, 2**31 - 1])).tolist() == [
        17, 2, 15, 2**62 - 1,
    ]  # fmt: skip


@given(st.integers(1, 20), st.integers(1, 20))
def test_it_is_an_order(height: int, width: int) -> None:
    """Every key once, whatever the sizes."""
    assert z_order(height, width).sort().values.tolist() == list(range(height * width))


@given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3))
def test_blocks_are_squares(side: int, row: int, column: int) -> None:
    """A block of 4ᵏ keys of a 2ⁿ × 2ⁿ arrangement is a 2ᵏ × 2ᵏ square."""
    k, edge = min(side, 3), 2 ** min(side, 3)
    rows, columns = torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="ij")
    codes = morton(rows + row * edge, columns + column * edge).flatten().sort().values
    assert codes.tolist() == list(range(int(codes[0]), int(codes[0]) + 4**k))


def exact(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool) -> Tensor:
    """One query at a time, in order, in float64."""
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for t in range(q.shape[2]):
            at = t + k.shape[2] - q.shape[2]
            first = 0 if rule.window is None else max(0, at - rule.window + 1)
            last = at + 1 if causal else k.shape[2]
            keys, values = (x[:, head // 2, first:last] for x in (k, v))
            scores = (keys @ q[:, head, t, :, None])[..., 0] * (rule.scaling or 1 / math.sqrt(8))
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            out[:, head, t] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return out


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_does_not_notice(rule: AttentionRule, causal: bool) -> None:
    """Catches masks that go by the place in memory: a causal model would see its future."""
    if rule.window is not None and not causal:
        with pytest.raises(ValueError, match="it needs causal"):
            attention_by_position(*inputs(), rule, causal=False)
        return
    q, (k, v), (own, position) = inputs()
    wanted = exact(q, k, v, rule, causal)
    plain, lse = attention_by_position(q, (k, v), (own, position), rule, causal=causal)
    assert torch.allclose(plain, wanted, rtol=0, atol=1e-13)
    order = z_order(6, 5)
    moved = (k[:, :, order], v[:, :, order]), (own, position[order])
    found, again = attention_by_position(q, *moved, rule, causal=causal)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-13)
    assert torch.allclose(again, lse, rtol=0, atol=1e-13)
    if causal:  # and the mistake would have shown
        wrong, _ = attention_by_position(q, moved[0], (own, position), rule)
        assert not torch.allclose(wrong, wanted, atol=1e-2)


def inputs() -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, tokens, 8, generator=generator, dtype=torch.float64)
        for heads, tokens in ((4, 11), (2, 30), (2, 30))
    )
    return q, (k, v), (torch.arange(19, 30), torch.arange(30))


@given(st.integers(0, 999))
@settings(max_examples=20)
def test_any_permutation(seed: int) -> None:
    """The law behind it: keys, values and positions permuted alike change nothing."""
    q, (k, v), (own, position) = inputs()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    wanted, _ = attention_by_position(q, (k, v), (own, position), RULES["window of 5"])
    moved = (k[:, :, order], v[:, :, order]), (own, position[order])
    found, _ = attention_by_position(q, *moved, RULES["window of 5"])
    assert torch.allclose(found, wanted, rtol=0, atol=1e-13)


def test_a_query_that_sees_nothing() -> None:
    """Catches −∞ less −∞."""
    q, (k, v), (own, position) = inputs()
    found, lse = attention_by_position(q, (k, v), (own - 40, position))
    assert not found[:, :, 0].any()
    assert (lse[:, :, 0] == -torch.inf).all()


def test_distance_of_neighbours() -> None:
    """Row by row (1 + width) ÷ 2; in Z-order the same, for a square of a power of two."""
    for side in (2, 4, 16, 64):
        rows = neighbour_distance(torch.arange(side * side), side, side)
        assert rows == pytest.approx((1 + side) / 2)
        assert neighbour_distance(z_order(side, side), side, side) == pytest.approx(rows)
    assert neighbour_distance(torch.arange(6), 2, 3) == pytest.approx((4 * 1 + 3 * 3) / 7)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_blocks_that_a_window_touches(window: int) -> None:
    """Counted one window after another: 32 × 32 keys in blocks of 16, strips against squares."""
    rows, order = torch.arange(32 * 32), z_order(32, 32)
    strips, squares, windows = 0, 0, 0
    for top in range(33 - window):
        for left in range(33 - window):
            keys = [(top + i, left + j) for i in range(window) for j in range(window)]
            strips += len({(32 * r + c) // 16 for r, c in keys})
            squares += len({(r // 4, c // 4) for r, c in keys})
            windows += 1
    found = [window_blocks(each, 32, 32, window, 16) for each in (rows, order)]
    assert found == [pytest.approx(strips / windows), pytest.approx(squares / windows)]
    assert found[0] > found[1] or window == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: z_order(0, 3), "at least 1; they are 0 and 3"),
        (lambda: morton(torch.tensor([-1]), torch.tensor([0])), "rows lie in 0"),
        (lambda: morton(torch.tensor([0.5]), torch.tensor([0])), "must be integers"),
        (lambda: neighbour_distance(torch.zeros(6).long(), 2, 3), "names each once"),
        (lambda: neighbour_distance(torch.zeros(1).long(), 1, 1), "no neighbour"),
        (lambda: window_blocks(torch.arange(6), 2, 3, 3, 4), "a window of 3"),
        (
            lambda: attention_by_position(inputs()[0], inputs()[1], (torch.arange(3),) * 2),
            "don't fit",
        ),
    ],
    ids=["size", "negative", "floats", "not an order", "one key", "window", "positions"],
)
def test_refused(call: Callable[[], object], said: str) -> None:
    """Catches an answer to a question without one."""
    with pytest.raises(ValueError, match=said):
        call()
