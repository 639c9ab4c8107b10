"""Inputs and twins of the mixture of experts: routing with many ties, and the experts' products.

Routing gets inputs and weights in eighths: every logit is exact in float32, so ids must be equal,
and many logits tie, so the rule for ties is tested. The products' twin multiplies what the codes
stand for, one slot at a time in float64; errors are measured against Σ|x·w|. Expert 1 of 4 has no
token, and every fifth slot is on another device.
"""

from functools import partial

import torch
from torch import Generator, Tensor

from quantwatch_kernels.conformance.case import LAYOUTS, Ask, Made, OpCase
from quantwatch_kernels.formats import INT4
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerGroup, Recipe
from quantwatch_kernels.serve.moe_experts import ExpertStack
from quantwatch_kernels.serve.moe_gemm import MOE_GEMM
from quantwatch_kernels.serve.moe_router import MOE_ROUTE, Router

__all__ = ["moe_cases"]

_ROUTED = ((1, 8, 64), (17, 6, 33), (5, 64, 96), (0, 4, 16))
"""(tokens, experts, inputs)"""
_PRODUCTS = ((1, 24, 64), (7, 33, 96), (5, 16, 65), (0, 8, 32))
"""(tokens, outputs, inputs)"""
_EXPERTS, _TOP, _BLOCK = 4, 2, 4
_WEIGHTS = 2.4e-7
"""Of a softmax in float32: twice the largest error measured."""
# One rounding of the result; in float32, where all of it rounds, twice the largest error measured.
_TOLERANCE = {torch.float32: 2.8e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def moe_cases() -> tuple[OpCase, ...]:
    """Return routing with and without renormalized weights, and three kinds of experts."""
    routers = {"renormalized": Router(2, 0.5), "share of all": Router(3, 2.0, renormalize=False)}
    routed = (
        OpCase(MOE_ROUTE, name, partial(_routed, router), lambda _b, _d: _WEIGHTS, _ROUTED)
        for name, router in routers.items()
    )
    kinds = {
        "int8-channel": None,
        "uint4-g32": None,
        "int4-g32": ActivationSpec(INT4),
        "int4-g64": ActivationSpec(INT4, PerGroup(32)),
    }
    products = (
        OpCase(
            MOE_GEMM,
            f"{name}, {'A16' if inputs is None else 'A4'}",
            partial(_products, name, inputs),
            lambda _b, dtype: _TOLERANCE[dtype],
            _PRODUCTS,
        )
        for name, inputs in kinds.items()
    )
    return *routed, *products


def _routed(router: Router, ask: Ask) -> Made:
    tokens, experts, inputs = ask.shape
    generator = Generator().manual_seed(1)

    def eighths(*shape: int) -> Tensor:
        drawn = torch.randint(-8, 9, shape, generator=generator) / 8
        return LAYOUTS[ask.layout](drawn.to(ask.device, ask.dtype))

    x, weight = eighths(tokens, inputs), eighths(experts, inputs)
    logits = x.double() @ weight.double().T
    # Ids by hand: of equal logits the one with the lower id is larger by less than any step.
    order = logits - torch.arange(experts, device=x.device) * 2.0**-20
    ids = order.topk(router.top_k, -1).indices
    odds = (logits / router.temperature).exp()
    chosen = odds.gather(1, ids)
    weights = chosen / (chosen if router.renormalize else odds).sum(-1, keepdim=True)
    return Made((x, weight, router), (ids, weights), (torch.full_like(weights, 1e-9), weights))


def _products(name: str, inputs: ActivationSpec | None, ask: Ask) -> Made:
    tokens, outputs, columns = ask.shape
    x = ask.randn(tokens, columns, seed=1)
    generator = Generator().manual_seed(2)
    drawn = torch.randn(_EXPERTS, outputs, columns, generator=generator) * 0.05 + 0.01
    drawn[2, outputs // 2] = 0.0
    stack = ExpertStack(drawn, Recipe.named(name).weights, inputs).to(ask.device)
    slots = torch.arange(tokens * _TOP)
    ids = torch.tensor([0, 2, 3])[slots % 3].masked_fill(slots % 5 == 4, -1)
    rows = x.double() if inputs is None else _rounded(x.float(), inputs)
    weights = torch.stack([stack.expert(e).values.double() for e in range(_EXPERTS)])
    of_slots = weights[ids.to(ask.device).clamp(min=0)]
    taken = rows.repeat_interleave(_TOP, 0)[..., None]
    there = (ids >= 0).to(ask.device)[:, None]
    values, sizes = (
        (w @ r)[..., 0] * there for w, r in ((of_slots, taken), (of_slots.abs(), taken.abs()))
    )
    shape = (tokens, _TOP, outputs)
    args = (x, ids.view(tokens, _TOP).to(ask.device), stack, _BLOCK)
    return Made(args, (values.view(shape),), (sizes.view(shape),))


def _rounded(x: Tensor, inputs: ActivationSpec) -> Tensor:
    """Round rows by the declared rule in float32: absmax ÷ 7 of a row, or of 32 inputs of it."""
    parts = torch.split(x, 32, -1) if isinstance(inputs.granularity, PerGroup) else [x]
    done = []
    for part in parts:
        scales = part.abs().amax(-1, keepdim=True) / 7
        scales[scales == 0] = 1.0
        done.append((part / scales).round().clamp(-7, 7).double() * scales.double())
    return torch.cat(done, -1)
