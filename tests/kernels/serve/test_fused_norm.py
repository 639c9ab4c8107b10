"""add + RMSNorm and act · mul: values, both castings, int8 codes, and gradients in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quantwatch_kernels.quantize.row_codes import quantize_rows_by_rule
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.serve.fused_act import ACTIVATIONS, Activation, act_mul, act_mul_quantize
from quantwatch_kernels.serve.fused_norm import (
    Casting,
    Norm,
    add_rms_norm,
    add_rms_norm_quantize,
)
from quantwatch_kernels.testing import VIEWS, assert_close

SHAPES = [(1, 576), (3, 1), (5, 43), (2, 3, 96), (0, 16), (7,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASTINGS: list[Casting] = ["llama", "gemma"]


def rounding(dtype: torch.dtype, times: int) -> float:
    """Relative error of so many roundings to a dtype, after a few of the wide statistics."""
    wide = 3e-7 if dtype != torch.float64 else 1e-15
    return (
        wide
        if dtype in (torch.float32, torch.float64)
        else (1 + torch.finfo(dtype).eps / 2) ** times - 1 + wide
    )


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def right_norm(summed: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Row by row in float64, from the definition."""
    rows = summed.double().reshape(-1, summed.shape[-1])
    factor = weight.double() + (norm.casting == "gemma")
    done = [row / ((row @ row) / len(row) + norm.eps) ** 0.5 * factor for row in rows]
    return torch.stack(done).view(summed.shape) if done else summed.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_norm(backend: str, shape: tuple[int, ...], casting: Casting, dtype: torch.dtype) -> None:
    """Catches ε outside the root, a weight without 1 +, statistics in 16 bits, an unrounded sum."""
    x, residual = drawn(*shape, dtype=dtype, seed=1) * 3, drawn(*shape, dtype=dtype, seed=2)
    weight, norm = drawn(shape[-1], dtype=dtype, seed=3), Norm(0.1, casting)
    y, summed = add_rms_norm(x, residual, weight, norm, backend)
    assert torch.equal(summed, x + residual)
    assert y.dtype == summed.dtype == dtype
    expected = right_norm(summed, weight, norm)
    # In 16 bits a product may fall below the normal numbers, where the step is absolute.
    rtol = rounding(dtype, 2 if casting == "llama" and backend == "aten" else 1)
    assert_close(y, expected, rtol=rtol, atol=torch.finfo(dtype).smallest_normal)
    alone, same = add_rms_norm(summed, None, weight, norm, backend)
    assert torch.equal(alone, y)
    assert same is summed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("casting", "kind"), [("llama", LlamaRMSNorm), ("gemma", GemmaRMSNorm)])
def test_bits_of_the_models_norms(
    casting: Casting, kind: type[nn.Module], dtype: torch.dtype
) -> None:
    """Catches a casting that is only nearly the family's: same bits in every dtype."""
    module = kind(64, eps=1e-6).to(dtype)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    weight.data.copy_(drawn(64, seed=3))
    x, residual = drawn(9, 64, dtype=dtype, seed=1), drawn(9, 64, dtype=dtype, seed=2)
    y, _ = add_rms_norm(x, residual, weight, Norm(1e-6, casting))
    assert torch.equal(y, module(x + residual))


def test_epsilon_is_inside_the_root() -> None:
    """Rows of zeros give zeros; tiny rows are damped by √ε, not by ε."""
    weight = torch.ones(4)
    assert torch.equal(
        add_rms_norm(torch.zeros(2, 4), None, weight, Norm(1e-6))[0], torch.zeros(2, 4)
    )
    y, _ = add_rms_norm(torch.full((1, 4), 1e-8), None, weight, Norm(1e-6))
    assert y[0, 0].item() == pytest.approx(1e-8 / 1e-3, rel=1e-4)


