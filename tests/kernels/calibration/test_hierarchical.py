"""Continuations, the activity of heads in their early steps, and who is kept."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.generation import continue_sample
from quantwatch_kernels.calibration.hierarchical import draw_kept, head_activity, kept_samples


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mamba"])
def test_greedy_continuation_is_the_librarys(
    decoder: Callable[[str], Any], pool: list[Tensor], family: str
) -> None:
    """Catches a cache that is given the wrong positions."""
    model = decoder(family)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    expected = model.generate(
        pool[1], attention_mask=torch.ones_like(pool[1]), max_new_tokens=12, do_sample=False
    )
    assert torch.equal(continue_sample(model, pool[1], 12), expected[0, 14:])


def test_a_model_without_a_cache(pool: list[Tensor]) -> None:
    """Catches a continuation that sees only its last token."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, ids: Tensor, **_: object) -> SimpleNamespace:
            logits = nn.functional.one_hot(ids.cumsum(1) % 80, 80).float()
            return SimpleNamespace(logits=logits)

    total = int(pool[0].sum())
    found = continue_sample(Counting(), pool[0], 4).tolist()
    expected = []
    for _ in range(4):
        expected.append(total % 80)
        total += expected[-1]
    assert found == expected


def test_a_continuation_ends_where_the_text_does(
    decoder: Callable[[str], Any], pool: list[Tensor]
) -> None:
    """The end-of-sequence token is the last; of several any ends it."""
    model = decoder("llama")
    whole = continue_sample(model, pool[0], 10).tolist()
    model.generation_config.eos_token_id = [79, whole[3]]
    assert continue_sample(model, pool[0], 10).tolist() == whole[: whole.index(whole[3]) + 1]


def test_sampling_is_seeded_and_leaves_the_global_state(
    decoder: Callable[[str], Any], pool: list[Tensor]
) -> None:
    """Catches draws from the global generator."""
    model = decoder("llama")
    state = torch.get_rng_state()
    drawn = [continue_sample(model, pool[0], 8, 1.5, seed).tolist() for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_context_is_not_exceeded(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """The error names the sample, its tokens and the limit."""
    with pytest.raises(ValueError, match=r"sample 5 of .* 20 tokens and 29 .* context of 48"):
        head_activity(decoder("llama"), pool, steps=29)


@pytest.mark.parametrize(("steps", "kept"), [(20, 4), (15, 3), (3, 1), (11, 3)])
def test_activity_is_that_of_the_first_fifth(
    decoder: Callable[[str], Any], pool: list[Tensor], steps: int, kept: int
) -> None:
    """Catches queries off by one, rounding 0.2 · 15 up to 4, and a prompt's queries counted."""
    model = decoder("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    found = head_activity(model, pool[:2], steps=steps)
    model.config._attn_implementation = "eager"
    for ids, ours in zip(pool[:2], found, strict=True):
        tokens = continue_sample(model, ids, steps)
        attentions = model(
            torch.cat([ids, tokens[None]], 1), use_cache=False, output_attentions=True
        ).attentions
        queries = range(ids.shape[1] - 1, ids.shape[1] - 1 + kept)
        expected = [
            sum(float(head[q, : q + 1].var(correction=0)) for q in queries) / kept
            for layer in attentions
            for head in layer[0].double()
        ]
        assert ours.tolist() == pytest.approx(expected, rel=1e-5)


def activity(*rows: tuple[int, ...], heads: int = 20) -> Tensor:
    """One row per sample: its most active heads, best first, above a floor that falls."""
    floor = torch.linspace(0.02, 0.01, heads, dtype=torch.float64)
    found = floor.repeat(len(rows), 1)
    for row, tops in zip(found, rows, strict=True):
        for place, head in enumerate(tops):
            row[head] = 1 - 0.1 * place
    return found


def test_who_is_kept() -> None:
    """15 % of 20 heads are 3: those that are most active over the pool."""
    measured = activity((4, 5, 6), (6, 5, 4), (4, 5, 9), (5, 4, 6))
    assert kept_samples(measured) == [0, 1, 3]


def test_too_few_are_filled_up_and_reported() -> None:
    """Catches a silent fill, and a kept sample left out for a drawn one."""
    measured = activity((4, 5, 6), (6, 5, 4), (4, 5, 9), (5, 4, 8), (4, 6, 7))
    chosen, notes = draw_kept(measured, 4, seed=0)
    assert set(chosen[:2]) == {0, 1}
    assert len(set(chosen)) == 4
    assert notes == (
        "2 of 5 samples have their 3 most active heads among the strongest",
        "2 of 4 were filled up at random",
    )
    enough, notes = draw_kept(measured, 2, seed=0)
    assert set(enough) == {0, 1}
    assert len(notes) == 1


def test_too_few_heads(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches a rule that nobody can meet, and a random draw under its name."""
    with pytest.raises(ValueError, match=r"15% of 12 attention heads are 2: .* at least 3"):
        draw_kept(head_activity(decoder("few-heads"), pool, steps=2), 2, seed=0)
    assert math.ceil(0.15 * 24) == 4  # what the other decoders have


@pytest.mark.parametrize("bad", [{"steps": 0}, {"steps": 2, "temperature": -1.0}])
def test_impossible_generation(
    decoder: Callable[[str], Any], pool: list[Tensor], bad: dict[str, Any]
) -> None:
    """No step gives no token; a negative temperature prefers the unlikeliest."""
    with pytest.raises(ValueError, match="steps must be at least 1"):
        continue_sample(decoder("llama"), pool[0], **bad)
