"""Every selection: deterministic, within the pool, and loud about what it can't do."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.calibration.selection import (
    SELECTIONS,
    SelectionName,
    choose,
    measure_pool,
    select_samples,
)

NAMES = get_args(SelectionName)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_distinct_and_harmless(
    decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName
) -> None:
    """Catches a selection that repeats a sample, draws unseeded, or leaves the model changed."""
    model = decoder("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain = model(pool[0], use_cache=False).logits
    state = torch.get_rng_state()
    first = select_samples(model, pool, 3, name, seed=5)
    assert first == select_samples(model, pool, 3, name, seed=5)
    assert len(set(first.indices)) == 3
    assert set(first.indices) <= set(range(8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(pool[0], use_cache=False).logits, plain)
    assert sorted(select_samples(model, pool, 8, name).indices) == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "hierarchical"])
def test_the_seed_draws(
    decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName
) -> None:
    """Catches a seed that is read nowhere."""
    measured = measure_pool(decoder("llama"), pool, name)
    assert len({choose(name, measured, 3, seed=seed).indices for seed in range(20)}) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_pool_needs_no_other_pass(
    decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName
) -> None:
    """Catches a measure that depends on the rest of the pool."""
    model, part = decoder("llama"), [1, 2, 5, 6, 7]
    measured = measure_pool(model, pool, name)[part]
    expected = select_samples(model, [pool[n] for n in part], 2, name, seed=1)
    assert choose(name, measured, 2, seed=1) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 9, -1])
def test_impossible_counts(
    decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName, count: int
) -> None:
    """Catches a pool that is used whole where more was asked for."""
    with pytest.raises(ValueError, match=rf"{count} calibration samples .* out of 8; .* 1 … 8"):
        select_samples(decoder("llama"), pool, count, name)


@pytest.mark.parametrize("name", NAMES)
def test_bad_pools(decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName) -> None:
    """An empty pool, a batch, ids beyond the vocabulary, floats, no token at all."""
    model = decoder("llama")
    for bad, why in [
        ([], "there is none"),
        ([torch.ones(2, 5, dtype=torch.long)], r"sample 0 .* one sequence \[1, T\]"),
        ([*pool, torch.tensor([[5, 80]])], "input 8 has token ids 5 … 80"),
        ([torch.ones(1, 4)], "float32"),
        ([torch.ones(1, 0, dtype=torch.long)], r"\[1, 0\]"),
    ]:
        with pytest.raises(ValueError, match=why):
            select_samples(model, bad, 1, name)
    with pytest.raises(ValueError, match="evaluation mode"):
        select_samples(model.train(), pool, 1, name)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_one_token(
    decoder: Callable[[str], Any], pool: list[Tensor], name: SelectionName
) -> None:
    """They calibrate, but have no attention to rate: an error there, not a score of 0."""
    short = [*pool, torch.tensor([[4]])]
    if name in ("entropy-attention", "hierarchical"):
        with pytest.raises(ValueError, match="sample 8 of the pool has 1 token"):
            select_samples(decoder("llama"), short, 9, name)
    else:
        assert 8 in select_samples(decoder("llama"), short, 9, name).indices


def test_unknown_name(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """The error lists what is allowed."""
    with pytest.raises(ValueError, match="unknown selection 'best'; allowed are random, "):
        select_samples(decoder("llama"), pool, 1, "best")  # type: ignore[arg-type]
    assert SELECTIONS == NAMES
