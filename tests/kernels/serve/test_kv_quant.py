"""A cache's codes: their values against float64, their bytes, and what is never touched again."""

import math

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.serve.kv_quant import restore, store
from quantwatch_kernels.serve.kv_scheme import SCHEMES, KVScheme, PlaneScheme, scheme_named

PLANES = {
    "int8 symmetric": PlaneScheme(8, symmetric=True),
    "uint8": PlaneScheme(8),
    "uint4": PlaneScheme(4),
    "uint4 g8": PlaneScheme(4, group=8),
    "uint4 g12, short last group": PlaneScheme(4, group=12),
    "int3 symmetric": PlaneScheme(3, symmetric=True),
    "uint2 per channel": PlaneScheme(2, "channel", 8),
    "uint4 per channel": PlaneScheme(4, "channel", 4),
}
each = pytest.mark.parametrize("plane", PLANES.values(), ids=PLANES.keys())


def cached(seed: int = 0, tokens: int = 16) -> Tensor:
    """[2, 3, tokens, 32] with a feature that is large in every token, as keys have."""
    x = torch.randn(2, 3, tokens, 32, generator=torch.Generator().manual_seed(seed))
    x[..., 5] += 9
    return x


def by_hand(x: Tensor, plane: PlaneScheme) -> Tensor:
    """Round in float64, group by group, with scales and zero points as they are stored."""
    x = x.double()
    along = x.mT if plane.per == "channel" else x
    out = torch.empty_like(along)
    size = plane.group or along.shape[-1]
    levels = 2**plane.bits - 1
    for start in range(0, along.shape[-1], size):
        part = along[..., start : start + size]
        if plane.symmetric:
            scale = (part.abs().amax(-1, keepdim=True).float() / (levels // 2)).half().double()
            codes = (part / scale).float().round().double()
            out[..., start : start + size] = codes.clamp(-(levels // 2), levels // 2) * scale
            continue
        low = part.amin(-1, keepdim=True).clamp(max=0)
        high = part.amax(-1, keepdim=True).clamp(min=0)
        wide = (high.float() / levels - low.float() / levels).half()
        for _ in range(2):
            zero = (-low / wide.double()).round().clamp(0, levels)
            outside = (low / wide.double() + zero < -0.5) | (
                high / wide.double() + zero > levels + 0.5
            )
            wide = torch.where(outside, (wide.view(torch.int16) + 1).view(torch.half), wide)
        zero = (-low / wide.double()).round().clamp(0, levels)
        codes = ((part / wide.double()).float().round().double() + zero).clamp(0, levels)
        out[..., start : start + size] = (codes - zero) * wide.double()
    return out.mT if plane.per == "channel" else out


@each
def test_values_are_the_definition(plane: PlaneScheme) -> None:
    """Catches scales along the wrong axis, groups across heads, codes read without scales."""
    x = cached()
    found = restore(store(x, plane), plane)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), by_hand(x, plane), rtol=1e-6, atol=1e-7)


@each
def test_bytes_are_counted(plane: PlaneScheme) -> None:
    """Catches 4 bits without scales, zero points and the ends of rows."""
    stored = store(cached(), plane)
    assert 8 * stored.num_bytes == 2 * 3 * plane.num_bits(16, 32)


def test_per_channel_holds_a_large_feature() -> None:
    """Catches KIVI's idea turned round: keys need a scale per feature, not per token."""
    x = cached(tokens=32)
    errors = [
        (restore(store(x, plane), plane) - x)[..., torch.arange(32) != 5].norm().item()
        for plane in (PlaneScheme(2, "channel", 32), PlaneScheme(2))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_the_rotation_is_undone() -> None:
    """Catches codes of rotated keys against a query that isn't."""
    x, plane = cached(), PlaneScheme(8, hadamard=True)
    stored = store(x, plane)
    assert (restore(stored, plane) - x).abs().max() < 0.1
    rotated = restore(stored, plane, rotated=True)
    query = torch.randn(2, 3, 4, 32)
    from quantwatch_kernels.serve.kv_quant import rotation

    scores = rotation(32)(query) @ rotated.mT
    assert torch.allclose(scores, query @ restore(stored, plane).mT, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_are_rounded_and_nothing_else(dtype: str) -> None:
    """Catches bits that are read as another type, and views whose strides are ignored."""
    plane = scheme_named(dtype).keys
    x = cached().transpose(0, 1)
    stored = store(x, plane)
    assert torch.equal(restore(stored, plane), x.to(getattr(torch, dtype)).float())
    assert 8 * stored.num_bytes == 2 * 3 * plane.num_bits(16, 32) == 16 * x.numel()


@pytest.mark.parametrize("rank", [0, 2])
def test_one_scale_for_a_head_and_chunk(rank: int) -> None:
    """Catches a scale over heads or texts, and one that reaches into the next chunk."""
    plane = PlaneScheme(8, "chunk", symmetric=True, rank=rank)
    x = cached(tokens=128)
    x[0, 1] *= 10
    x[..., 64:, :] *= 3
    chunks = x.double().reshape(2, 3, 2, 64 * 32)
    scale = (chunks.abs().amax(-1, keepdim=True).float() / 127).half().double()
    expected = ((chunks / scale).float().round() * scale).reshape(x.shape)
    stored = store(x, plane)
    assert 8 * stored.num_bytes == 2 * 3 * plane.num_bits(128, 32)
    found = restore(stored, plane).double()
    if not rank:
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:
        assert (found - x).norm() < (expected - x).norm()


def test_a_product_over_more_than_a_group() -> None:
    """Catches a product per group of tokens where a chunk of several was asked for."""
    plane = PlaneScheme(2, "channel", 16, rank=2, chunk=32)
    x = cached(tokens=64)
    stored = store(x, plane)
    assert stored.factors is not None
    assert stored.factors[0].shape == (2, 3, 2, 32, 2)
    assert 8 * stored.num_bytes == 2 * 3 * plane.num_bits(64, 32)
    plain = PlaneScheme(2, "channel", 16)
    left = (x - restore(store(x, plain), plain)).double().reshape(2, 3, 2, 32, 32)
    best = torch.linalg.svdvals(left)[..., 2:].square().sum().sqrt()
    assert (restore(stored, plane) - x).norm().item() == pytest.approx(best.item(), rel=1e-3)


def test_the_mean_of_a_chunk_is_taken_off() -> None:
    """Catches a mean over all chunks, one that is not put back, and bytes that are not counted."""
    x, plain = cached(tokens=128), PlaneScheme(4)
    x[..., 64:, 5] -= 20  # another mean in the second chunk
    plane = PlaneScheme(4, center=True)
    stored = store(x, plane)
    means = (
        torch.stack([part.mean(2) for part in torch.split(x.double(), 64, 2)], 2).half().double()
    )
    spread = means.repeat_interleave(64, 2)
    expected = by_hand((x - spread).float(), plain) + spread
    assert torch.allclose(restore(stored, plane).double(), expected, rtol=1e-5, atol=1e-5)
    assert 8 * stored.num_bytes == 2 * 3 * plane.num_bits(128, 32)
    errors = [(restore(store(x, p), p) - x).norm().item() for p in (plane, plain)]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("rank", [1, 4, 32, 99])
def test_the_product_is_the_best_of_its_rank(rank: int) -> None:
    """Catches V for Vh, singular values left out, one product for all heads (checklist 3)."""
    plain = PlaneScheme(2, "channel", 16)
    plane = PlaneScheme(2, "channel", 16, rank=rank)
    x = cached(tokens=32)
    left = (x - restore(store(x, plain), plain)).double()
    after = (x - restore(store(x, plane), plane)).double()
    chunks = left.reshape(2, 3, 2, 16, 32)
    sizes = torch.linalg.svdvals(chunks)
    best = sizes[..., rank:].square().sum((-1, -2)).sqrt()
    found = after.reshape(2, 3, 2, 16, 32).flatten(-2).norm(dim=-1).square().sum(-1).sqrt()
    assert torch.allclose(
        found, best, rtol=1e-3, atol=3e-3 * float(chunks.norm(dim=(-1, -2)).max())
    )
    assert 8 * store(x, plane).num_bytes == 2 * 3 * plane.num_bits(32, 32)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.25, -7.0, 1e-7, 6e4])
@each
def test_constant_tokens(plane: PlaneScheme, value: float) -> None:
    """Catches 0/0, an all-positive group against a zero point, a scale that is infinite in fp16."""
    x = torch.full((1, 2, 8, 24), value)
    found = restore(store(x, plane), plane)
    assert torch.allclose(found, x, rtol=2e-3, atol=0)


def test_a_broken_number_stays_visible_and_alone() -> None:
    """Catches a NaN that becomes a code, and one that spoils other heads or tokens."""
    x = cached()
    x[0, 1, 3, 7] = torch.nan
    for plane in (PlaneScheme(4), PlaneScheme(4, rank=2)):
        found = restore(
            store(
                cached(tokens=64).index_put(
                    (torch.tensor(0), torch.tensor(1), torch.tensor(3), torch.tensor(7)),
                    torch.tensor(torch.nan),
                ),
                plane,
            ),
            plane,
        )
        assert found[0, 1, 3].isnan().all()
        found[0, 1, 3] = 0
        assert not found.isnan().any()


@pytest.mark.parametrize("shape", [(1, 2, 0, 16), (0, 2, 4, 16)], ids=["no token", "no text"])
def test_empty(shape: tuple[int, ...]) -> None:
    """Catches the minimum of nothing."""
    for scheme in SCHEMES.values():
        for plane in (scheme.keys, scheme.values):
            x = torch.zeros(shape if plane.flush == 1 else (shape[0], 2, 0, 16))
            assert restore(store(x, plane), plane).shape == x.shape


def test_views_are_read_as_they_are() -> None:
    """Catches strides that are ignored: transposed, cut and expanded keys."""
    x, plane = cached(), PlaneScheme(4, group=8)
    wide = torch.randn(2, 16, 3, 40)
    wide[..., :32] = x.transpose(1, 2)
    for view in (wide.transpose(1, 2)[..., :32], x[:1].expand(2, -1, -1, -1)):
        assert torch.equal(
            restore(store(view, plane), plane), restore(store(view.contiguous(), plane), plane)
        )


BAD = {
    "bits": (lambda: PlaneScheme(1), "2 … 8 bits; not 1"),
    "one-token groups": (lambda: PlaneScheme(4, "channel", 1), "at least 2 tokens; not 1"),
    "no group": (lambda: PlaneScheme(4, "channel"), "at least 2 tokens; not None"),
    "center": (
        lambda: PlaneScheme(4, "channel", 8, center=True),
        "center goes with scales per token",
    ),
    "rank": (lambda: PlaneScheme(4, rank=-1), "a rank is 0 or more; not -1"),
    "sinks": (lambda: KVScheme(PlaneScheme(4), PlaneScheme(4), sinks=-1), "not -1 and 0"),
    "flush": (
        lambda: KVScheme(PlaneScheme(4, "channel", 32), PlaneScheme(4, "channel", 24)),
        "one must be a multiple",
    ),
    "part of a group": (
        lambda: store(cached(tokens=9), PlaneScheme(2, "channel", 8)),
        "no whole groups",
    ),
    "part of a chunk": (
        lambda: store(cached(tokens=9), PlaneScheme(2, rank=1)),
        "no whole chunks of 64",
    ),
    "shape": (lambda: store(torch.zeros(3, 4), PlaneScheme(4)), r"not torch.float32 \[3, 4\]"),
    "integers": (lambda: store(torch.zeros(1, 1, 2, 4).int(), PlaneScheme(4)), "takes floats"),
    "name": (
        lambda: scheme_named("int5"),
        "unknown KV scheme 'int5'; allowed are float16, bfloat16, int8",
    ),
    "after +": (lambda: scheme_named("int4+x"), "after \\+ comes highN.*not 'x'"),
    "twice": (lambda: scheme_named("int4+r4+r8"), "'int4\\+r4\\+r8': r is said twice"),
    "no page": (lambda: scheme_named("int4+top0"), "top0 chooses nothing; leave it out"),
    "floats, bits": (lambda: PlaneScheme(8, floats="float16"), "16 bits and no other option"),
    "floats, rank": (lambda: scheme_named("float16+r4"), "16 bits and no other option"),
    "floats, gain": (lambda: scheme_named("bfloat16+gain"), "floats have no gain"),
    "floats, pages": (lambda: scheme_named("float16+top4"), "floats have no pages"),
    "per chunk, groups": (lambda: PlaneScheme(8, "chunk", 32), "all of a head shares a scale"),
    "an empty chunk": (lambda: PlaneScheme(4, chunk=32), "nothing is shared by a chunk of 32"),
    "part of groups": (
        lambda: PlaneScheme(2, "channel", 32, rank=2, chunk=48),
        "48 tokens is no whole groups of 32",
    ),
    "pages": (
        lambda: KVScheme(PlaneScheme(4), PlaneScheme(4), top_pages=-1),
        "top pages are 0 or more, of at least 2 tokens; not -1 of 16",
    ),
    "pages and groups": (
        lambda: KVScheme(PlaneScheme(4, "channel", 24), PlaneScheme(4), top_pages=1),
        "keys are flushed by 24 tokens and values by 1, pages of 16: one must be a multiple",
    ),
}


@pytest.mark.parametrize(("make", "said"), BAD.values(), ids=BAD.keys())
def test_refused(make: object, said: str) -> None:
    """Catches a cache that is built all the same."""
    assert callable(make)
    with pytest.raises(ValueError, match=said):
        make()


STORED = [
    # sinks, window, flush, tokens, end
    (0, 0, 1, 0, 0), (0, 0, 1, 1, 1), (0, 0, 1, 17, 17), (0, 0, 32, 31, 0), (0, 0, 32, 32, 32),
    (0, 0, 32, 63, 32), (4, 0, 1, 3, 4), (4, 0, 1, 5, 5), (4, 16, 1, 20, 4), (4, 16, 1, 21, 5),
    (4, 16, 32, 51, 4), (4, 16, 32, 52, 36), (4, 16, 32, 84, 68),
]  # fmt: skip


@pytest.mark.parametrize(("sinks", "window", "flush", "tokens", "end"), STORED)
def test_what_is_stored_when(sinks: int, window: int, flush: int, tokens: int, end: int) -> None:
    """Catches a window that is off by one, and a part of a group that is flushed."""
    plane = PlaneScheme(4) if flush == 1 else PlaneScheme(4, "channel", flush)
    assert KVScheme(plane, plane, sinks, window).stored_end(tokens) == end


@pytest.mark.parametrize("name", [*SCHEMES, "int4+sinks4+window32", "kivi2+r2"])
def test_bits_per_element(name: str) -> None:
    """Catches a figure without scales, sinks or window: counted anew from stored bytes."""
    scheme, tokens = scheme_named(name), 200
    x = torch.randn(1, 1, tokens, 64)
    end = scheme.stored_end(tokens)
    stored = sum(
        store(x[..., scheme.sinks : end, :], plane).num_bytes
        for plane in (scheme.keys, scheme.values)
    )
    kept = 2 * 2 * 64 * (tokens - (end - scheme.sinks))
    expected = 8 * (stored + kept) / (2 * tokens * 64)
    assert math.isclose(scheme.bits_per_element(tokens, 64), expected)


def test_bits_of_compensation() -> None:
    """Catches pages, bounds, gains and high layers that cost nothing."""
    plain, tokens = scheme_named("int4-plain"), 160
    bits = plain.bits_per_element(tokens, 64)
    # 10 pages with two bounds of 16 bits per feature each, 4 pages of 16 keys fetched.
    extra = 16 * 64 * (2 * 10 + 4 * 16) / (2 * tokens * 64)
    pages = scheme_named("int4-plain+top4")
    assert pages.bits_per_element(tokens, 64) == pytest.approx(bits + extra)
    assert pages.host_bits_per_element(tokens) == 8
    assert plain.host_bits_per_element(tokens) == 0
    few = scheme_named("int4-plain+top99").bits_per_element(tokens, 64)
    assert few == pytest.approx(bits + 16 * (2 * 10 + 10 * 16) / (2 * tokens))
    gain = scheme_named("int4-plain+gain").bits_per_element(tokens, 64)
    assert gain == pytest.approx(bits + 2 * 16 / (2 * tokens))
    high = scheme_named("int4-plain+high0,1,9")
    assert high.bits_per_element(tokens, 64) == bits
    assert high.bits_per_element(tokens, 64, 8) == pytest.approx((2 * 16 + 6 * bits) / 8)


def test_the_policy_by_position() -> None:
    """Catches a policy whose first layer or first tokens are codes, or without its residual."""
    scheme = scheme_named("int8-policy")
    assert scheme.high_layers == (0,)
    assert (scheme.sinks, scheme.stored_end(4 + 64)) == (4, 68)
    assert (scheme.keys.bits, scheme.keys.rank, scheme.values.rank) == (8, 4, 4)


def test_options_by_name() -> None:
    """Catches a suffix that is lost, or one that changes another."""
    scheme = scheme_named("kivi2+high3,0+sinks4+window32+top2+r1+gain")
    assert scheme == KVScheme(
        PlaneScheme(2, "channel", 32, rank=1), PlaneScheme(2, "token", 32, rank=1),
        4, 32, (0, 3), 2, 16, True,
    )  # fmt: skip
    assert scheme_named("int4+high0,3").high_layers == (0, 3)
    assert scheme_named("kivi2") is SCHEMES["kivi2"]
