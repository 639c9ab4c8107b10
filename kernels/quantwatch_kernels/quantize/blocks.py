"""Decoder layers as norms and matrices: who reads a norm's output, who writes the residual stream.

What smoothing and rotation need to know of an architecture, found by the names that decoders share:
a layer has two norms, of the input of its attention and of its MLP, a submodule for each, and in
these every matrix either reads the norm (q, k, v, gate, up, router, …) or writes the stream (o,
down). Experts are matrices stacked in a parameter [E, out, in]. A layer that looks otherwise has no
description but a reason; and whoever changes weights by this description compares the logits before
and after (`probe_logits`, `check_unchanged`), since names prove nothing about the arithmetic.
"""

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.routers import ROUTING_NAMES, routing_paths
from quantwatch_kernels.quantize.stacks import stored_in_out

__all__ = [
    "Block",
    "Gain",
    "Matrix",
    "check_unchanged",
    "find_blocks",
    "norm_children",
    "norm_gain",
    "probe_logits",
]

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward")
_READERS = ROUTING_NAMES | {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"),
    *("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "w1", "w3"),
}
_WRITERS = frozenset({"o_proj", "out_proj", "c_proj", "dense", "down_proj", "fc2", "w2"})


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight, alone or stacked: a module's parameter seen as [.., out, in]."""

    path: str
    module: nn.Module
    parameter: str = "weight"
    router: bool = False
    """Whether it chooses or weighs experts: it is never quantized."""

    @property
    def name(self) -> str:
        """What kind of matrix: q_proj, gate_up_proj, …."""
        return self.path.rpartition(".")[2]

    @property
    def plain(self) -> bool:
        """Whether it is one linear layer's weight."""
        return self.parameter == "weight" and self._weight.ndim == 2

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias [out] of a linear layer, or None."""
        bias = getattr(self.module, "bias", None)
        return bias if self.plain and isinstance(bias, nn.Parameter) else None

    def read(self) -> Tensor:
        """Return the weight, float64 [.., out, in]."""
        weight = self._weight.detach().double()
        return weight.mT if self._transposed else weight

    def write(self, weight: Tensor) -> None:
        """Replace the weight, given as [.., out, in]; rounded once, to its own dtype."""
        with torch.no_grad():
            self._weight.copy_(weight.mT if self._transposed else weight)

    @property
    def _weight(self) -> nn.Parameter:
        return self.module.get_parameter(self.parameter)

    @property
    def _transposed(self) -> bool:
        return type(self.module).__name__ == "Conv1D"


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer. `norms` are (path, module) of the attention's and the MLP's norm."""

    path: str
    attention: nn.Module
    norms: tuple[tuple[str, nn.Module], tuple[str, nn.Module]]
    readers: tuple[tuple[Matrix, ...], tuple[Matrix, ...]]
    writers: tuple[tuple[Matrix, ...], tuple[Matrix, ...]]

    def branch(self, model: nn.Module, part: int) -> nn.Module:
        """Return the attention (0) or MLP (1) module: what holds the part's matrices."""
        inside = self.writers[part][0].path.removeprefix(f"{self.path}.")
        return model.get_submodule(f"{self.path}.{inside.partition('.')[0]}")

    def matrix(self, part: int, name: str) -> Matrix | None:
        """Return the plain linear layer of this name in the attention (0) or a dense MLP (1)."""
        found = [m for m in (*self.readers[part], *self.writers[part]) if m.name == name]
        return found[0] if len(found) == 1 and found[0].plain else None


@dataclass(frozen=True, slots=True)
class Gain:
    """What a norm multiplies by: weight + offset, after subtracting the mean or not."""

    offset: float
    centred: bool


def find_blocks(model: nn.Module) -> tuple[list[Block], list[tuple[str, str]]]:
    """Return the layers that could be described, and (path, reason) of those that couldn't."""
    blocks, reasons = [], []
    shared, routing = _shared_parameters(model), routing_paths(model)
    for path, layer in find_decoder_layers(model):
        found = _describe(path, layer, shared, routing)
        if isinstance(found, Block):
            blocks.append(found)
        else:
            reasons.append((path, found))
    return blocks, reasons


def norm_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the direct children whose only matrix is a gain [width], maybe with a bias."""
    found = []
    for name, child in module.named_children():
        parameters = dict(child.named_parameters())
        vectors = all(parameter.ndim == 1 for parameter in parameters.values())
        if vectors and set(parameters) in ({"weight"}, {"weight", "bias"}):
            found.append((name, child))
    return found


def norm_gain(norm: nn.Module) -> Gain | None:
    """Find out by a probe what a norm does with its gain; None: something else."""
    double = copy.deepcopy(norm).float()
    weight = double.get_parameter("weight").detach().double()
    bias = getattr(double, "bias", None)
    # Large, so that eps doesn't count, and uneven, so that the mean does.
    probe = torch.linspace(20.0, 90.0, len(weight), device=weight.device)
    probe[::3] *= -1
    with torch.no_grad():
        found = double(probe[None])[0].double()
    x = probe.double()
    for centred in (False, True):
        centre = x - x.mean() if centred else x
        unit = centre / centre.square().mean().sqrt()
        for offset in (0.0, 1.0):
            expected = unit * (weight + offset) + (0 if bias is None else bias.detach().double())
            if torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                return Gain(offset, centred)
    return None


def probe_logits(model: nn.Module, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return token ids [1, T] (48 seeded ones unless given) and the model's logits there."""
    if ids is None:
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, size, (1, 48), generator=generator)
    device = next(model.parameters()).device
    with torch.no_grad():
        return ids, model(ids.to(device), use_cache=False).logits.double()


