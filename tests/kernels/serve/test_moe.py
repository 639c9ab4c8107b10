"""Routing by rule, slots in blocks, and experts' products against a dense float64 loop."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from quantwatch_kernels.formats import INT4, INT8, INT_FORMATS
from quantwatch_kernels.quantize.activations import fake_quantize_input
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerGroup, PerTensor, Recipe
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.serve.moe_align import align_blocks
from quantwatch_kernels.serve.moe_experts import ExpertStack
from quantwatch_kernels.serve.moe_gemm import moe_gemm, moe_mlp
from quantwatch_kernels.serve.moe_router import Router, choose_experts, route
from quantwatch_kernels.testing import assert_close

BACKENDS = ["aten", "reference"]
# Name → weights, activations.
KINDS: dict[str, tuple[str, ActivationSpec | None]] = {
    "W4A16": ("int4-g32", None),
    "W4A16 asymmetric": ("uint4-g64", None),
    "W8A16": ("int8-channel", None),
    "W4A4": ("int4-g32", ActivationSpec(INT4)),
    "W4A4 in groups": ("int4-g32", ActivationSpec(INT4, PerGroup(64))),
    "W4A4 asymmetric": ("uint4-g32", ActivationSpec(INT_FORMATS["uint4"])),
    "W8A8": ("int8-channel", ActivationSpec(INT8)),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stack(kind: str, experts: int = 5, outputs: int = 24, inputs: int = 96) -> ExpertStack:
    name, activations = KINDS[kind]
    weight = drawn(experts, outputs, inputs, seed=9) * torch.logspace(-2, 1, experts)[:, None, None]
    return ExpertStack(weight, Recipe.named(name).weights, activations)


def dense(x: Tensor, ids: Tensor, experts: ExpertStack) -> Tensor:
    """Slot by slot, output by output, in float64 on what the codes stand for."""
    y = torch.zeros(*ids.shape, experts.shape[1], dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                given = x[token, j] if x.ndim == 3 else x[token]
                if experts.activations is not None:
                    given = fake_quantize_input(given[None].float(), experts.activations)[0]
                y[token, j] = experts.expert(expert).values.double() @ given.double()
    return y


# Routing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_weights_are_the_softmax_of_the_chosen(temperature: float, backend: str) -> None:
    """Renormalized top-k of softmax(z ÷ T) = softmax over the chosen z ÷ T; T is not after it."""
    x, weight = drawn(40, 16, seed=1), drawn(8, 16, seed=2)
    ids, weights = route(x, weight, Router(3, temperature), backend)
    logits = x.double() @ weight.double().T
    p = torch.softmax(logits / temperature, -1).gather(1, ids)
    assert weights.dtype == torch.float32
    rtol = 2e-6 * (1 + 1 / temperature)  # an error of a logit is divided, too
    assert_close(weights, p / p.sum(-1, keepdim=True), rtol=rtol)
    assert torch.equal(ids, logits.topk(3, -1).indices)
    _, shares = route(x, weight, Router(3, temperature, renormalize=False), backend)
    assert_close(shares, p, rtol=rtol)


def test_ties_take_the_lowest_id() -> None:
    """Catches topk's order, which is no promise: equal logits, equal at the border, all equal."""
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [5.0, 0.0, 5.0, 9.0], [-0.0, 0.0, -0.0, 0.0]]
    )
    ids, weights = choose_experts(logits, Router(2))
    assert ids.tolist() == [[1, 2], [0, 1], [3, 0], [0, 1]]
    assert torch.equal(weights[[0, 1, 3]], torch.full((3, 2), 0.5))
    many = torch.zeros(3, 256)
    assert choose_experts(many, Router(8))[0].tolist() == [list(range(8))] * 3