def test_statistics_are_float32_in_float16() -> None:
    """Catches squares that overflow float16: 300² is beyond 65504."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    y, _ = add_rms_norm(x, None, torch.ones(8, dtype=torch.float16), Norm(1e-6))
    assert torch.equal(y, torch.ones(1, 8, dtype=torch.float16))


def test_a_float32_weight_promotes_as_in_the_model() -> None:
    module = LlamaRMSNorm(8)
    x = drawn(2, 8, dtype=torch.bfloat16)
    y, _ = add_rms_norm(x, None, module.weight.detach(), Norm(1e-6))
    assert y.dtype == module(x).dtype == torch.float32
    assert torch.equal(y, module(x))


def test_a_bad_token_stays_alone() -> None:
    """Catches a NaN or infinity that reaches another token."""
    x = drawn(4, 16)
    clean, _ = add_rms_norm(x, None, torch.ones(16), Norm(1e-6))
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y, _ = add_rms_norm(x, None, torch.ones(16), Norm(1e-6))
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert y[1].isnan().all()
    assert y[2, 5].isnan()
    codes, scales, _ = add_rms_norm_quantize(x, None, torch.ones(16), Norm(1e-6))
    assert scales.flatten().isnan().tolist() == [False, True, True, False]
    assert not codes[1].any()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("casting", CASTINGS)
def test_codes_are_those_of_the_two_steps(casting: Casting, dtype: torch.dtype) -> None:
    """Catches a fused quantize that takes the unrounded value: other codes than unfused (vllm#44694)."""
    x, residual = drawn(17, 96, dtype=dtype, seed=1), drawn(17, 96, dtype=dtype, seed=2)
    x[4], residual[4] = 0, 0
    weight, norm = drawn(96, dtype=dtype, seed=3), Norm(1e-5, casting)
    y, summed = add_rms_norm(x, residual, weight, norm)
    codes, scales, same = add_rms_norm_quantize(x, residual, weight, norm)
    rows = quantize_rows_by_rule(y)
    assert torch.equal(codes, rows.codes)
    assert torch.equal(scales, rows.scales)
    assert torch.equal(same, summed)
    gate, up = act_mul(x, residual), act_mul_quantize(x, residual)
    assert torch.equal(up[0], quantize_rows_by_rule(gate).codes)


def test_quantized_shapes() -> None:
    x = drawn(2, 3, 8)
    codes, scales, _ = add_rms_norm_quantize(x, None, torch.ones(8), Norm(1e-6))
    assert (codes.shape, codes.dtype, scales.shape) == ((2, 3, 8), torch.int8, (2, 3, 1))
    assert act_mul_quantize(x[:0], x[:0])[1].shape == (0, 3, 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from(CASTINGS))
def test_scale_invariance(seed: int, width: int, casting: Casting) -> None:
    """With ε = 0 a power of two leaves every bit; each row depends on itself alone."""
    x, weight, norm = drawn(5, width, seed=seed), drawn(width, seed=1), Norm(0.0, casting)
    y, _ = add_rms_norm(x, None, weight, norm)
    assert torch.equal(add_rms_norm(x * 2**20, None, weight, norm)[0], y)
    assert torch.equal(add_rms_norm(x[2:3], None, weight, norm)[0], y[2:3])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [64, 1536])
def test_a_row_of_whole_vectors_depends_on_itself_alone(width: int, activation: Activation) -> None:
    """Catches results that change with the batch: the monitor compares batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        gate, up = drawn(33, width, seed=1), drawn(33, width, seed=2)
        whole = act_mul(gate, up, activation)
        for rows in (slice(0, 1), slice(32, 33), slice(5, 12)):
            assert torch.equal(act_mul(gate[rows], up[rows], activation), whole[rows])
    finally:
        torch.set_num_threads(threads)


Graph = Callable[..., Tensor]


def gradients(graph: Graph, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    loss: Any = graph(*leaves)
    loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def norm_graph(casting: Casting, fused: bool) -> Graph:
    """A loss through both results, so that the sum's own gradient is in it."""

    def graph(x: Tensor, residual: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if fused:
            y, summed = add_rms_norm(x, residual, weight, Norm(0.01, casting))
        else:
            summed = x + residual
            factor = weight + (casting == "gemma")
            y = factor * summed / (summed.square().mean(-1, keepdim=True) + 0.01).sqrt()
        return (y * a).sum() + (summed * b).sum()

    return graph


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("shape", [(1, 1), (6, 42), (2, 3, 123), (5,)], ids=str)
def test_norm_backward(shape: tuple[int, ...], casting: Casting) -> None:
    """Against autograd through the definition in float64; float32 differs by roundings only."""
    inputs = [
        drawn(*shape, seed=1),
        drawn(*shape, seed=2),
        drawn(shape[-1], seed=3),
        drawn(*shape, seed=4),
        drawn(*shape, seed=5),
    ]
    right = gradients(norm_graph(casting, False), inputs, torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 3e-6)):
        found = gradients(norm_graph(casting, True), inputs, dtype)
        for ours, expected in zip(found, right, strict=True):
            assert_close(
                ours, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
            )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_backward(activation: Activation) -> None:
    inputs = [drawn(6, 43, seed=1) * 4, drawn(6, 43, seed=2), drawn(6, 43, seed=3)]

    def right(gate: Tensor, up: Tensor, a: Tensor) -> Tensor:
        if activation == "silu":
            value = gate * torch.sigmoid(gate)
        else:
            value = torch.nn.functional.gelu(gate, approximate="tanh")
        return (value * up * a).sum()

    def ours(gate: Tensor, up: Tensor, a: Tensor) -> Tensor:
        return (act_mul(gate, up, activation) * a).sum()

    expected = gradients(right, inputs, torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 3e-6)):
        for found, best in zip(gradients(ours, inputs, dtype), expected, strict=True):
            assert_close(found, best, rtol=tolerance, atol=tolerance)


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps of a forward, each tensor once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result is not None
    return sum(kept.values())


