"""Attention weights as the model forms them, and how uneven they are."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.calibration.attention import attention_reader, attention_variance
from quantwatch_kernels.calibration.scores import sample_scores


def twin(weights: Tensor, start: int = 1) -> list[float]:
    """Float64, one query after the other, over the keys that it may see."""
    heads = []
    for head in weights.double():
        rows = [row[: t + 1] for t, row in enumerate(head)][start:]
        heads.append(sum(float(row.var(correction=0)) for row in rows) / len(rows))
    return heads


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2"])
def test_weights_are_the_models_own(
    decoder: Callable[[str], Any], pool: list[Tensor], family: str
) -> None:
    """Catches a layer that is missed, a hook that stays, and an implementation not restored."""
    model = decoder(family)
    usual = "eager" if family == "gemma2" else "sdpa"  # soft-capping knows no other
    model.config._attn_implementation = usual
    found: list[Tensor] = []
    with attention_reader(model) as read:
        logits = read(pool[1], lambda w: found.append(w.clone()))
    assert model.config._attn_implementation == usual
    assert not any(module._forward_hooks for module in model.modules())
    plain = model(pool[1], use_cache=False).logits[0]
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))
    model.config._attn_implementation = "eager"
    expected = model(pool[1], use_cache=False, output_attentions=True).attentions
    assert len(found) == len(expected) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs[0])
        torch.testing.assert_close(ours.sum(-1), torch.ones(6, 14))


def test_one_layer_at_a_time(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches weights of all layers kept until the end of the pass."""
    alive: list[weakref.ref[Tensor]] = []

    def take(weights: Tensor) -> None:
        assert sum(ref() is not None for ref in alive) == 0
        assert weights._base is not None
        alive.append(weakref.ref(weights._base))

    with attention_reader(decoder("llama")) as read:
        read(pool[1], take)
    assert len(alive) == 4


def test_everything_is_restored_after_an_error(
    decoder: Callable[[str], Any], pool: list[Tensor]
) -> None:
    """Catches a model left on its slow attention when a sample fails."""
    model = decoder("llama")
    model.config._attn_implementation = "sdpa"
    model.model.layers[2].self_attn.q_proj.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"sample 0 of the pool: its attention weights"):
        sample_scores(model, pool)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_model_without_attention(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches a score of zero for a model that has no attention at all."""
    with pytest.raises(ValueError, match="MambaForCausalLM gives no attention weights"):
        sample_scores(decoder("mamba"), pool)


@pytest.mark.parametrize("start", [1, 3])
def test_variance_against_its_twin(start: int) -> None:
    """Catches masked keys in the variance (padded positions, kernel_anchors 2.2 row 10)."""
    torch.manual_seed(3)
    scores = (4 * torch.randn(5, 12, 12)).masked_fill(
        torch.ones(12, 12).triu(1).bool(), float("-inf")
    )
    weights = scores.softmax(-1)
    ours = attention_variance(weights, slice(start, None))
    assert ours.dtype == torch.float64
    assert ours.tolist() == pytest.approx(twin(weights, start), rel=1e-6)


def test_variance_of_even_and_of_single_attention() -> None:
    """Even attention is 0, not rounding below it; one key for each query is 1/n − 1/n²."""
    num_keys = torch.arange(1, 31).double()
    even = torch.ones(30, 30).tril() / num_keys.float()[:, None]
    single = torch.zeros(30, 30)
    single[:, 0] = 1
    found = attention_variance(torch.stack([even, single]))
    assert 0 <= found[0] < 1e-9
    assert found[1].item() == pytest.approx((1 / num_keys - 1 / num_keys**2)[1:].mean().item())
