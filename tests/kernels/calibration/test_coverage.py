"""Greedy coverage: against the best set, under strata, and on features taken from a model."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.calibration.coverage import (
    absmax_features,
    cover,
    extreme_gains,
    facility_gains,
    length_labels,
    mean_features,
    quotas,
)


def covered(gains: Tensor, chosen: tuple[int, ...] | list[int]) -> float:
    """What a set reaches: the sum over columns of its best row."""
    return float(gains[list(chosen)].amax(0).sum())


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), total=st.integers(2, 8), columns=st.integers(1, 12))
def test_greedy_reaches_its_share_of_the_best_set(seed: int, total: int, columns: int) -> None:
    """Catches a choice by size instead of by what it adds; one sample is chosen exactly."""
    gains = torch.rand(total, columns, generator=torch.Generator().manual_seed(seed)).double()
    for count in range(1, total + 1):
        best = max(covered(gains, s) for s in itertools.combinations(range(total), count))
        found = cover(gains, count)
        assert len(set(found)) == count
        assert covered(gains, found) >= (1 - 1 / 2.718281828) * best - 1e-12
        if count == 1:
            assert covered(gains, found) == pytest.approx(best)


@given(labels=st.lists(st.sampled_from("abcd"), min_size=1, max_size=30), share=st.floats(0.01, 1))
def test_quotas(labels: list[str], share: float) -> None:
    """Sum to the count, never beyond what there is, within one of the exact share."""
    count = max(1, round(share * len(labels)))
    found = quotas(labels, count)
    assert sum(found.values()) == count
    for label, size in Counter(labels).items():
        assert found[label] <= size
        assert abs(found[label] - count * size / len(labels)) < 1


def test_strata_are_kept() -> None:
    """Catches a label whose good samples take the others' places."""
    gains = torch.rand(12, 5, generator=torch.Generator().manual_seed(0)).double()
    gains[:6] += 5
    labels = ["a"] * 6 + ["b"] * 6
    assert Counter(labels[n] for n in cover(gains, 6, labels)) == {"a": 3, "b": 3}
    assert cover(gains, 1)[0] < 6
    with pytest.raises(ValueError, match="2 labels for 12 samples"):
        cover(gains, 6, ["a", "b"])


def test_an_odd_sample() -> None:
    """Its size wins for extremes and counts nothing for coverage: what each is for."""
    torch.manual_seed(0)
    features = torch.randn(20, 30)
    features[13] *= 1e5  # beyond all others in every channel
    plain = facility_gains(features)
    features[13] *= 1e5
    huge = facility_gains(features)
    others = [n for n in range(20) if n != 13]
    torch.testing.assert_close(huge[others][:, others], plain[others][:, others])
    assert cover(extreme_gains(features.abs()), 1) == [13]


def test_alike_and_opposite() -> None:
    """The same is 1, the opposite 0, in float64 and for channels of any unit."""
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0], [2.0, 4.0], [-2.0, -4.0]])
    found = facility_gains(x * torch.tensor([1e-6, 1e6]))
    assert found[0].tolist() == pytest.approx([1, 0, 0.5, 1, 0], abs=1e-12)


def test_two_groups_are_both_covered() -> None:
    """Catches two samples of one kind where another kind has none."""
    torch.manual_seed(1)
    kinds = torch.randn(2, 40).repeat_interleave(6, 0)
    chosen = cover(facility_gains(kinds + 0.1 * torch.randn(12, 40)), 2)
    assert sorted(n // 6 for n in chosen) == [0, 1]


def test_channels_that_never_change_or_are_always_zero() -> None:
    """Catches 0 ÷ 0 in the features' units and in the shares of the maximum."""
    features = torch.rand(6, 4)
    features[:, 1] = 3
    features[:, 2] = 0
    assert torch.equal(facility_gains(features), facility_gains(features[:, [0, 3]]))
    assert (extreme_gains(features)[:, 2] == 0).all()
    assert cover(facility_gains(torch.ones(4, 3)), 2) == [0, 1]


def test_gains_that_are_not_finite() -> None:
    """Catches a NaN that argmax would call the largest."""
    with pytest.raises(ValueError, match="finite"):
        cover(torch.full((3, 2), torch.nan), 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_features_are_what_leaves_each_layer(
    decoder: Callable[[str], Any], pool: list[Tensor], family: str
) -> None:
    """Against the library's hidden states; the last of them is behind the final norm."""
    model = decoder(family)
    means, largest = mean_features(model, pool), absmax_features(model, pool)
    assert not any(module._forward_hooks for module in model.modules())
    for number, ids in enumerate(pool):
        hidden = model(ids, use_cache=False, output_hidden_states=True).hidden_states[1:]
        width = hidden[0].shape[-1]
        for layer, h in enumerate(hidden[:-1]):
            part = slice(layer * width, (layer + 1) * width)
            torch.testing.assert_close(means[number, part], h[0].mean(0))
            torch.testing.assert_close(largest[number, part], h[0].abs().amax(0))


def test_hidden_states_that_are_not_finite(
    decoder: Callable[[str], Any], pool: list[Tensor]
) -> None:
    """The error names the sample."""
    model = decoder("llama")
    model.get_input_embeddings().weight[int(pool[2][0, 0])] = torch.inf
    first = next(n for n, ids in enumerate(pool) if (ids == pool[2][0, 0]).any())
    with pytest.raises(ValueError, match=f"sample {first} of the pool: its hidden states"):
        mean_features(model, pool)


def test_length_labels() -> None:
    """Thirds by length, as large as can be, equal lengths in the order of the pool."""
    lengths = [5, 9, 1, 9, 3, 7, 2]
    found = length_labels([torch.zeros(1, n, dtype=torch.long) for n in lengths])
    assert found == [1, 2, 0, 2, 0, 1, 0]
    assert length_labels([torch.zeros(1, 4, dtype=torch.long)]) == [0]
