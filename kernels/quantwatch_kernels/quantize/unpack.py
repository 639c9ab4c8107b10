"""A packed model as a float one: the quantized values, w = (q − z)·s, as ordinary layers.

For whoever computes in floats anyway and wants the model's own layers back: the memory is that of
the float model. A head tied to its embedding shares the parameter again. Marks of another basis
(`basis`) go along.
"""

import torch
from torch import nn

from quantwatch_kernels.quantize.affine import within_range
from quantwatch_kernels.quantize.basis import carry_marks
from quantwatch_kernels.quantize.packed_embedding import PackedEmbedding, TiedHead
from quantwatch_kernels.quantize.packed_linear import PackedLinear

__all__ = ["unpack_"]


def unpack_(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace packed layers by float ones with the quantized values, tied pairs sharing theirs."""
    heads = {path: m for path, m in model.named_modules() if isinstance(m, TiedHead)}
    unpacked: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedLinear):
            continue
        weight = nn.Parameter(within_range(module.quantized().values, dtype), requires_grad=False)
        unpacked[id(module)] = weight
        twin = (
            _embedding(weight) if isinstance(module, PackedEmbedding) else _linear(weight, module)
        )
        carry_marks(module, twin)
        model.set_submodule(path, twin.train(model.training))
    for path, head in heads.items():
        twin = _linear(unpacked[id(head.embedding)], head)
        carry_marks(head, twin)
        model.set_submodule(path, twin.train(model.training))


def _embedding(weight: nn.Parameter) -> nn.Embedding:
    embedding = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    embedding.weight = weight
    return embedding


def _linear(weight: nn.Parameter, module: nn.Module) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    linear.register_parameter(
        "bias", module.get_parameter("bias") if module.bias is not None else None
    )
    return linear
