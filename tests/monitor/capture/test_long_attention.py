"""Chunks attend without a mask of chunk × length, and see what they would see with one."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch.capture import long_attention
from quantwatch.capture.long_attention import LongAttention, attend_behind
from quantwatch.capture.plan import CapturePlan

SHAPES = {
    "one head": (1, 1, 2, 3, 8, 8),
    "shared heads": (9, 3, 64, 300, 64, 64),
    "values of another width": (4, 4, 7, 20, 12, 8),
    "more queries than seen before": (4, 2, 33, 40, 16, 16),
    "many keys": (2, 1, 5, 2000, 32, 32),
}
"""Heads of queries, of keys, Q, K, width of a key, of a value."""
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float) -> NDArray[np.float64]:
    """Attend in float64, query by query: the sum over the keys up to its own, and no other."""
    q, k, v = (each[0].double().numpy() for each in (query, key, value))
    found = np.empty((q.shape[0], q.shape[1], v.shape[2]))
    before = k.shape[1] - q.shape[1]
    for head, at in np.ndindex(*q.shape[:2]):
        shared = head * len(k) // len(q)
        scores = k[shared, : before + at + 1] @ q[head, at] * scale
        weights = np.exp(scores - scores.max())
        found[head, at] = weights @ v[shared, : before + at + 1] / weights.sum()
    return found


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value; keys and values are the first part of more room, as in caches."""
    heads, shared, queries, keys, width, value_width = shape
    torch.manual_seed(sum(shape))
    query = torch.randn(1, queries, heads, width, dtype=dtype).transpose(1, 2)
    rooms = (torch.randn(1, shared, keys + 9, w, dtype=dtype) for w in (width, value_width))
    key, value = (room[:, :, :keys] for room in rooms)
    return query, key, value


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_query_sees_what_is_before_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches a mask that is off by one, rows that stay reversed, heads that share wrongly."""
    given = drawn(shape, dtype)
    found = attend_behind(*given, scale=0.3)[0].double().numpy()
    expected = by_hand(*given, 0.3)
    np.testing.assert_allclose(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("start", [256, 1000, 1792])
def test_the_bits_are_those_of_a_mask(start: int) -> None:
    """Catches numbers of stored runs that move: SmolLM2's heads, in chunks of 256."""
    query, key, value = drawn((9, 3, 256, start + 256, 64, 64), torch.float32)
    seen = torch.arange(start + 256)[None] <= torch.arange(256)[:, None] + start
    keys, values = (each.repeat_interleave(3, dim=1) for each in (key, value))
    usual = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    assert torch.equal(attend_behind(query, key, value, scale=None), usual)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mask of Q × K, and keys and values once per query head."""
    given: list[Tensor] = []
    attend = nn.functional.scaled_dot_product_attention

    def look(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **more: Any) -> Tensor:
        given.extend((key, value, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", look)
    query, key, value = drawn((9, 3, 64, 300, 64, 64), torch.float32)
    attend_behind(query, key, value, scale=None)
    assert (given[0].data_ptr(), given[1].data_ptr()) == (key.data_ptr(), value.data_ptr())
    assert given[2].untyped_storage().nbytes() == 4 * (64 + 300 - 1)


@pytest.mark.parametrize("option", ["mask", "position_bias", "one query", "the first chunk"])
def test_other_calls_are_those_of_sdpa(option: str) -> None:
    """Catches a bias that is left out, and a mask that is taken for none."""
    query, key, value = drawn((4, 2, 6, 17, 8, 8), torch.float64)
    module, bias, mask = nn.Module(), torch.randn(1, 4, 6, 17, dtype=torch.float64), None
    module.num_key_value_groups = 2  # type: ignore[assignment]
    seen = torch.ones(6, 17, dtype=torch.bool).tril(11)
    full = torch.where(seen, bias if option == "position_bias" else 0.0, -torch.inf)
    options = {"position_bias": bias} if option == "position_bias" else {}
    if option == "mask":
        mask = full = torch.where(seen & (torch.arange(17) > 3), bias, -torch.inf)
    if option == "one query":
        query, full = query[:, :, -1:], full[..., -1:, :]
    if option == "the first chunk":
        key, value, full = (each[..., :6, :] for each in (key, value, full))
        full = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), 0.0, -torch.inf).double()
    found, _ = long_attention._attention(module, query, key, value, mask, scaling=0.3, **options)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * 0.3 + full
    expected = scores.softmax(-1) @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


WITHOUT = {"llama": 3, "gpt2": 3, "gpt-neox": 3, "mixtral": 3, "deepseek-v3": 3, "gemma3": 1}
WITHOUT |= {"gemma2": 0, "bloom": 0}
"""Layers that attend without a mask: sliding windows and attention that isn't SDPA keep theirs."""


@pytest.mark.parametrize("kind", WITHOUT)
def test_which_layers_do_without(kit: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches models that no longer profit, and a window that is seen through."""
    calls: list[tuple[int, int]] = []

    def counted(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return attend_behind(query, key, value, **more)

    changes = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    model = kit.build(kind, **(changes if kind == "gemma3" else {}))
    monkeypatch.setattr(long_attention, "attend_behind", counted)
    plan = CapturePlan(batch_tokens=64, isolated_fraction=0, prefill_chunk=7)
    pair = {"c": kit.perturb(model)}
    before = model.config._attn_implementation
    kit.capture(model, pair, kit.suite([20]), plan)
    per_model = [(7, 14), (6, 20)]
    tried = [(3, 7)]  # the last of the eight tokens goes alone: a single query needs no mask
    expected = sorted(WITHOUT[kind] * 2 * (per_model + tried))
    assert sorted(calls) == expected
    assert model.config._attn_implementation == before


def test_every_part_gets_back_what_it_had(kit: Any) -> None:
    """Catches a model that attends through ours for good, or a part that was eager and isn't."""
    model = kit.build("llama")
    odd = model.model.layers[1].self_attn
    odd.config = type(model.config)(**{**model.config.to_dict(), "attn_implementation": "eager"})
    parts = (model.config, odd.config, model.model.layers[0].self_attn.config)
    inside: list[str] = []

    def fails() -> None:
        with LongAttention(kit.load(model)).switched():
            inside.extend(part._attn_implementation for part in parts)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert inside == ["quantwatch_long", "eager", "quantwatch_long"]
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]
