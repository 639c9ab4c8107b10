"""The layers that gpu.py and gpu_speed.py look at."""

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear


def drawn(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def w8a8(outputs: int, inputs: int, device: str) -> W8A8Linear:
    weight = drawn(outputs, inputs, device="cpu", seed=1)
    made = quantize_weight(weight, Recipe.named("int8-channel").weights)
    return W8A8Linear(
        made, nn.Parameter(drawn(outputs, device="cpu", seed=2)), backend="triton"
    ).to(device)


def int4(outputs: int, inputs: int, device: str, name: str = "uint4-g64") -> PackedLinear:
    weight = drawn(outputs, inputs, device="cpu", seed=1) + 0.3
    made = quantize_weight(weight, Recipe.named(name).weights)
    bias = nn.Parameter(drawn(outputs, device="cpu", seed=2))
    return PackedLinear(made, bias, INT4_LINEAR, "triton").to(device)