def test_float32_logits_of_16_bit_weights() -> None:
    """Catches logits in bfloat16: 256 and 257 tie there, and the expert flips (hipfire#171)."""
    x = torch.ones(1, 257, dtype=torch.bfloat16)
    weight = torch.zeros(2, 257, dtype=torch.bfloat16)
    weight[0, :256] = 1
    weight[1] = 1
    assert len(set((x @ weight.T)[0].tolist())) == 1
    ids, weights = route(x, weight, Router(1))
    assert ids.item() == 1
    assert weights.dtype == torch.float32
    with pytest.raises(ValueError, match="bfloat16"):
        choose_experts(torch.zeros(1, 2, dtype=torch.bfloat16), Router(1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([1e-3, 0.5, 1.0, 1e4]))
def test_temperature_never_changes_experts(seed: int, k: int, temperature: float) -> None:
    """Catches a choice among probabilities, which a small T makes equal zeros."""
    logits = drawn(7, 6, seed=seed) * 100
    ids, weights = choose_experts(logits, Router(k, temperature))
    assert torch.equal(ids, choose_experts(logits, Router(k))[0])
    assert_close(weights.sum(-1), torch.ones(7), rtol=1e-6)
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())
    assert all(len(set(row)) == k for row in ids.tolist())


def test_a_nan_stays_with_its_token() -> None:
    x, weight = drawn(3, 8), drawn(4, 8, seed=1)
    clean_ids, clean = route(x, weight, Router(2))
    x[1, 2] = torch.nan
    ids, weights = route(x, weight, Router(2))
    assert weights[1].isnan().all()
    assert torch.equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert torch.equal(weights[[0, 2]], clean[[0, 2]])
    one_bad = choose_experts(torch.tensor([[0.0, torch.nan, 5.0, 1.0]]), Router(1))[1]
    assert one_bad.isnan().all()


def test_masked_experts_weigh_nothing() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    ids, weights = choose_experts(logits, Router(2))
    assert ids.tolist() == [[1, 0]]
    assert weights.tolist() == [[1.0, 0.0]]


def test_the_router_of_a_model() -> None:
    """The same experts and weights as Qwen3-MoE's own module where nothing ties."""
    config = SimpleNamespace(
        num_experts_per_tok=2, num_experts=6, norm_topk_prob=True, hidden_size=16
    )
    module = Qwen3MoeTopKRouter(config)
    module.weight.data = drawn(6, 16, seed=3)
    x = drawn(20, 16, seed=4)
    _, scores, indices = module(x)
    ids, weights = route(x, module.weight.detach(), Router(2))
    assert torch.equal(ids, indices)
    assert_close(weights, scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (Router(0), "top_k must be in 1 … 4"),
        (Router(5), "it is 5"),
        (Router(2, 0.0), "temperature must be positive"),
        (Router(2, -1.0), "temperature"),
        (Router(2, float("nan")), "temperature"),
    ],
)
def test_bad_routers(router: Router, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        route(drawn(3, 8), drawn(4, 8), router)


@pytest.mark.parametrize("pair", [((3, 8), (4, 9)), ((8,), (4, 8)), ((1, 3, 8), (4, 8))], ids=str)
def test_bad_router_shapes(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"\[T, H\]"):
        route(drawn(*pair[0]), drawn(*pair[1]), Router(1))
    with pytest.raises(ValueError, match="int8"):
        route(drawn(3, 8), drawn(4, 8).to(torch.int8), Router(1))


# Blocks

IDS = st.integers(1, 6).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.integers(1, 3).flatmap(
            lambda k: st.lists(
                st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k), max_size=12
            )
        ),
        st.integers(1, 5),
    )
)


