"""Rotate a decoder so that no channel stands out: the same function, easier to quantize.

RMSNorm commutes with a rotation Q once its gain is 1: norm(x·Q) = norm(x)·Q. So

- R1 (`residual`): each norm's gain is folded into the matrices that read it, then those get columns
  W·Q and the matrices that write the residual stream rows Qᵀ·W (and biases b·Q).
- R2 (`values`): per head, v rows and o columns; the same rotation for all heads of a group.
- R4 (`down`): the input of a dense MLP's down projection online, its inverse in the weight.

The stream is rotated where it begins and back where it ends. With a head of its own, for nothing:
embedding·Q, head·diag(final gain)·Q. A head tied to the embedding can't hold both, unless the final
gain is 1; instead of a second matrix (SmolLM2-135M: 21 % more weights) the pair stays as it is, the
embedding's output is rotated and the final norm's input rotated back online: two products of
width · (m + 2^k) each per token. `RotationReport.notes` says which.

Given up: LayerNorm (it subtracts the mean, which few rotations keep) and several norms per branch.
After R1 a layer's output lies in another basis than the unrotated model's; `basis.py`
tells which, for whoever compares hidden states. Folding is float64, rounded once, and the logits
before and after are compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.basis import mark_input, mark_output
from quantwatch_kernels.quantize.blocks import (
    Block,
    Matrix,
    check_unchanged,
    find_blocks,
    norm_children,
    norm_gain,
    probe_logits,
)
from quantwatch_kernels.quantize.hadamard import Hadamard, Inverse
from quantwatch_kernels.quantize.interpose import add_input_transform, add_output_transform
from quantwatch_kernels.quantize.recipe import RotationSpec

__all__ = ["RotationReport", "rotate_"]

_CHUNK = 8192
_BASIS = ("residual stream", "it is rotated: hidden states lie in another basis than before")


@dataclass(frozen=True, slots=True)
class RotationReport:
    """(place, what was done or why not) and how far the logits moved (relative)."""

    notes: tuple[tuple[str, str], ...]
    logits_moved: float


def rotate_(model: nn.Module, spec: RotationSpec) -> RotationReport:
    """Fold the rotations of `spec` into the model in place, and add the online ones.

    Raises ValueError, before anything is changed, naming the layer that can't be rotated or the
    width that has no Hadamard matrix; and afterwards if the logits moved.
    """
    blocks, reasons = find_blocks(model)
    if reasons:
        listed = "; ".join(f"{path}: {why}" for path, why in reasons)
        raise ValueError(f"{type(model).__name__} can't be rotated: {listed}.")
    ends = _Ends.of(model, blocks) if spec.residual else None
    steps = _plan(blocks, spec)
    notes: list[tuple[str, str]] = []
    ids, before = probe_logits(model)
    if ends is not None:
        rotation = Hadamard(ends.width, spec.seed, spec.block)
        notes += _rotate_residual(ends, blocks, rotation)
        _mark_residual(model, ends, blocks, rotation)
    _apply(steps)
    if spec.down:
        notes += _not_rotated(blocks, steps)
    return RotationReport(tuple(notes), check_unchanged(model, ids, before, "rotation"))


_Step = tuple[Matrix, Hadamard, str]


def _apply(steps: list[_Step]) -> None:
    for matrix, rotation, kind in steps:
        if kind == "rows":
            _rotate_rows(matrix, rotation)
        else:
            matrix.write(rotation(matrix.read()))
        if kind == "online":
            add_input_transform(matrix.module, rotation)
        elif kind == "columns":
            mark_input(matrix.module, "its heads' values are rotated")


def _not_rotated(blocks: list[Block], steps: list[_Step]) -> list[tuple[str, str]]:
    dense = {matrix.path for matrix, _, kind in steps if kind == "online"}
    why = "not rotated: only a dense MLP's down projection is rotated online"
    writers = [matrix for block in blocks for matrix in block.writers[1]]
    return [(matrix.path, why) for matrix in writers if matrix.path not in dense]


def _plan(blocks: list[Block], spec: RotationSpec) -> list[_Step]:
    """Return what R2 and R4 change; rotations of equal width are one module."""
    steps: list[_Step] = []
    made: dict[tuple[int, int | None], Hadamard] = {}

    def rotation(width: int, block: int | None, path: str) -> Hadamard:
        try:
            return made.setdefault((width, block), Hadamard(width, spec.seed, block))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    for block in blocks:
        v, o = block.matrix(0, "v_proj"), block.matrix(0, "o_proj")
        if spec.values:
            head_dim = getattr(block.attention, "head_dim", None)
            if v is None or o is None or not isinstance(head_dim, int):
                raise ValueError(f"{block.path}: its heads' values have no v_proj and o_proj.")
            for matrix, kind, axis in ((v, "rows", 0), (o, "columns", 1)):
                width = matrix.read().shape[axis]
                if width % head_dim:
                    raise ValueError(f"{matrix.path}: {width} channels are no heads of {head_dim}.")
                steps.append((matrix, _per_head(head_dim, width // head_dim, spec.seed), kind))
        down = block.matrix(1, "down_proj")
        if spec.down and down is not None and len(block.writers[1]) == 1:
            steps.append((down, rotation(down.read().shape[1], spec.block, down.path), "online"))
    return steps


def _per_head(head_dim: int, count: int, seed: int) -> Hadamard:
    """Return one rotation of width head_dim, the same for each of several heads."""
    rotation = Hadamard(head_dim * count, block=head_dim)
    rotation.signs = Hadamard(head_dim, seed).signs.repeat(count)
    return rotation


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the residual stream begins and ends."""

    embedding: nn.Module
    norm: nn.Module
    norm_path: str
    head: nn.Module
    width: int

    @property
    def tied(self) -> bool:
        return self.head.get_parameter("weight") is self.embedding.get_parameter("weight")

    @classmethod
    def of(cls, model: nn.Module, blocks: list[Block]) -> "_Ends":
        """Find them. Raises ValueError naming a norm that a rotation doesn't commute with."""
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        head = model.get_output_embeddings()  # type: ignore[operator]
        decoder_path = blocks[0].path.rpartition(".")[0].rpartition(".")[0]
        decoder = model.get_submodule(decoder_path)
        norms = norm_children(decoder)
        if len(norms) != 1 or not isinstance(embedding, nn.Embedding) or head is None:
            raise ValueError(
                f"{type(model).__name__} can't be rotated: one embedding, one final norm and a "
                f"head are understood; beside the layers are {[name for name, _ in norms]}."
            )
        name = f"{decoder_path}.{norms[0][0]}".lstrip(".")
        for path, norm in [*(n for block in blocks for n in block.norms), (name, norms[0][1])]:
            gain = norm_gain(norm)
            if gain is None or gain.centred or getattr(norm, "bias", None) is not None:
                raise ValueError(
                    f"{path} is a {type(norm).__name__}: only an RMSNorm without bias commutes "
                    "with a rotation of the residual stream."
                )
        others = [
            child
            for child_name, child in decoder.named_children()
            if isinstance(child, nn.Embedding) and child is not embedding
        ]
        if others:
            raise ValueError(f"{type(model).__name__} adds position embeddings to the stream.")
        return cls(embedding, norms[0][1], name, head, embedding.embedding_dim)


