"""Batches of equal work, and the rows that are measured in them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.capture.batches import Batch, plan_batches, regroup
from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import Prompt


def _prompts(lengths: list[int]) -> list[Prompt]:
    return [Prompt(n, "c", "s", tuple(range(3, 3 + k)), ()) for n, k in enumerate(lengths)]


LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 200), st.sets(st.integers(0, 29)))
def test_every_prompt_is_in_one_batch_within_the_budget(
    lengths: list[int], budget: int, isolated: set[int]
) -> None:
    """Would catch a prompt lost or measured twice, a budget exceeded, an isolated prompt padded."""
    batches = plan_batches(_prompts(lengths), frozenset(isolated), budget)
    assert sorted(p.index for b in batches for p in b.prompts) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.prompts) == 1 or batch.width * len(batch.prompts) <= budget
        assert batch.isolated == (batch.prompts[0].index in isolated)
        if batch.isolated:
            assert len(batch.prompts) == 1
            assert batch.num_padding == 0


@given(LENGTHS)
def test_selected_rows_are_the_prompts_tokens_in_order(lengths: list[int]) -> None:
    """Would catch padding rows in a statistic, or rows of one prompt counted for another."""
    batch = Batch(tuple(_prompts(lengths)), companions=((1, 2),))
    ids = batch.token_ids(torch.device("cpu"))
    mask = batch.mask(torch.device("cpu"))
    rows = batch.select(ids.unsqueeze(-1).double()).squeeze(-1)
    wanted = [token for prompt in batch.prompts for token in prompt.token_ids]
    assert rows.tolist() == wanted
    for prompt, where in zip(batch.prompts, batch.slices, strict=True):
        assert rows[where].tolist() == list(prompt.token_ids)
    assert batch.num_padding == ids.numel() - sum(lengths) - 2
    if mask is None:
        assert batch.num_padding == 0
    else:
        assert int(mask.sum()) == sum(lengths) + 2
        assert mask.shape == ids.shape


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((2, 5, 7), True),
        ((10, 7), True),
        ((2, 1, 5, 7), True),
        ((5, 2, 7), False),
        ((2, 5), False),
        ((2, 4, 5, 5), False),
        ((1, 5, 7), False),
    ],
)
def test_hidden_states_are_recognised_by_their_shape(shape: tuple[int, ...], fits: bool) -> None:
    """Would catch a mask or a rotary table taken for hidden states."""
    batch = Batch(tuple(_prompts([5, 3])))
    assert batch.fits(torch.zeros(shape)) == fits


def test_copy_never_shares_memory() -> None:
    """Would catch a kept row that changes with an in-place operation of the model."""
    for lengths in ([4, 4], [4, 2]):
        batch = Batch(tuple(_prompts(lengths)))
        hidden = torch.ones(2, 4, 3)
        kept, part = batch.copy(hidden), batch.copy(hidden, torch.tensor([0, 2]))
        hidden.zero_()
        assert kept.min() == 1
        assert part.shape == (2, 3)
        assert part.min() == 1


@pytest.mark.parametrize(
    ("length", "limit", "width", "companion"),
    [(20, None, 28, 28), (20, 64, 28, 28), (20, 20, 20, 12), (1, 1, 1, 1), (60, 64, 60, 52)],
)
def test_other_composition(length: int, limit: int | None, width: int, companion: int) -> None:
    """Would catch a noise floor without padding, or beyond the model's last position."""
    prompts = _prompts([length, 7])
    batch = regroup(prompts[0], prompts, limit)
    assert batch.width == width
    assert [len(ids) for ids in batch.companions] == [companion]
    assert batch.companions[0][:7] == prompts[1].token_ids[:companion]
    assert batch.num_tokens == length
    assert regroup(prompts[0], prompts[:1], limit).companions[0][0] == prompts[0].token_ids[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "opt", "own"])
def test_padding_changes_nothing_beyond_the_floor(kit: Any, family: str) -> None:
    """Would catch an attention to padding: the same prompts alone and together."""
    model = kit.build(family)
    candidate, suite = kit.perturb(model), kit.suite([5, 7, 9, 11, 13, 15, 17, 28])
    alone, together = (
        kit.capture(model, {"c": candidate}, suite, CapturePlan(batch_tokens=budget))
        for budget in (1, 10**6)
    )
    assert alone.report.num_padding_tokens == 0
    assert together.report.num_padding_tokens > 50
    for prompt in suite.prompts:
        for scope in ("embedding", "layers.1", "final_norm"):
            ours, theirs = (
                c.sink.row("c", prompt.index, "rel_error", scope)[0] for c in (alone, together)
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-3)
        ours, theirs = (
            c.sink.row("c", prompt.index, "logit_kl", "model")[0] for c in (alone, together)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-10)