@settings(max_examples=120, deadline=None)
@given(IDS)
def test_every_slot_has_its_place(drawn_ids: tuple[int, list[list[int]], int]) -> None:
    """Each slot once, a block one expert's, in order, filled up by less than a block."""
    experts, rows, block = drawn_ids
    ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(rows[0]) if rows else 1)
    plan = align_blocks(ids, experts, block)
    flat, slots = ids.flatten().tolist(), plan.slots.tolist()
    assert len(slots) == len(plan.block_experts) * block == int(plan.first_row[-1])
    by_expert: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        expert = int(plan.block_experts[row // block])
        assert int(plan.first_row[expert]) <= row < int(plan.first_row[expert + 1])
        if slot < len(flat):
            assert flat[slot] == expert
            by_expert.setdefault(expert, []).append(slot)
        else:
            assert slot == len(flat)
    assert by_expert == {
        e: found for e in range(experts) if (found := [s for s, i in enumerate(flat) if i == e])
    }
    for expert in range(experts):
        filled = int(plan.first_row[expert + 1] - plan.first_row[expert]) - flat.count(expert)
        assert 0 <= filled < block


def test_a_plan_by_hand() -> None:
    plan = align_blocks(torch.tensor([[2, 0], [2, -1], [0, 2]], dtype=torch.int32), 4, 2)
    assert plan.slots.tolist() == [1, 4, 0, 2, 5, 6]
    assert plan.block_experts.tolist() == [0, 2, 2]
    assert plan.first_row.tolist() == [0, 2, 2, 6, 6]


@pytest.mark.parametrize(
    ("ids", "experts", "block", "words"),
    [
        (torch.tensor([[4]]), 4, 2, r"−1 … 3; these span 4 … 4"),
        (torch.tensor([[-2, 0]]), 4, 2, "these span -2"),
        (torch.tensor([[0.0]]), 4, 2, "int32 or int64"),
        (torch.tensor([[0]], dtype=torch.int8), 4, 2, "torch.int8"),
        (torch.tensor([0]), 4, 2, r"\[T, k\]"),
        (torch.tensor([[0]]), 4, 0, "block"),
    ],
)
def test_bad_ids(ids: Tensor, experts: int, block: int, words: str) -> None:
    """Catches id dtypes that wrap (300 experts in int8) and ids that read another expert."""
    with pytest.raises(ValueError, match=words):
        align_blocks(ids, experts, block)


# Products

ROUTES: dict[str, list[list[int]]] = {
    "mixed": [[0, 3], [3, 1], [4, 0], [0, 4], [1, 3], [3, 4], [0, 1]],
    "one expert gets all": [[3, 3]] * 7,
    "one token": [[4, 2]],
    "some elsewhere": [[0, -1], [-1, 2], [-1, -1], [1, 0]],
    "all elsewhere": [[-1, -1]] * 3,
    "a whole block": [[2, 2]] * 8,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTES)
def test_products(name: str, kind: str, backend: str) -> None:
    """Catches groups along the outputs (vllm#36008), slots mixed up, experts without tokens."""
    ids, experts = torch.tensor(ROUTES[name]), stack(kind)
    x = drawn(len(ids), 96, seed=5)
    y = moe_gemm(x, ids, experts, 16, backend)
    right = dense(x, ids, experts)
    assert y.shape == right.shape
    assert_close(y, right, rtol=0, atol=2e-6 * float(right.abs().max()) + 1e-30)
    assert not y[ids < 0].any()
    assert not fallbacks()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["W4A16", "W4A4"])
def test_products_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    """One rounding of the result: sums in float32, scales after them (vllm#33972)."""
    ids, experts = torch.tensor(ROUTES["mixed"]), stack(kind)
    x = (drawn(len(ids), 96, seed=5) * 50).to(dtype)
    right = dense(x, ids, experts)
    y = moe_gemm(x, ids, experts)
    assert y.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert_close(y, right, rtol=unit * 1.01, atol=2e-6 * float(right.abs().max()))


def test_a_row_for_each_expert() -> None:
    """The second product of an MLP: x[t, j] meets expert ids[t, j]."""
    ids, experts = torch.tensor(ROUTES["some elsewhere"]), stack("W8A16")
    x = drawn(4, 2, 96, seed=6)
    assert_close(moe_gemm(x, ids, experts), dense(x, ids, experts), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["W4A4", "W4A4 in groups", "W4A4 asymmetric", "W8A8"])
@pytest.mark.parametrize("block", [1, 4, 64])
def test_integer_products_depend_on_the_row_alone(kind: str, block: int) -> None:
    """Bit-equal in every batch and block: sums of codes are exact, so their order doesn't matter."""
    experts, x = stack(kind), drawn(9, 96, seed=7)
    ids = torch.tensor([[0, 1]] * 9)
    whole = moe_gemm(x, ids, experts, block)
    for token in range(9):
        assert torch.equal(moe_gemm(x[token : token + 1], ids[:1], experts)[0], whole[token])


def test_sums_beyond_float32_are_exact() -> None:
    """Codes around 127, K = 4099: sums beyond 2²⁴, one rounding at the end (Comfy-kitchen#133)."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randint(100, 128, shape, generator=generator).float()
        for shape in ((1, 8, 4099), (3, 4099))
    )
    weight[..., 0], x[:, 0] = 127, 127  # so that every scale is 1
    experts = ExpertStack(weight, Recipe.named("int8-channel").weights, ActivationSpec(INT8))
    y = moe_gemm(x, torch.zeros(3, 1, dtype=torch.int64), experts)
    exact = (x.long() @ weight[0].long().T).float()
    assert int(exact.min()) > 2**24
    assert torch.equal(y[:, 0], exact)


def test_short_last_group() -> None:
    """K = 65 with groups of 32: a last group of one (llm-compressor#1983)."""
    for kind in ("W4A16", "W4A4", "W4A4 in groups"):
        ids, experts = torch.tensor(ROUTES["mixed"]), stack(kind, inputs=65)
        assert experts.scales.shape == (5, 24, 3)
        x = drawn(len(ids), 65, seed=8)
        right = dense(x, ids, experts)
        assert_close(moe_gemm(x, ids, experts), right, rtol=0, atol=2e-6 * float(right.abs().max()))


def test_scales_lie_along_the_inputs() -> None:
    """Square experts whose inputs differ by a thousand: scales along outputs would lose the small ones."""
    weight = drawn(2, 64, 64, seed=3) * torch.logspace(-3, 0, 64)
    experts = ExpertStack(weight, Recipe.named("int4-g32").weights)
    assert experts.scales.shape == (2, 64, 2)
    values = experts.expert(1).values
    small = (values - weight[1])[:, :8].norm() / weight[1][:, :8].norm()
    assert float((values - weight[1]).norm() / weight[1].norm()) < 0.2
    assert float(small) <= 1.0
    assert torch.equal(experts.scales[1, :, 1], weight[1, :, 32:].abs().amax(-1) / 7)


def test_experts_without_tokens_are_not_read() -> None:
    """A NaN expert that nobody asks for reaches nobody; asked for, it gives NaN to its slots only."""
    weight = drawn(3, 8, 32, seed=1)
    weight[1, 2, 3] = torch.nan
    experts = ExpertStack(weight, Recipe.named("int8-channel").weights)
    x = drawn(4, 32, seed=2)
    quiet = moe_gemm(x, torch.tensor([[0, 2]] * 4), experts)
    assert quiet.isfinite().all()
    asked = moe_gemm(x, torch.tensor([[0, 2], [0, 1], [0, 2], [2, 0]]), experts)
    assert asked.isnan().nonzero().tolist() == [[1, 1, 2]]


def test_an_expert_is_unpacked_once_if_it_has_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches unpacking of experts without tokens, and once per token."""
    experts, unpacked = stack("W4A16"), list[int]()
    original = ExpertStack.expert

    def counted(self: ExpertStack, index: int) -> QuantizedWeight:
        unpacked.append(index)
        return original(self, index)

    monkeypatch.setattr(ExpertStack, "expert", counted)
    moe_gemm(drawn(7, 96), torch.tensor([[3, 1]] * 6 + [[-1, 3]]), experts, 2)
    assert unpacked == [1, 3]


def test_a_nan_token_stays_in_its_slots() -> None:
    for kind in KINDS:
        x = drawn(4, 96, seed=2)
        x[2, 5] = torch.nan
        y = moe_gemm(x, torch.tensor([[0, 1]] * 4), stack(kind))
        assert y[2].isnan().all(), kind
        assert y[[0, 1, 3]].isfinite().all(), kind


def test_dead_experts_give_zeros() -> None:
    """Zero weights: scale 1, finite, exact zeros (flashinfer#2595)."""
    for name, activations in KINDS.values():
        experts = ExpertStack(torch.zeros(2, 4, 64), Recipe.named(name).weights, activations)
        assert experts.scales.isfinite().all()
        assert not moe_gemm(drawn(3, 64), torch.tensor([[0, 1]] * 3), experts).any()


def test_no_token() -> None:
    empty = moe_gemm(torch.zeros(0, 96), torch.zeros(0, 2, dtype=torch.int64), stack("W4A4"))
    assert empty.shape == (0, 2, 24)


def test_bytes_are_counted() -> None:
    """5 experts · 24 · (96 · 4 ÷ 8 codes + 3 scales of 4 bytes)."""
    assert stack("W4A16").num_bytes == 5 * 24 * (48 + 3 * 4)


@pytest.mark.parametrize("kind", ["W4A16", "W8A8"])
def test_mlp_of_a_model(kind: str) -> None:
    """Qwen3-MoE's own experts on the quantized weights give the same; −1 adds nothing."""
    name, activations = KINDS[kind]
    spec = Recipe.named(name).weights
    gate_up = ExpertStack(drawn(4, 40, 32, seed=1) / 6, spec, activations)
    down = ExpertStack(drawn(4, 32, 20, seed=2) / 5, spec, activations)
    config: Any = SimpleNamespace(
        num_experts=4,
        hidden_size=32,
        moe_intermediate_size=20,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    module = Qwen3MoeExperts(config)
    module.gate_up_proj.data = torch.stack([gate_up.expert(e).values for e in range(4)])
    module.down_proj.data = torch.stack([down.expert(e).values for e in range(4)])
    x = drawn(6, 32, seed=3)
    ids, weights = route(x, drawn(4, 32, seed=4), Router(2))
    y = moe_mlp(x, (ids, weights), gate_up, down)
    with torch.no_grad():
        right = module(x, ids, weights)
    assert_close(
        y, right, rtol=0, atol=(1e-6 if activations is None else 0.03) * float(right.abs().max())
    )
    # Every token loses its second expert; its weight, even a NaN, has no effect.
    elsewhere, lost = ids.clone(), weights.clone()
    elsewhere[:, 1], lost[:, 1] = -1, torch.nan
    alone = moe_mlp(x, (elsewhere, lost), gate_up, down)
    assert_close(
        alone, moe_mlp(x, (ids[:, :1], weights[:, :1]), gate_up, down), rtol=1e-6, atol=1e-7
    )


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no stack": (lambda: ExpertStack(drawn(4, 8), Recipe.named("int4-g32").weights), r"\[E, N, K\]"),
    "no expert": (lambda: ExpertStack(drawn(0, 4, 8), Recipe.named("int4-g32").weights), "none of them 0"),
    "codes as weights": (lambda: ExpertStack(torch.ones(1, 2, 8).to(torch.int8), Recipe.named("int4-g32").weights), "int8"),
    "tokens mixed": (lambda: ExpertStack(drawn(1, 2, 8), Recipe.named("int4-g32").weights, ActivationSpec(INT8, PerTensor())), "others mix tokens"),
    "groups that cut": (lambda: ExpertStack(drawn(1, 2, 96), Recipe.named("int4-g32").weights, ActivationSpec(INT4, PerGroup(48))), "32 weights and of 48 inputs don't nest"),
    "width": (lambda: moe_gemm(drawn(2, 95), torch.zeros(2, 1).long(), stack("W4A16")), "96 inputs"),
    "tokens": (lambda: moe_gemm(drawn(3, 96), torch.zeros(2, 1).long(), stack("W4A16")), r"\[3, 96\]"),
    "slots": (lambda: moe_gemm(drawn(2, 3, 96), torch.zeros(2, 2).long(), stack("W4A16")), r"\[2, 3, 96\]"),
    "id": (lambda: moe_gemm(drawn(2, 96), torch.full((2, 1), 5), stack("W4A16"), 4, "reference"), "−1 … 4"),
    "weights": (lambda: moe_mlp(drawn(2, 96), (torch.zeros(2, 2).long(), torch.zeros(2, 1)), stack("W4A16"), stack("W4A16")), "weights must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        call()
