"""A packed token embedding, and the output projection that is tied to it: one matrix, stored once.

A lookup unpacks only the rows that are asked for, so it never holds the float matrix; its values
are those of `PackedLinear.quantized()` bit for bit. The head owns nothing but its bias: it
multiplies with the embedding's buffers, so that saving, moving and counting see them once
(transformers ties *parameters*; a tied pair of packed buffers would come apart at the first save).
"""

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight, dequantize, within_range
from quantwatch_kernels.quantize.packed_linear import LinearOp, PackedLinear
from quantwatch_kernels.quantize.packing import unpack
from quantwatch_kernels.quantize.qparams import QParams

__all__ = [
    "PackedEmbedding",
    "TiedHead",
    "install_embedding",
    "link_head",
    "tied_heads",
    "why_not_packed_embedding",
]


class PackedEmbedding(PackedLinear):
    """Buffers of a PackedLinear [ids, width]; maps ids [..] to vectors [.., width]."""

    like: Tensor
    """Empty, never saved: of the dtype that the vectors have; follows `model.to(dtype)`."""

    def __init__(
        self, weight: QuantizedWeight, op: LinearOp, backend: str | None, dtype: torch.dtype
    ) -> None:
        """Pack a quantized matrix [ids, width]; `op` and `backend` are for the tied head."""
        super().__init__(weight, None, op, backend)
        self.set_dtype(dtype, weight.codes.device)

    def set_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        """Say what dtype the vectors have."""
        empty = torch.zeros(0, dtype=dtype, device=device)
        self.register_buffer("like", empty, persistent=False)

    @property
    def num_embeddings(self) -> int:
        """Number of ids."""
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        """Width of a vector."""
        return self.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """Look ids [..] up; the vectors [.., width] have the model's dtype."""
        flat = ids.reshape(-1)
        codes = unpack(self.weight_packed[flat], self.spec.format, self.in_features)
        zeros = self._unpack_zeros()
        qparams = QParams(self.scales[flat], None if zeros is None else zeros[flat])
        rows = within_range(dequantize(codes, qparams, self.spec), self.like.dtype)
        return rows.view(*ids.shape, self.in_features)


class TiedHead(nn.Module):
    """Multiplies hidden states [.., width] with a packed embedding's matrix → [.., ids]."""

    bias: nn.Parameter | None
    embedding: PackedEmbedding

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None = None) -> None:
        """Share the matrix of `embedding`, which must stay a part of the same model."""
        super().__init__()
        # Past nn.Module's registration: as a submodule it would be saved and moved a second time.
        self.__dict__["embedding"] = embedding
        self.register_parameter("bias", bias)

    @property
    def in_features(self) -> int:
        """Width of the hidden states."""
        return self.embedding.in_features

    @property
    def out_features(self) -> int:
        """Number of ids."""
        return self.embedding.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Multiply activations [.., width] of any float dtype; the result has their dtype."""
        return self.embedding.op.run(self.embedding.backend, x, self.embedding, self.bias)

    def extra_repr(self) -> str:
        """Say in `print(model)` what this layer is."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tied"


def why_not_packed_embedding(model: nn.Module, module: nn.Module) -> str | None:
    """Say why an embedding can't be packed without changing what the model computes, or None."""
    if not isinstance(module, nn.Embedding):
        return f"{type(module).__name__} is not an embedding"
    if type(module).forward is not nn.Embedding.forward:
        return f"{type(module).__name__} does more than look rows up"
    if module.max_norm is not None:
        return "it renormalizes its rows while it runs"
    for path, head in tied_heads(model, module).items():
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            return f"it is tied to {path}, a {type(head).__name__} and no plain linear layer"
    return None


def tied_heads(model: nn.Module, embedding: nn.Module) -> dict[str, nn.Module]:
    """Return the other modules, by path, that hold the embedding's own matrix as their weight."""
    weight = embedding.get_parameter("weight")
    return {
        path: module
        for path, module in model.named_modules()
        if module is not embedding and getattr(module, "weight", None) is weight
    }


def install_embedding(model: nn.Module, path: str, packed: PackedEmbedding) -> None:
    """Replace the embedding at `path` and the heads tied to it.

    Raises ValueError where `why_not_packed_embedding` says why it can't be.
    """
    module = model.get_submodule(path)
    if reason := why_not_packed_embedding(model, module):
        raise ValueError(f"{path} can't be packed: {reason}.")
    heads = tied_heads(model, module)
    model.set_submodule(path, packed.train(model.training))
    for name, head in heads.items():
        link_head(model, name, packed, getattr(head, "bias", None))


def link_head(
    model: nn.Module, path: str, packed: PackedEmbedding, bias: nn.Parameter | None
) -> None:
    """Put a head at `path` that multiplies with `packed`, and take it off transformers' list."""
    model.set_submodule(path, TiedHead(packed, bias).train(model.training))
    # transformers would look for the parameters that it used to tie, and fail to find them.
    for name in ("_tied_weights_keys", "all_tied_weights_keys"):
        tied = getattr(model, name, None)
        if isinstance(tied, dict):
            kept = {key: source for key, source in tied.items() if key != f"{path}.weight"}
            setattr(model, name, kept)
