"""AWQ: enlarge the weight columns that meet large activations, and divide the activations instead.

For the readers W of one input x: s_j = mean|x_j|^r over r = 0, 0.05 … 0.95, divided by
√(max s · min s); chosen is the s with the smallest output error tr(E H Eᵀ) of the readers together,
E = Q(W·s)/s − W. W becomes W·s and the module before it is divided by s (Lin et al. 2023):

    norm → all linear layers that read it      rows of v → columns of o      rows of up → columns of
    down. With fewer key-value heads than query heads, s is the same for all heads that share one.

Who reads what is found by watching one forward pass: the norm that returns the very tensor that is
read. A fold must leave the layer's output what it was before anything is quantized; where it
doesn't (other modules read the norm too), it is undone and reported. With clip "mse" each group's
range is then searched for the smallest output error, except for queries and keys. Ranges follow
`qparams`, so that with an integer zero 0 is representable (a group 10.5 … 14 stays what it is).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.basis import mark_input
from quantwatch_kernels.quantize.folding import divide_outputs, is_linear, multiply_inputs
from quantwatch_kernels.quantize.gptq import output_error
from quantwatch_kernels.quantize.input_stats import InputStats, collect
from quantwatch_kernels.quantize.interpose import has_input_transform
from quantwatch_kernels.quantize.mse import hessian_cost, search_qparams
from quantwatch_kernels.quantize.qparams import QParams, choose_qparams
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["awq_factors", "clipped_qparams", "scale_layer"]

_RATIOS = tuple(i / 20 for i in range(20))
_BEFORE = {"o_proj": "v_proj", "down_proj": "up_proj"}
_UNCLIPPED = frozenset({"q_proj", "k_proj", "query", "key", "q", "k"})
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class _Reading:
    """One input of a decoder layer: the linear modules that read it, and what makes it."""

    readers: tuple[tuple[str, nn.Module], ...]
    maker: nn.Module | None
    repeats: int = 1
    """Query heads per key-value head, where the maker is a value projection."""
    head_dim: int = 1


def scale_layer(walk: LayerWalk, index: int, layers: Sequence[Layer]) -> dict[str, tuple[str, ...]]:
    """Fold the best scales into decoder layer `index`; returns notes by path of its AWQ layers."""
    if not layers:
        return {}
    wanted = {layer.path: layer for layer in layers}
    readings = [r for r in _readings(walk, index) if any(p in wanted for p, _ in r.readers)]
    stats = _stats(walk, index, readings)
    called = {path for reading in readings for path, _ in reading.readers}
    uncalled = "not scaled: its decoder layer didn't call it"
    notes: dict[str, tuple[str, ...]] = {p: (uncalled,) for p in wanted if p not in called}
    for reading in readings:
        mine = [wanted[path] for path, _ in reading.readers if path in wanted]
        problem = _scale(walk, index, reading, mine, stats[reading.readers[0][0]])
        if problem is not None:
            notes.update({layer.path: (f"not scaled: {problem}",) for layer in mine})
    return notes


def _scale(
    walk: LayerWalk, index: int, reading: _Reading, layers: list[Layer], stats: InputStats
) -> str | None:
    """Scale one input; returns why it can't be."""
    if reading.maker is None:
        return "no norm or linear layer before it takes the scale"
    if any(has_input_transform(module) for _, module in reading.readers):
        return "its input is transformed online"
    if not stats.tokens:
        return "no calibration token reached it"
    factors = awq_factors(layers, stats, reading.repeats, reading.head_dim)
    before = _outputs(walk, index)
    kept = [m.get_parameter("weight").detach().clone() for _, m in reading.readers]
    made = {name: p.detach().clone() for name, p in reading.maker.named_parameters()}
    try:
        divide_outputs(reading.maker, _per_maker(factors, reading))
    except ValueError as error:
        return str(error)
    for _, module in reading.readers:
        multiply_inputs(module, factors)
    moved = relative_rmse(_outputs(walk, index), before)
    if moved <= _TOLERANCE.get(kept[0].dtype, 1e-5):
        _mark(walk.model, reading)
        return None
    with torch.no_grad():
        for (_, module), weight in zip(reading.readers, kept, strict=True):
            module.get_parameter("weight").copy_(weight)
        for name, parameter in reading.maker.named_parameters():
            parameter.copy_(made[name])
    return f"scaling its input changes the layer's output by {moved:.2g}"


def _mark(model: nn.Module, reading: _Reading) -> None:
    """Note who takes scaled inputs: the readers, and the module around them if a norm scales."""
    for path, module in reading.readers:
        mark_input(module, "its inputs are scaled by AWQ")
        if reading.maker is not None and not is_linear(reading.maker):
            mark_input(model.get_submodule(path.rpartition(".")[0]), "its inputs are scaled by AWQ")