def check_unchanged(model: nn.Module, ids: Tensor, before: Tensor, what: str) -> float:
    """Return ‖after − before‖ ÷ ‖before‖ of the logits (each row centred).

    Raises ValueError if that is more than rounding: the model's arithmetic isn't what its names
    say, and it has been changed.
    """
    _, after = probe_logits(model, ids)
    gap = torch.linalg.vector_norm(after - before).item()
    size = torch.linalg.vector_norm(before - before.mean(-1, keepdim=True)).item()
    error: float = gap / size if size else gap
    dtype = next(model.parameters()).dtype
    # Weights are rounded again, and a residual stream in another basis rounds elsewhere: 1e-2 in
    # bfloat16, 1e-3 in float16, 5e-6 in float32. A forgotten reader moves more than 0.1.
    allowed = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 1e-3)
    if not math.isfinite(error) or error > allowed:
        raise ValueError(
            f"{what} changed what {type(model).__name__} computes: its logits moved by {error:.2g} "
            f"of their size, {allowed:g} is allowed. Load the model again: it can't be used now."
        )
    return error


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter.data_ptr()] = users.get(parameter.data_ptr(), 0) + 1
    return frozenset(address for address, count in users.items() if address and count > 1)


def _describe(
    path: str, layer: nn.Module, shared: frozenset[int], routing: Collection[str]
) -> Block | str:
    norms = norm_children(layer)
    if len(norms) != 2:
        names = ", ".join(name for name, _ in norms) or "none"
        return f"two norms, of attention and MLP, are understood; there are {names}"
    found = [_child(layer, names) for names in (_ATTENTION, _MLP)]
    parts = [part for part in found if part is not None]
    if len(parts) < 2:
        return f"{type(layer).__name__} has no submodule named like its attention or its MLP"
    matrices = [list(_matrices(f"{path}.{name}", module, routing)) for name, module in parts]
    for matrix in (m for part in matrices for m in part):
        if reason := _why_not(matrix, shared):
            return f"{matrix.path} {reason}"
    readers = tuple(tuple(m for m in part if m.name in _READERS) for part in matrices)
    writers = tuple(tuple(m for m in part if m.name in _WRITERS) for part in matrices)
    named = [(f"{path}.{name}", module) for name, module in norms]
    return Block(path, parts[0][1], (named[0], named[1]), readers, writers)  # type: ignore[arg-type]


def _child(layer: nn.Module, names: tuple[str, ...]) -> tuple[str, nn.Module] | None:
    children = dict(layer.named_children())
    return next(((name, children[name]) for name in names if name in children), None)


def _matrices(path: str, part: nn.Module, routing: Collection[str]) -> Iterator[Matrix]:
    for name, module in part.named_modules(prefix=path):
        for parameter, value in module.named_parameters(recurse=False):
            if value.ndim >= 2:
                whole = name if parameter == "weight" else f"{name}.{parameter}"
                yield Matrix(whole, module, parameter, name in routing)


def _why_not(matrix: Matrix, shared: frozenset[int]) -> str | None:
    parameter = matrix.module.get_parameter(matrix.parameter)
    if matrix.name not in _READERS | _WRITERS:
        return "is not known to read a norm or to write the residual stream"
    if not parameter.is_floating_point():
        return f"is stored as {parameter.dtype}"
    if parameter.data_ptr() in shared:
        return "shares its weight with another module"
    if parameter.ndim == 3 and stored_in_out(matrix.module, matrix.parameter):
        return "is stored [expert, in, out], which is not supported yet"
    if parameter.ndim == 3 and getattr(matrix.module, "has_bias", False):
        return "has a bias per expert, which is not supported yet"
    return None
