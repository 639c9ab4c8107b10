"""What repairs codes: pages that a query chooses, and calibrated gains, each against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from quantwatch_kernels.serve.kv_attention import mixed_attention
from quantwatch_kernels.serve.kv_cache import ChoosingLayer, QuantizedCache, QuantizedLayer
from quantwatch_kernels.serve.kv_choosing import choosing
from quantwatch_kernels.serve.kv_errors import AttentionErrors
from quantwatch_kernels.serve.kv_gain import GainSums, KVGains
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_reads import Arrivals, reads_codes
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import (
    attention_errors,
    calibrate_gains,
    quantized_kv,
    through_codes,
)
from quantwatch_kernels.serve.kv_top_pages import chosen_keys, page_bounds

PAGES = KVScheme(PlaneScheme(2), PlaneScheme(3), sinks=1, top_pages=2, page=4)
GAIN = KVScheme(PlaneScheme(2), PlaneScheme(2, "channel", 8), sinks=1, gain=True)


def build() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


def ids(tokens: int, seed: int = 0, texts: int = 1) -> Tensor:
    return torch.randint(3, 96, (texts, tokens), generator=torch.Generator().manual_seed(seed))


def numbers(tokens: int, heads: int, seed: int) -> Tensor:
    return torch.randn(2, heads, tokens, 8, generator=torch.Generator().manual_seed(seed))


def by_hand(query: Tensor, keys: Tensor, scheme: KVScheme) -> Tensor:
    """Choose page by page: the true bound of float16 minima and maxima, heads of a group together."""
    batch, shared, tokens, _ = keys.shape
    groups = query.shape[1] // shared
    chosen = torch.zeros(batch, shared, tokens, tokens, dtype=torch.bool)
    for b in range(batch):
        for h in range(shared):
            for t in range(tokens):
                bounds = {}
                for begin in range(scheme.sinks, scheme.stored_end(t + 1), scheme.page):
                    page = keys[b, h, begin : begin + scheme.page]
                    low, high = (x.half().double() for x in (page.amin(0), page.amax(0)))
                    bounds[begin] = max(
                        float(torch.maximum(q * low, q * high).sum())
                        for q in query[b, h * groups : (h + 1) * groups, t].double()
                    )
                for begin in sorted(bounds, key=bounds.__getitem__)[-scheme.top_pages :]:
                    chosen[b, h, t, begin : begin + scheme.page] = True
    return chosen


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 23, 29])
def test_the_pages_with_the_largest_bound_are_read(tokens: int) -> None:
    """Catches other heads' pages, pages not yet stored, and a count around page and sinks."""
    query, keys = numbers(tokens, 4, 1), numbers(tokens, 2, 2)
    reads = reads_codes(PAGES, tokens, tokens, Arrivals())
    seen = torch.ones(tokens, tokens).tril().bool()
    found = chosen_keys(query, keys, PAGES, reads, seen)
    assert torch.equal(found, by_hand(query, keys, PAGES))
    assert not (found & ~reads).any()


def test_a_bound_holds_for_every_key() -> None:
    """Catches minimum and maximum that are taken the wrong way round for negative queries."""
    query, keys = numbers(16, 2, 3), numbers(16, 2, 4)
    low, high = (x.float() for x in page_bounds(keys, 4))
    bounds = query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT
    products = (query @ keys.mT).reshape(2, 2, 16, 4, 4).amax(-1)
    assert (products <= bounds + 1e-2).all()
    with pytest.raises(ValueError, match="15 tokens are no whole pages of 4"):
        page_bounds(keys[..., :15, :], 4)


def test_pages_out_of_sight_are_not_chosen() -> None:
    """Catches a choice that is spent on pages which a sliding window has left behind."""
    query, keys = numbers(29, 4, 5), numbers(29, 2, 6)
    reads = reads_codes(PAGES, 29, 29, Arrivals())
    position = torch.arange(29)
    seen = (position <= position[:, None]) & (position > position[:, None] - 9)
    found = chosen_keys(query, keys, PAGES, reads, seen)
    pages = (found & reads)[..., 1:].reshape(2, 2, 29, 7, 4).any(-1)
    visible = (reads & seen)[:, 1:].reshape(29, 7, 4).any(-1)
    assert torch.equal(pages.sum(-1), visible.sum(-1).clamp(max=2).expand(2, 2, -1))
    assert not (pages & ~visible).any()