def test_backward_keeps_less() -> None:
    """bfloat16 [64, 96]: the sum, the weight and a number per token; gate and up. No float32 copy."""
    x, residual = (drawn(64, 96, dtype=torch.bfloat16, seed=s).requires_grad_() for s in (1, 2))
    module = LlamaRMSNorm(96).to(torch.bfloat16)
    ours = saved_bytes(lambda: add_rms_norm(x, residual, module.weight, Norm(1e-6)))
    theirs = saved_bytes(lambda: module(x + residual))
    assert ours == 64 * 96 * 2 + 96 * 2 + 64 * 4
    assert theirs == ours + 64 * 96 * 4
    product = saved_bytes(lambda: act_mul(x, residual))
    unfused = saved_bytes(lambda: torch.nn.functional.silu(x) * residual)
    assert product == 2 * 64 * 96 * 2
    assert unfused == 3 * 64 * 96 * 2


@pytest.mark.parametrize("casting", CASTINGS)
def test_gradcheck(casting: Casting) -> None:
    """By finite differences, which know no formula."""
    x, weight = drawn(2, 5, dtype=torch.float64, seed=1), drawn(5, dtype=torch.float64, seed=2)
    leaves = tuple(t.requires_grad_() for t in (x, drawn(2, 5, dtype=torch.float64), weight))
    assert torch.autograd.gradcheck(
        lambda a, b, w: add_rms_norm(a, b, w, Norm(0.01, casting)), leaves
    )
    for activation in ACTIVATIONS:
        assert torch.autograd.gradcheck(lambda g, u, k=activation: act_mul(g, u, k), leaves[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_act(backend: str, activation: Activation, dtype: torch.dtype) -> None:
    """One rounding of the exact value, tails included."""
    gate = torch.cat(
        [drawn(4, 33, seed=1) * 5, torch.full((1, 33), -80.0), torch.full((1, 33), 80.0)]
    ).to(dtype)
    up = drawn(6, 33, dtype=dtype, seed=2)
    g = gate.double()
    if activation == "silu":
        value = g / (1 + (-g).exp())
    else:
        value = 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
    y = act_mul(gate, up, activation, backend)
    assert y.dtype == dtype
    # tanh near −1: what is left of 1 + tanh is rounded, absolutely, at the size of the gate.
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    floor = 40 * wide if activation == "gelu_tanh" else torch.finfo(dtype).smallest_normal
    rtol = max(torch.finfo(dtype).eps / 2, 4 * wide) * 1.01
    assert_close(y, value * up.double(), rtol=rtol, atol=floor)


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    """Catches ignored strides and in-place work on what belongs to the caller."""
    x, residual = VIEWS[view](drawn(6, 40, seed=1)), VIEWS[view](drawn(6, 40, seed=2))
    kept = x.clone(), residual.clone()
    y, summed = add_rms_norm(x, residual, torch.ones(40), Norm(1e-6))
    assert torch.equal(y, add_rms_norm(kept[0], kept[1], torch.ones(40), Norm(1e-6))[0])
    assert torch.equal(act_mul(x, residual), act_mul(*kept))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert summed.shape == x.shape
    assert not fallbacks()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: add_rms_norm(torch.ones(2, 3), None, torch.ones(4), Norm(1e-6)), r"\[4\]"),
        (lambda: add_rms_norm(torch.ones(2, 0), None, torch.ones(0), Norm(1e-6)), "K > 0"),
        (lambda: add_rms_norm(torch.ones(2, 3).int(), None, torch.ones(3), Norm(1e-6)), "floating"),
        (lambda: add_rms_norm(torch.ones(2, 3), torch.ones(1, 3), torch.ones(3), Norm(1e-6)), "residual"),
        (lambda: add_rms_norm(torch.ones(2, 3), torch.ones(2, 3).half(), torch.ones(3), Norm(1e-6)), "residual"),
        (lambda: add_rms_norm(torch.ones(2, 3), None, torch.ones(3), Norm(-1.0)), "eps"),
        (lambda: add_rms_norm(torch.ones(2, 3), None, torch.ones(3), Norm(1e-6, "t5")), "llama or gemma"),  # type: ignore[arg-type]
        (lambda: add_rms_norm(torch.ones(2, 3), None, torch.ones(3), Norm(1e-6), "cuda"), "no back end 'cuda'"),
        (lambda: act_mul(torch.ones(2, 3), torch.ones(2, 4)), "gate and up"),
        (lambda: act_mul(torch.ones(2, 3), torch.ones(2, 3), "relu"), "'relu' is none of silu"),  # type: ignore[arg-type]
        (lambda: act_mul_quantize(torch.ones(1, 3, requires_grad=True), torch.ones(1, 3)), "no gradient"),
        (lambda: add_rms_norm_quantize(torch.ones(1, 3), None, torch.ones(3, requires_grad=True), Norm(0.1)), "no gradient"),
    ],
)  # fmt: skip
def test_bad_input(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
