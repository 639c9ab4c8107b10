"""The shared expert of Qwen-MoE: every token goes there, weighed by a gate of its own.

y = Σ_j w_j · expert_j(x) + σ(x · g) · shared(x). The gate g [1, H] chooses nothing, so a coarse
logit flips no expert; but it scales a whole output, and is taken in float32 like the router's.
DeepSeek's shared experts have no gate: there the outputs are just added.
"""

import torch
from torch import Tensor

__all__ = ["add_shared", "shared_gate"]


def shared_gate(x_TH: Tensor, gate_1H: Tensor) -> Tensor:
    """Return σ(x · g), float32 [T, 1]. Raises ValueError for shapes that don't fit."""
    if x_TH.ndim != 2 or tuple(gate_1H.shape) != (1, x_TH.shape[1]):
        raise ValueError(
            f"shared_gate: x must be [T, H] and the gate [1, H]; they are {list(x_TH.shape)} and "
            f"{list(gate_1H.shape)}."
        )
    return torch.sigmoid(x_TH.float() @ gate_1H.float().T)


def add_shared(routed_TH: Tensor, shared_TH: Tensor, gate_T1: Tensor) -> Tensor:
    """Return routed + gate · shared, summed in float32 and rounded to the dtype of `routed` once.

    Raises ValueError for shapes that don't fit.
    """
    if routed_TH.shape != shared_TH.shape or gate_T1.shape != (*routed_TH.shape[:-1], 1):
        raise ValueError(
            f"add_shared: {list(routed_TH.shape)} and {list(shared_TH.shape)} with gates "
            f"{list(gate_T1.shape)} don't fit."
        )
    return (routed_TH.float() + gate_T1.float() * shared_TH.float()).to(routed_TH.dtype)
