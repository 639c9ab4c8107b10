"""A stack of experts' quantized matrices: packed codes, scales and zeros, one set per expert.

Codes are uint8 [E, N, ⌈K · bits ÷ 8⌉], scales [E, N, G] with groups along **K**, the dimension that
is summed over: scales along N would leave a sum of products with different scales (vllm#36008).
Each expert is quantized as a layer of its own; an expert of zeros has scale 1 and stays exact zeros
(flashinfer#2595). `activations` says how the rows that meet these weights are rounded; None: not.
"""

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, quantize_weight
from quantwatch_kernels.quantize.packing import pack, unpack
from quantwatch_kernels.quantize.qparams import QParams
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, WeightSpec

__all__ = ["ExpertStack"]


class ExpertStack(nn.Module):
    """Experts [E, N, K] in a format of 2 to 8 bits.

    Raises ValueError for a weight that isn't floating [E, N, K], scales that don't lie along K, and
    activations whose scales belong to no single row.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(
        self, weight_ENK: Tensor, spec: WeightSpec, activations: ActivationSpec | None = None
    ) -> None:
        """Quantize to nearest, expert by expert."""
        super().__init__()
        if weight_ENK.ndim != 3 or not weight_ENK.is_floating_point() or not weight_ENK.numel():
            raise ValueError(
                "experts must be floating [E, N, K], none of them 0; they are "
                f"{weight_ENK.dtype} {list(weight_ENK.shape)}."
            )
        if spec.zero == "float" or spec.scales == "stepped" or spec.rounding == "stochastic":
            raise ValueError(f"experts take plain scales and whole zeros, not {spec.to_json()}.")
        _check_inputs(activations, spec, weight_ENK.shape[2])
        made = [quantize_weight(weight, spec) for weight in weight_ENK]
        self.spec, self.activations = spec, activations
        self.in_features = weight_ENK.shape[2]
        self.register_buffer("packed", torch.stack([pack(m.codes, spec.format) for m in made]))
        self.register_buffer("scales", torch.stack([m.qparams.scales for m in made]))
        zeros = [m.qparams.zeros for m in made if m.qparams.zeros is not None]
        self.register_buffer("zeros", torch.stack(zeros) if zeros else None)
        groups = -(-self.in_features // self.group_size)
        wanted = (*weight_ENK.shape[:2], groups)
        if tuple(self.scales.shape) != wanted:
            raise ValueError(f"scales must be {list(wanted)}; they are {list(self.scales.shape)}.")

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return min(self.in_features, self.spec.granularity.group_size(self.in_features))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        return self.packed.shape[0], self.packed.shape[1], self.in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        held = (self.packed, self.scales, self.zeros)
        return sum(each.numel() * each.element_size() for each in held if each is not None)

    def expert(self, index: int) -> QuantizedWeight:
        """Return one expert, unpacked."""
        codes = unpack(self.packed[index], self.spec.format, self.in_features)
        zeros = None if self.zeros is None else self.zeros[index]
        return QuantizedWeight(codes, QParams(self.scales[index], zeros), self.spec)


def _check_inputs(activations: ActivationSpec | None, spec: WeightSpec, columns: int) -> None:
    """Refuse scales of inputs that mix tokens, and groups that cut those of the weights."""
    if activations is None:
        return
    if activations.static or isinstance(activations.granularity, PerTensor):
        raise ValueError("expert inputs are scaled per token, dynamically; others mix tokens.")
    inputs, weights = (each.granularity.group_size(columns) for each in (activations, spec))
    if max(inputs, weights) < columns and inputs % weights and weights % inputs:
        raise ValueError(f"groups of {weights} weights and of {inputs} inputs don't nest.")
