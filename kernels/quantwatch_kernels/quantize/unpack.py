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

__all__ = ["float_twin", "unpack_", "unpacked_weight"]


def unpack_(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace packed layers by float ones with the quantized values, tied pairs sharing theirs."""
    heads = {path: m for path, m in model.named_modules() if isinstance(m, TiedHead)}
    unpacked: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, PackedLinear):
            continue
        weight = unpacked_weight(module, dtype)
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


def unpacked_weight(module: PackedLinear, dtype: torch.dtype) -> nn.Parameter:
    """Return the quantized values of a packed layer [out, in]."""
    return nn.Parameter(within_range(module.quantized().values, dtype), requires_grad=False)


def float_twin(module: PackedLinear, dtype: torch.dtype) -> nn.Linear:
    """Return the float layer of a packed one, its weight without values (on meta)."""
    shape = (module.out_features, module.in_features)
    weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    twin = _linear(weight, module)
    carry_marks(module, twin)
    return twin.train(module.training)


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