def test_chosen_keys_are_exact_and_values_stay_codes() -> None:
    """Catches a mask that is taken for the values, too, or heads of a group in another order."""
    query, keys, values = numbers(13, 4, 7), numbers(13, 2, 8), numbers(13, 2, 9)
    coded = through_codes(keys, PAGES.keys, PAGES), through_codes(values, PAGES.values, PAGES)
    reads = reads_codes(PAGES, 13, 13, Arrivals())
    seen = torch.ones(13, 13).tril().bool()
    chosen = chosen_keys(query, keys, PAGES, reads, seen)
    found = mixed_attention(query, (keys, values), coded, (reads & ~chosen, reads), None)
    for head in range(4):
        for t in range(13):
            mine = (reads[t] & ~chosen[:, head // 2, t])[..., None]
            k = torch.where(mine, coded[0][:, head // 2], keys[:, head // 2]).double()
            v = torch.where(
                reads[t][:, None], coded[1][:, head // 2], values[:, head // 2]
            ).double()
            scores = (k[:, : t + 1] @ query[:, head, t, :, None].double())[..., 0] / 8**0.5
            expected = (scores.softmax(-1)[:, None] @ v[:, : t + 1])[:, 0]
            assert torch.allclose(found[:, head, t].double(), expected, atol=1e-6)


def test_with_all_pages_keys_are_exact() -> None:
    """Catches a model whose chosen pages are never read: then only values are codes."""
    model, text = build(), ids(60)
    values = PlaneScheme(3, "channel", 4)
    everything = KVScheme(PlaneScheme(2), values, top_pages=99, page=4)
    floats = KVScheme(PlaneScheme(16, floats="float16"), values)
    codes = KVScheme(PlaneScheme(2), values)
    with torch.no_grad():
        found, expected, without = (through(model, text, s) for s in (everything, floats, codes))
    assert (found - expected).abs().max() < 0.02 * (without - expected).abs().max()


def test_a_padded_text_chooses_what_it_would_alone() -> None:
    """Catches bounds over padding, and pages that are chosen for another text of the batch."""
    model = build().double()
    long, short = ids(60, 1), ids(41, 2)
    batch = torch.cat([long, torch.nn.functional.pad(short, (0, 19))])
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, 41:] = 0
    with torch.no_grad(), quantized_kv(model, PAGES):
        found = model(batch, attention_mask=mask, use_cache=False).logits
        alone = [model(text, use_cache=False).logits[0] for text in (long, short)]
    assert torch.allclose(found[0], alone[0], rtol=0, atol=1e-9)
    assert torch.allclose(found[1, :41], alone[1], rtol=0, atol=1e-9)


LATE = KVScheme(PlaneScheme(2), PlaneScheme(3), 1, 5, (1,), top_pages=2, page=4)


@pytest.mark.slow
@pytest.mark.parametrize("own", ["codes", "exact"])
@pytest.mark.parametrize(("prefill", "chunk"), [(0, 1), (21, 1), (20, 9), (60, 99)])
@pytest.mark.parametrize("scheme", [PAGES, LATE], ids=["pages", "window and a high layer"])
def test_decoding_chooses_what_one_pass_chooses(
    scheme: KVScheme, prefill: int, chunk: int, own: Any
) -> None:
    """Catches pages chosen a step too early, from codes, or fetched for another key head."""
    model, text = build().double(), ids(60, texts=2)
    arrivals = Arrivals(prefill, chunk, own)
    with torch.no_grad(), quantized_kv(model, scheme, arrivals):
        expected = model(text, use_cache=False).logits
    cache = QuantizedCache(scheme, 2, own)
    parts = [text[:, :prefill], *torch.split(text[:, prefill:], chunk, 1)]
    with torch.no_grad(), choosing(model, cache):
        found = [model(part, cache=cache).logits for part in parts if part.shape[1]]
    assert torch.allclose(torch.cat(found, 1), expected, rtol=0, atol=1e-9)
    with torch.no_grad(), quantized_kv(model, replace(scheme, top_pages=0), arrivals):
        without = model(text, use_cache=False).logits
    if prefill < 60 or own == "codes":
        assert not torch.allclose(expected, without, atol=1e-4)


def test_generate_chooses_pages() -> None:
    """Catches a cache that runs on after the context, one that isn't the model's, and its bytes."""
    model, text = build(), ids(41)
    said: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cache = QuantizedCache(PAGES, 2)
    with choosing(model, cache):
        out = model.generate(text, cache=cache, pad_token_id=0, **said)
        with pytest.raises(ValueError, match="without the cache"):
            model(text, use_cache=False)
    with torch.no_grad(), quantized_kv(model, PAGES, Arrivals(41)):
        logits = model(out[:, :-1], use_cache=False).logits
    assert torch.equal(logits[0, 40:].argmax(-1), out[0, 41:])
    layers = [layer for layer in cache.layers if isinstance(layer, ChoosingLayer)]
    assert [layer.host_bytes for layer in layers] == 2 * [45 * 2 * 32 * 4]
    pages, heads, features, of_two_bytes = 45 // 4, 2, 32, 2
    for layer in layers:
        codes = QuantizedLayer.num_bytes.fget(layer)  # type: ignore[attr-defined]
        assert layer.num_bytes - codes == 2 * pages * heads * features * of_two_bytes
    with pytest.raises(ValueError, match="run inside"):
        model(text[:, :1], cache=cache)
    assert model.config._attn_implementation == "sdpa"
    cache.reset()
    assert cache.num_bytes == 0


def through(model: Any, text: Tensor, scheme: KVScheme) -> Tensor:
    with quantized_kv(model, scheme):
        logits: Tensor = model(text, use_cache=False).logits
    return logits


def test_gains_by_hand() -> None:
    """Catches sums over features, a quotient turned round, and sinks that are counted as codes."""
    model, texts = build(), [ids(33), ids(41, 1), ids(4, 2)]
    found = calibrate_gains(model, GAIN, texts)
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 1: []}

    def watch(module: Any, _args: Any, kwargs: Any, _out: Any) -> None:
        x = kwargs["hidden_states"]
        split = (*x.shape[:2], 2, 32)
        keys = module.k_proj(x).reshape(split).transpose(1, 2)
        values = module.v_proj(x).reshape(split).transpose(1, 2)
        cos, sin = kwargs["position_embeddings"]
        half = torch.cat([-keys[..., 16:], keys[..., :16]], -1)
        seen[module.layer_idx].append((keys * cos[:, None] + half * sin[:, None], values))

    handles = [
        layer.self_attn.register_forward_hook(watch, with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        for text in texts:
            model(text, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer in (0, 1):
        for number, plane in enumerate((GAIN.keys, GAIN.values)):
            top, bottom = (torch.zeros(2, 32, dtype=torch.float64) for _ in range(2))
            for pair in seen[layer]:
                x = pair[number]
                end = GAIN.stored_end(x.shape[2])
                codes = through_codes(x, plane, GAIN)[..., 1:end, :].double()
                top = top + (x[..., 1:end, :].double() * codes).sum((0, 2))
                bottom = bottom + codes.square().sum((0, 2))
            expected = (top / bottom)[:, None]
            gain = found.by_layer[layer][number]
            assert gain.dtype == torch.float16
            assert gain.shape == (2, 1, 32)
            assert torch.allclose(gain.double(), expected, rtol=2e-3)
    assert found.num_bytes == 2 * 2 * 2 * 32 * 2


@pytest.mark.parametrize("prefill", [0, 20])
def test_gains_are_applied_as_a_cache_does(prefill: int) -> None:
    """Catches gains on full precision, of another layer or head, and a cache that forgets them."""
    model = build().double()
    gains = calibrate_gains(model, GAIN, [ids(50, 1)])
    text, arrivals = ids(45, 2, texts=2), Arrivals(prefill)
    cache = QuantizedCache(GAIN, 2, gains=gains)
    parts = [text[:, :prefill]] if prefill else []
    with torch.no_grad():
        parts += torch.split(text[:, prefill:], 1, 1)
        expected = torch.cat([model(part, cache=cache).logits for part in parts], 1)
        with quantized_kv(model, GAIN, arrivals, gains):
            found = model(text, use_cache=False).logits
        plain = KVScheme(GAIN.keys, GAIN.values, sinks=1)
        with quantized_kv(model, plain, arrivals):
            without = model(text, use_cache=False).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)
    assert not torch.allclose(found, without, atol=1e-4)


def test_a_gain_repairs_a_gain_error() -> None:
    """Catches a gain that makes the error it was calibrated on larger."""
    x = numbers(64, 2, 3) * 5
    coded = x * torch.linspace(0.5, 2, 8)
    sums = GainSums()
    sums.add(0, (x, x), (coded, x))
    keys, values = sums.gains(1).apply(0, (coded, x))
    assert torch.allclose(keys, x, rtol=1e-3)
    assert torch.allclose(values, x, rtol=1e-3)


def test_refused() -> None:
    """Catches a scheme that runs without what it needs, or with what it ignores."""
    model = build()
    gains = calibrate_gains(model, GAIN, [ids(40)])
    plain = scheme_named("int4")
    cases: dict[str, Any] = {
        "has a gain, which must be calibrated first": lambda: QuantizedCache(GAIN, 2),
        "given to a scheme that uses none": lambda: QuantizedCache(plain, 2, gains=gains),
        "run inside .choosing": lambda: model(ids(9), cache=QuantizedCache(PAGES, 2)),
        "no top pages: nothing is chosen": lambda: choosing(
            model, QuantizedCache(plain, 2)
        ).__enter__(),
        "no gain that could be calibrated": lambda: calibrate_gains(model, plain, [ids(40)]),
        "no calibration text": lambda: calibrate_gains(model, GAIN, [ids(2)]),
        "gains of 2 layers; not of 2": lambda: gains.apply(2, (ids(1), ids(1))),
        "layer 0 has a gain that isn't finite": lambda: KVGains(
            [(torch.tensor([torch.nan]), torch.ones(1))]
        ),
        "a chunk at least 1; not 3 and 0": lambda: Arrivals(3, 0),
    }
    for said, make in cases.items():
        with pytest.raises(ValueError, match=said):
            make()
    with pytest.raises(ValueError, match="calibrated first"), quantized_kv(model, GAIN):
        pass
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("scheme", [scheme_named("int4"), PAGES], ids=["plain", "pages"])
def test_errors_of_attention_by_hand(scheme: KVScheme) -> None:
    """Catches keys that no query sees, heads of another group, and inputs that are off already."""
    model, text = build(), ids(37)
    taken: list[tuple[Tensor, ...]] = []

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        taken.append((query, key, value))
        keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("test_watch", watch)
    AttentionMaskInterface.register("test_watch", eager_mask)
    model.set_attn_implementation("test_watch")
    with torch.no_grad():
        model(text, use_cache=False)
    model.set_attn_implementation("sdpa")
    sums = torch.zeros(4, dtype=torch.float64)
    seen = torch.ones(37, 37).tril().bool()
    reads = reads_codes(scheme, 37, 37, Arrivals(20))
    for query, key, value in taken:
        coded = [
            through_codes(x, p, scheme) for x, p in ((key, scheme.keys), (value, scheme.values))
        ]
        pair: Any = (reads, reads)
        if scheme.top_pages:
            pair = (reads & ~chosen_keys(query, key, scheme, reads, seen), reads)
        found = mixed_attention(query, (key, value), (coded[0], coded[1]), pair, None).double()
        true = mixed_attention(query, (key, value), (key, value), reads, None).double()
        sums[2] += (found - true).square().sum()
        sums[3] += true.square().sum()
        q = query.double()
        for head in range(4):
            mask = seen & (pair[0] if pair[0].ndim == 2 else pair[0][0, head // 2])
            true_scores = q[0, head] @ key[0, head // 2].double().T
            codes = q[0, head] @ coded[0][0, head // 2].double().T
            sums[0] += ((codes - true_scores) * mask).square().sum()
            sums[1] += (true_scores * seen).square().sum()
    errors = attention_errors(model, scheme, [text], Arrivals(20))
    assert errors.scores == pytest.approx((sums[0] / sums[1]).sqrt().item(), rel=1e-4)
    assert errors.outputs == pytest.approx((sums[2] / sums[3]).sqrt().item(), rel=1e-4)
    with pytest.raises(ValueError, match="no attention was seen"):
        _ = AttentionErrors().outputs
