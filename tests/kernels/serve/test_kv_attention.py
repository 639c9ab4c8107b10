"""Attention that reads codes for some keys: each query against a float64 loop, alone."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from quantwatch_kernels.serve.kv_attention import Score, mixed_attention
from quantwatch_kernels.serve.kv_cache import QuantizedCache, QuantizedLayer
from quantwatch_kernels.serve.kv_reads import ONE_BY_ONE, Arrivals, reads_codes
from quantwatch_kernels.serve.kv_scheme import SCHEMES, KVScheme, PlaneScheme, scheme_named
from quantwatch_kernels.serve.kv_single_pass import (
    calibrate_gains,
    quantized_kv,
    serve_through_,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "sliding window": lambda: MistralConfig(**SIZES, sliding_window=24),
    "soft-capped": lambda: Gemma2Config(**SIZES, sliding_window=24, query_pre_attn_scalar=32),
}
SMALL = KVScheme(PlaneScheme(3, "channel", 8), PlaneScheme(3, group=16), sinks=2, window=5)


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


def tensors(queries: int, keys: int, heads: int = 4) -> list[Tensor]:
    """Query, keys, values, what codes say of them."""
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = [(2, heads, queries, 8)] + 4 * [(2, 2, keys, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by_hand(data: list[Tensor], reads: Tensor, seen: Tensor, softcap: float | None) -> Tensor:
    q, k, v, kc, vc = (x.double() for x in data)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                shared = h // (q.shape[1] // k.shape[1])
                picked = [j for j in range(k.shape[2]) if seen[t, j]]
                keys = [(kc if reads[t, j] else k)[b, shared, j] for j in picked]
                values = [(vc if reads[t, j] else v)[b, shared, j] for j in picked]
                if not picked:
                    continue
                scores = torch.stack([q[b, h, t] @ key for key in keys]) / math.sqrt(8)
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, h, t] = scores.softmax(0) @ torch.stack(values)
    return out


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "soft-capped"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 9), (1, 9), (1, 1)])
def test_each_query_reads_what_it_finds(queries: int, keys: int, softcap: float | None) -> None:
    """Catches heads that read another group's keys, and causality from the wrong end (q < kv)."""
    data = tensors(queries, keys)
    reads = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    seen = torch.ones(queries, keys).tril(keys - queries).bool()
    expected = by_hand(data, reads, seen, softcap)
    q, k, v, kc, vc = data
    for mask in (
        None,
        seen,
        torch.zeros(queries, keys).masked_fill(~seen, torch.finfo(torch.float32).min),
    ):
        found = mixed_attention(q, (k, v), (kc, vc), reads, mask, Score(softcap=softcap))
        assert torch.allclose(found.double(), expected, atol=1e-6)


@pytest.mark.parametrize("width", [1, 3, 12])
def test_values_of_another_width_than_keys(width: int) -> None:
    """Catches an output that is shaped like the query."""
    q, k, _, kc, _ = tensors(3, 5)
    v, vc = torch.randn(2, 2, 2, 5, width, generator=torch.Generator().manual_seed(2))
    reads = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    found = mixed_attention(q, (k, v), (kc, vc), reads, None)
    one_by_one = [
        mixed_attention(q, (k, x.expand_as(k)), (kc, y.expand_as(k)), reads, None)[..., :1]
        for x, y in zip(v.split(1, -1), vc.split(1, -1), strict=True)
    ]
    assert torch.allclose(found, torch.cat(one_by_one, -1), atol=1e-6)


def test_without_codes_it_is_attention() -> None:
    """Catches a scale that is applied twice."""
    q, k, v, kc, vc = tensors(7, 7)
    found = mixed_attention(q, (k, v), (kc, vc), torch.zeros(7, 7, dtype=torch.bool), None)
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_what_nobody_sees_harms_nobody() -> None:
    """Catches 0 · NaN from a stale page, and a query that sees nothing."""
    q, k, v, kc, vc = tensors(4, 6)
    for x in (k, v, kc, vc):
        x[:, :, 4:] = torch.nan
    seen = torch.zeros(4, 6, dtype=torch.bool)
    seen[1:, :4] = True
    reads = torch.arange(6) % 2 == 0
    found = mixed_attention(q, (k, v), (kc, vc), reads.expand(4, 6), seen)
    assert torch.equal(found[:, :, 0], torch.zeros(2, 4, 8))
    assert found.isfinite().all()
    v[0, 0, 1] = torch.nan
    broken = mixed_attention(q, (k, v), (kc, vc), reads.expand(4, 6), seen)
    assert broken[0, :2, 1:].isnan().all()
    assert torch.equal(broken[1], found[1])