def _rotate_residual(ends: _Ends, blocks: list[Block], rotation: Hadamard) -> list[tuple[str, str]]:
    for block in blocks:
        for (_, norm), readers in zip(block.norms, block.readers, strict=True):
            gain = _take_gain(norm)
            for matrix in readers:
                matrix.write(rotation(matrix.read() * gain))
        for matrix in (*block.writers[0], *block.writers[1]):
            _rotate_rows(matrix, rotation)
    if ends.tied:
        add_output_transform(ends.embedding, rotation)
        add_input_transform(ends.norm, Inverse(rotation))
        note = "tied to the embedding: the stream is rotated and rotated back online, nothing added"
        return [_BASIS, ("head", note)]
    _rotate_table(ends.embedding.get_parameter("weight"), None, rotation)
    _rotate_table(ends.head.get_parameter("weight"), _take_gain(ends.norm), rotation)
    return [_BASIS, ("head", "the final norm's gain and the rotation are folded into it")]


def _mark_residual(model: nn.Module, ends: _Ends, blocks: list[Block], rotation: Hadamard) -> None:
    """Note what takes or gives the rotated stream, for whoever compares hidden states."""
    why = "its hidden states are rotated"
    for block in blocks:
        branches = [block.branch(model, part) for part in (0, 1)]
        readers = [matrix.module for part in block.readers for matrix in part]
        for module in (model.get_submodule(block.path), *branches):
            mark_input(module, why)
            mark_output(module, rotation, why)
        for module in readers:
            mark_input(module, why)
        for matrix in (*block.writers[0], *block.writers[1]):
            mark_output(matrix.module, rotation, why)
    mark_output(ends.embedding, rotation, why)
    mark_input(ends.norm, why)
    if not ends.tied:
        mark_output(ends.norm, None, "its gain is folded into the head")
        mark_input(ends.head, why)


def _rotate_rows(matrix: Matrix, rotation: Hadamard) -> None:
    matrix.write(rotation(matrix.read().mT).mT)
    if (bias := matrix.bias) is not None:
        with torch.no_grad():
            bias.copy_(rotation(bias.double()))


def _take_gain(norm: nn.Module) -> Tensor:
    """Return a norm's gain, float64, and leave it with a gain of 1."""
    found = norm_gain(norm)
    assert found is not None
    weight = norm.get_parameter("weight")
    gain = weight.detach().double() + found.offset
    with torch.no_grad():
        weight.fill_(1 - found.offset)
    return gain


def _rotate_table(weight: nn.Parameter, gain: Tensor | None, rotation: Hadamard) -> None:
    with torch.no_grad():
        for start in range(0, len(weight), _CHUNK):
            rows = weight[start : start + _CHUNK]
            table = rows.double()
            rows.copy_(rotation(table if gain is None else table * gain))