def awq_factors(
    layers: Sequence[Layer], stats: InputStats, repeats: int = 1, head_dim: int = 1
) -> Tensor:
    """Return s, float64 [K], for layers that share the input described by `stats`."""
    magnitudes = stats.mean_magnitude
    shared = magnitudes.view(-1, repeats, head_dim) if repeats > 1 else magnitudes.view(-1, 1, 1)
    magnitudes = shared.mean(1, keepdim=True).expand_as(shared).reshape(-1)
    largest = magnitudes.max()
    if not largest > 0:
        return torch.ones_like(magnitudes)
    magnitudes = (magnitudes / largest).clamp(min=1e-4)  # an input that is always 0 keeps a scale
    best, least = torch.ones_like(magnitudes), torch.inf
    for ratio in _RATIOS:
        factors = magnitudes**ratio
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = sum(_scaled_error(layer, factors.float(), stats.hessian) for layer in layers)
        if error < least:
            best, least = factors, error
    return best


def _scaled_error(layer: Layer, factors: Tensor, hessian: Tensor) -> float:
    weight = layer.weight.float()
    values = quantize_weight(weight * factors, layer.spec).values / factors
    return output_error(weight, values, hessian)


def clipped_qparams(layer: Layer, hessian: Tensor) -> QParams:
    """Return the ranges with the smallest output error per group; plain ones without clipping."""
    unclipped = layer.path.rpartition(".")[2] in _UNCLIPPED
    if layer.spec.clip == "none" or unclipped:
        return choose_qparams(layer.weight, layer.spec)
    return search_qparams(layer.weight, layer.spec, hessian_cost(layer.spec, hessian))


def _per_maker(factors: Tensor, reading: _Reading) -> Tensor:
    if reading.repeats == 1:
        return factors
    return factors.view(-1, reading.repeats, reading.head_dim)[:, 0].reshape(-1)


def _outputs(walk: LayerWalk, index: int) -> Tensor:
    with torch.no_grad():
        return walk.call(index, 0, walk.hidden[0]) - walk.hidden[0]


def _stats(walk: LayerWalk, index: int, readings: Sequence[_Reading]) -> dict[str, InputStats]:
    firsts = [reading.readers[0] for reading in readings]
    return collect([(path, m, _num_inputs(m)) for path, m in firsts], walk.forwards(index))


def _num_inputs(linear: nn.Module) -> int:
    rows, columns = linear.get_parameter("weight").shape
    return rows if type(linear).__name__ == "Conv1D" else columns


def _readings(walk: LayerWalk, index: int) -> list[_Reading]:
    """Watch one forward pass of a decoder layer: which tensors are read by which linear layers."""
    path, layer = walk.layers[index]
    read: list[tuple[Tensor, list[tuple[str, nn.Module]]]] = []
    made: list[tuple[Tensor, nn.Module]] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_linear(module):
            group = next((readers for x, readers in read if x is args[0]), None)
            if group is None:
                read.append((args[0], group := []))
            group.append((name, module))
        elif isinstance(output, Tensor) and hasattr(module, "weight"):
            made.append((output, module))

    def hook_of(name: str) -> Any:
        return lambda module, args, output: note(name, module, args, output)

    hooks = [
        module.register_forward_hook(hook_of(f"{path}.{name}"))
        for name, module in layer.named_modules()
        if name and (is_linear(module) or not list(module.children()))
    ]
    try:
        _outputs(walk, index)
    finally:
        for hook in hooks:
            hook.remove()
    return [_reading(walk.model, x, tuple(readers), made) for x, readers in read]


def _reading(
    model: nn.Module,
    x: Tensor,
    readers: tuple[tuple[str, nn.Module], ...],
    made: list[tuple[Tensor, nn.Module]],
) -> _Reading:
    norm = next((module for output, module in made if output is x), None)
    if norm is not None:
        return _Reading(readers, norm)
    parent, _, name = readers[0][0].rpartition(".")
    block = model.get_submodule(parent)
    maker = getattr(block, _BEFORE.get(name, ""), None)
    if len(readers) > 1 or not isinstance(maker, nn.Module) or not is_linear(maker):
        return _Reading(readers, None)
    repeats, left = divmod(x.shape[-1], len(maker.get_parameter("weight")))
    head_dim = getattr(block, "head_dim", 1)
    if left or x.shape[-1] % (repeats * head_dim):
        return _Reading(readers, None)
    return _Reading(readers, maker, repeats, head_dim)
