"""Next-token entropy, ranks in the pool, and the score made of both."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.calibration.scores import (
    combined_score,
    highest,
    next_token_entropy,
    pool_ranks,
    sample_scores,
)

VALUES = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


def test_entropy_of_known_distributions() -> None:
    """Catches bits for nats, and 0 · ln 0 as NaN where a logit is −∞."""
    logits = torch.full((3, 64), float("-inf"))
    logits[0] = 2.5
    logits[1, 7] = -3
    logits[2, [1, 5]] = 100
    found = next_token_entropy(logits)
    assert found.tolist() == pytest.approx([math.log(64), 0, math.log(2)], abs=1e-12)
    logits[1, 0] = torch.nan
    assert next_token_entropy(logits).isnan().tolist() == [False, True, False]


def test_entropy_is_exact_and_independent_of_chunks() -> None:
    """Against −Σ p ln p written out, over more rows than a chunk has."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(150, 40)
    shares = logits.double().softmax(-1)
    expected = -(shares * shares.log()).sum(-1)
    assert torch.allclose(next_token_entropy(logits), expected, rtol=1e-12)


def test_scored_positions_are_those_with_a_next_token(
    decoder: Callable[[str], Any], pool: list[Tensor]
) -> None:
    """Catches the last position counted, and the variance's maximum taken over one layer."""
    model = decoder("llama")
    model.config._attn_implementation = "eager"
    found = sample_scores(model, pool)
    for ids, (entropy, variance) in zip(pool, found.tolist(), strict=True):
        output = model(ids, use_cache=False, output_attentions=True)
        assert entropy == pytest.approx(next_token_entropy(output.logits[0, :-1]).mean().item())
        heads = [head for layer in output.attentions for head in layer[0].double()]
        rows = [
            torch.stack([head[t, : t + 1].var(correction=0) for t in range(1, ids.shape[1])]).mean()
            for head in heads
        ]
        assert variance == pytest.approx(max(rows).item(), rel=1e-6)


def test_a_samples_score_is_its_own(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches padding: a score that depends on what else is in the pool (2.2 row 10)."""
    model = decoder("llama")
    together = sample_scores(model, pool)
    assert torch.equal(sample_scores(model, pool[::-1]), together.flip(0))
    assert torch.equal(sample_scores(model, pool[3:4]), together[3:4])


def test_too_short(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """One token has no next token and attends to itself alone."""
    with pytest.raises(ValueError, match=r"sample 8 of the pool has 1 token; .* at least 2"):
        sample_scores(decoder("llama"), [*pool, torch.tensor([[4]])])


def test_logits_that_are_not_finite(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches a NaN that sorts a sample to the top."""
    model = decoder("llama")
    model.lm_head.weight[5] = torch.nan
    with pytest.raises(ValueError, match="sample 0 of the pool: its logits are not finite"):
        sample_scores(model, pool)


@given(values=VALUES)
def test_ranks(values: list[int]) -> None:
    """Between 0 and 1, mean ½, in order, equal for equals, unmoved by any increasing map."""
    ranks = pool_ranks(torch.tensor(values, dtype=torch.float64))
    assert ranks.min() >= 0
    assert ranks.max() <= 1
    assert ranks.mean().item() == pytest.approx(0.5)
    stretched = pool_ranks(torch.tensor(values, dtype=torch.float64).exp() * 1e3 - 7)
    assert torch.equal(ranks, stretched)
    for a, x in zip(values, ranks.tolist(), strict=True):
        for b, y in zip(values, ranks.tolist(), strict=True):
            assert (a < b) == (x < y)


def test_score_by_hand() -> None:
    """Catches the two parts swapped, and one drowned by the other's unit."""
    measured = torch.tensor([[1.0, 0.03], [3.0, 0.01], [2.0, 0.02]], dtype=torch.float64)
    assert combined_score(measured).tolist() == pytest.approx([0.4, 0.6, 0.5])
    assert highest(combined_score(measured), 2) == [1, 2]
    assert torch.equal(
        combined_score(measured * torch.tensor([1e6, 1e-6])), combined_score(measured)
    )


def test_equal_scores_take_the_first() -> None:
    """Catches an order that depends on the sort."""
    assert highest(torch.tensor([0.5] * 40 + [0.7]), 4) == [40, 0, 1, 2]