@pytest.mark.parametrize("own", ["codes", "exact"])
@pytest.mark.parametrize("chunk", [1, 4, 99])
@pytest.mark.parametrize("prefill", [0, 1, 7, 20, 99])
def test_reads_are_those_of_a_cache(prefill: int, chunk: int, own: Any) -> None:
    """Catches a query that finds codes a step too early or late, against a cache that is filled."""
    expected = torch.zeros(30, 30, dtype=torch.bool)
    begin = 0
    while begin < 30:
        end = min(begin + (prefill if begin == 0 and prefill else chunk), 30)
        between = max((end if own == "codes" else begin) - 2 - 5, 0) // 8 * 8
        expected[begin:end, 2 : 2 + between] = True
        begin = end
    arrivals = Arrivals(prefill, chunk, own)
    assert torch.equal(reads_codes(SMALL, 30, 30, arrivals), expected)
    assert torch.equal(reads_codes(SMALL, 4, 30, arrivals), expected[-4:])
    with pytest.raises(ValueError, match="5 queries can't be the last of 4"):
        reads_codes(SMALL, 5, 4, arrivals)


def plainly(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in the model's dtype, as eager code writes it; sdpa leaves the soft-cap out."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * kwargs["scaling"]
    if kwargs.get("softcap"):
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    return ((scores + mask).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("test_plainly", plainly)
AttentionMaskInterface.register("test_plainly", eager_mask)


def decode(
    model: Any, scheme: KVScheme, ids: Tensor, arrivals: Arrivals = ONE_BY_ONE, gains: Any = None
) -> tuple[Tensor, Any]:
    """Logits [B, T, V] of a text that comes in parts, attention as transformers has it."""
    cache = QuantizedCache(scheme, 2, arrivals.own, gains)
    first = min(arrivals.prefill, ids.shape[1])
    parts = [ids[:, :first]] if first else []
    parts += torch.split(ids[:, first:], arrivals.chunk, 1) if first < ids.shape[1] else []
    with torch.no_grad():
        found = [model(part, cache=cache, use_cache=True).logits for part in parts]
    return torch.cat(found, 1), cache


def equal_to_decoding(name: str, scheme: KVScheme, arrivals: Arrivals, gains: Any = None) -> None:
    model = build(name).double()  # in float32 the last bit of a key now and then turns a code
    model.set_attn_implementation("test_plainly")
    ids = torch.randint(0, 96, (2, 45), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    expected, _ = decode(model, scheme, ids, arrivals, gains)
    with torch.no_grad(), quantized_kv(model, scheme, arrivals, gains):
        found = model(ids, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-9), name
    assert not torch.allclose(found, plain, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, plain)


@pytest.mark.parametrize("prefill", [0, 21])
@pytest.mark.parametrize("name", MODELS)
def test_one_pass_equals_decoding(name: str, prefill: int) -> None:
    """Catches anything that differs between a candidate's pass and real serving."""
    for scheme in (SMALL, scheme_named("int4"), scheme_named("int8+high0")):
        equal_to_decoding(name, scheme, Arrivals(prefill))


@pytest.mark.parametrize("own", ["codes", "exact"])
@pytest.mark.parametrize(("prefill", "chunk"), [(0, 1), (21, 1), (20, 9), (30, 99)])
def test_one_pass_equals_decoding_in_chunks(own: Any, prefill: int, chunk: int) -> None:
    """Catches a chunk that finds codes of itself where it sees itself, and the other way round."""
    equal_to_decoding("llama", SMALL, Arrivals(prefill, chunk, own))


@pytest.mark.parametrize("name", SCHEMES)
def test_generate(name: str) -> None:
    """Catches lengths around flush and window, and bytes that aren't those of the scheme."""
    model, scheme = build("llama"), SCHEMES[name]
    ids = torch.randint(3, 96, (1, 70), generator=torch.Generator().manual_seed(4))
    cache = QuantizedCache(scheme, 2)
    out = model.generate(
        ids, cache=cache, max_new_tokens=5, min_new_tokens=5, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    assert out.shape == (1, 75)
    assert cache.get_seq_length() == 74
    again, other = decode(model, scheme, out[:, :-1], Arrivals(70))
    assert torch.equal(again[0, 69:].argmax(-1), out[0, 70:])
    kept = 74 - (scheme.stored_end(74) - scheme.sinks)
    coded: list[Any] = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    # 32 bits, not 16, are kept here; zero points of a flush end on a byte.
    one = 2 * scheme.bits_per_element(74, 32) * 2 * 74 * 32 / 8 + 2 * 2 * kept * 32 * 2
    wanted = len(coded) * one + (2 - len(coded)) * 2 * 2 * 74 * 32 * 4
    flushes = sum(len(plane.stored) for layer in coded for plane in layer._planes)
    assert len(coded) == 2 - len(scheme.high_layers)
    assert wanted <= cache.num_bytes == other.num_bytes <= wanted + flushes


def test_codes_never_change() -> None:
    """Catches a cache that is quantized anew at each flush (transformers#34189)."""
    model, cache = build("llama"), QuantizedCache(SMALL, 2)
    ids = torch.randint(3, 96, (1, 60), generator=torch.Generator().manual_seed(5))
    seen: list[Tensor] = []
    with torch.no_grad():
        for step in torch.split(ids, 4, 1):
            model(step, cache=cache, use_cache=True)
            layer: Any = cache.layers[1]
            chunks = [chunk.codes.clone() for chunk in layer._planes[0].stored]
            for before, after in zip(seen, chunks, strict=False):
                assert torch.equal(before, after)
            seen = chunks
    assert sum(chunk.shape[1] * 8 // 3 for chunk in seen) == SMALL.stored_end(60) - 2


def test_a_copy_keeps_its_cache() -> None:
    """Catches a scheme that is lost, or shared, when a candidate is copied."""
    model = build("llama")
    ids = torch.randint(3, 96, (1, 40), generator=torch.Generator().manual_seed(6))
    plain = copy.deepcopy(model)
    serve_through_(model, SMALL)
    again = copy.deepcopy(model)
    with torch.no_grad():
        found = [each(ids, use_cache=False).logits for each in (model, again, plain)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_refused() -> None:
    """Catches a pass whose positions would be others, beams, and layers that aren't there."""
    model = build("llama")
    with pytest.raises(ValueError, match=r"layers \[7\] are to stay high; the model has 2"):
        QuantizedCache(scheme_named("int4+high7"), 2)
    with (
        pytest.raises(ValueError, match=r"layers \[7\] are to stay high"),
        quantized_kv(model, scheme_named("int4+high7")),
    ):
        pass
    cache = QuantizedCache(SMALL, 2)
    ids = torch.ones(1, 3, dtype=torch.long)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="use num_beams=1"):
        cache.reorder_cache(torch.tensor([0]))
    with quantized_kv(model, SMALL), pytest.raises(ValueError, match="takes whole texts"):
        model(ids, cache=cache)
    padded = torch.tensor([[0, 1, 1], [1, 1, 1]])
    whole = torch.ones(2, 3, dtype=torch.long)
    with quantized_kv(model, SMALL):
        model(whole, attention_mask=padded.flip(1), use_cache=False)
        with pytest.raises(ValueError, match="padded on the right only"):
            model(whole, attention_mask=padded, use_cache=False)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("width", [32, 64], ids=["values narrower", "values as wide as keys"])
def test_latents_are_refused(width: int) -> None:
    """Catches codes of keys and values in a model that caches what it expands them from."""
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 16},
        **{"q_lora_rank": None, "kv_lora_rank": 32, "first_k_dense_replace": 2},
        **{"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": width},
    )
    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="DeepseekV3Attention caches latents, not keys and values"):
        serve_through_(model, SMALL)
    with pytest.raises(ValueError, match="caches latents"):
        calibrate_gains(model, scheme_named("int4+gain"), [torch.ones(1, 9, dtype=torch.long)])
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", SCHEMES)
def test_texts_shorter_than_a_flush(name: str) -> None:
    """Catches the range of nothing: no token is stored yet, or a single one."""
    model = build("llama").double()  # as above: no last bit turns a code
    for length in (1, 2, 33):
        ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad(), quantized_kv(model, SCHEMES[name]):
            found = model(ids, use_cache=False).logits
        expected, _ = decode(model, SCHEMES[name], ids)
        assert torch.allclose(found, expected, rtol=0, atol=1e-9)
        if SCHEMES[name].stored_end(length) <= SCHEMES[name].sinks:
            with torch.no_grad():
                plain = model(ids, use_cache=False).logits
            assert torch.allclose(found, plain, rtol=0, atol=1e-9)
