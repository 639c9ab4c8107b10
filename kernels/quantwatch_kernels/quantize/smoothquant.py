"""SmoothQuant: move the range of outlier channels from activations into weights, unchanged in sum.

s_j = max|X_j|^α ÷ max|W_:j|^(1 − α) per input channel j; the activation is divided by s, the
matching columns of *every* matrix that reads it are multiplied:

    norm → q, k, v            gain (and bias) ÷ s     columns · s
    norm → gate, up, experts, routers                 columns · s
    v → o                     rows (and bias) ÷ s     columns · s over the query heads that share it
    up → down (gated MLP)     rows (and bias) ÷ s     columns · s

Routers take part in the product and not in max|W|: they aren't quantized. Channels that are always
zero keep s = 1. Experts' down projections are not smoothed (each expert would need its own
calibration), nor a down projection behind an online rotation; such places are reported. The logits
on the first calibration input are compared before and after: a reader that was forgotten shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.basis import mark_input
from quantwatch_kernels.quantize.blocks import (
    Block,
    Matrix,
    check_unchanged,
    find_blocks,
    norm_gain,
    probe_logits,
)
from quantwatch_kernels.quantize.interpose import has_input_transform
from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["SmoothReport", "smooth_", "smoothing_factors"]


@dataclass(frozen=True, slots=True)
class SmoothReport:
    """What was smoothed, what not and why, and how far the logits moved (relative)."""

    smoothed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    logits_moved: float


@dataclass(frozen=True, slots=True)
class _Place:
    """Something whose channels are divided, its readers, and the activation to be measured."""

    name: str
    divide: Callable[[Tensor], None]
    readers: tuple[Matrix, ...]
    watched: nn.Module
    output: bool
    """Whether the watched module's output is the activation, not its input."""
    repeats: int = 1
    head_dim: int = 1
    """Input channels of the readers are [shared, repeats, head_dim]; `shared` and head_dim stay."""

    def reduce(self, per_input: Tensor) -> Tensor:
        """Return the largest value among the inputs that share a channel [in ÷ repeats]."""
        return per_input.view(-1, self.repeats, self.head_dim).amax(1).flatten()

    def spread(self, per_channel: Tensor) -> Tensor:
        """Return each input's channel value [in]."""
        return per_channel.view(-1, self.head_dim).repeat_interleave(self.repeats, 0).flatten()


def smoothing_factors(activation: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Return s, float64 [K], from largest magnitudes; 1 where either is 0.

    Raises ValueError if a magnitude isn't finite.
    """
    for name, values in (("activation", activation), ("weight", weight)):
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"the {name}s of a channel to smooth aren't finite.")
    a, w = activation.double(), weight.double()
    s = a.pow(alpha) / w.pow(1 - alpha)
    return torch.where((a > 0) & (w > 0), s, 1.0)


def smooth_(model: nn.Module, alpha: float, calibration: Sequence[Tensor]) -> SmoothReport:
    """Smooth every place of the model in place. `calibration` are token ids [B, T].

    Raises ValueError if nothing can be smoothed, if activations aren't finite (naming the place),
    or if the logits moved.
    """
    blocks, skipped = find_blocks(model)
    places = []
    for block in blocks:
        for place in _places(block):
            if isinstance(place, _Place):
                places.append(place)
            else:
                skipped.append(place)
    if not places:
        listed = "; ".join(f"{path}: {why}" for path, why in skipped)
        raise ValueError(f"no place of {type(model).__name__} can be smoothed: {listed}.")
    ids, before = probe_logits(model, calibration[0][:1] if calibration else None)
    largest = _observe(model, places, calibration)
    for place, activation in zip(places, largest, strict=True):
        _smooth(place, activation, alpha)
        for matrix in place.readers:
            mark_input(matrix.module, "its inputs are smoothed")
    smoothed = {place.name for place in places}
    for block in blocks:
        for part, (path, _) in enumerate(block.norms):
            if path in smoothed:
                mark_input(block.branch(model, part), "its inputs are smoothed")
    moved = check_unchanged(model, ids, before, "smoothing")
    return SmoothReport(tuple(place.name for place in places), tuple(skipped), moved)


def _places(block: Block) -> list["_Place | tuple[str, str]"]:
    found: list[_Place | tuple[str, str]] = [_norm_place(block, 0), _norm_place(block, 1)]
    v, o = block.matrix(0, "v_proj"), block.matrix(0, "o_proj")
    if v is not None and o is not None:
        found.append(_value_place(block, v, o))
    up, down = block.matrix(1, "up_proj"), block.matrix(1, "down_proj")
    gated = block.matrix(1, "gate_proj") is not None
    if up is None or down is None or not gated or len(block.writers[1]) != 1:
        for writer in block.writers[1]:
            found.append((writer.path, "not smoothed: no single gated up projection feeds it"))
    elif has_input_transform(down.module):
        found.append((down.path, "not smoothed: its input is transformed online"))
    else:
        found.append(_Place(f"{up.path} → down_proj", _rows(up), (down,), down.module, False))
    return found


def _norm_place(block: Block, part: int) -> "_Place | tuple[str, str]":
    path, norm = block.norms[part]
    gain = norm_gain(norm)
    if gain is None:
        return path, f"not smoothed: what {type(norm).__name__} does with its gain is not known"

    def divide(s: Tensor) -> None:
        weight = norm.get_parameter("weight")
        with torch.no_grad():
            weight.copy_((weight.double() + gain.offset) / s - gain.offset)
            if isinstance(bias := getattr(norm, "bias", None), nn.Parameter):
                bias.copy_(bias.double() / s)

    return _Place(path, divide, block.readers[part], norm, True)


def _value_place(block: Block, v: Matrix, o: Matrix) -> "_Place | tuple[str, str]":
    values, inputs = v.read().shape[0], o.read().shape[1]
    head_dim = getattr(block.attention, "head_dim", None)
    if not isinstance(head_dim, int) or values % head_dim or inputs % values:
        return o.path, f"not smoothed: {values} value channels don't divide its {inputs} inputs"
    name = f"{v.path} → o_proj"
    return _Place(name, _rows(v), (o,), o.module, False, inputs // values, head_dim)


def _rows(matrix: Matrix) -> Callable[[Tensor], None]:
    def divide(s: Tensor) -> None:
        matrix.write(matrix.read() / s[:, None])
        if (bias := matrix.bias) is not None:
            with torch.no_grad():
                bias.copy_(bias.double() / s)

    return divide


def _observe(
    model: nn.Module, places: Sequence[_Place], calibration: Sequence[Tensor]
) -> list[Tensor]:
    """Return max|X_j| of each place over the calibration inputs, on its channels."""
    walk = LayerWalk(model, calibration)
    largest: list[Tensor | None] = [None] * len(places)

    def see(number: int, x: Tensor) -> None:
        if x.numel():
            seen = x.detach().double().abs().reshape(-1, x.shape[-1]).amax(0)
            before = largest[number]
            largest[number] = seen if before is None else torch.maximum(before, seen)

    handles = []
    for number, place in enumerate(places):
        if place.output:
            hook = place.watched.register_forward_hook(
                lambda _m, _a, output, number=number: see(number, output)
            )
        else:
            hook = place.watched.register_forward_pre_hook(
                lambda _m, args, number=number: see(number, args[0])
            )
        handles.append(hook)
    try:
        for index in range(len(walk.layers)):
            walk.run(index)
    finally:
        for handle in handles:
            handle.remove()
    return [_seen(place, seen) for place, seen in zip(places, largest, strict=True)]


def _seen(place: _Place, seen: Tensor | None) -> Tensor:
    if seen is None:
        raise ValueError(f"{place.name}: calibration never reached it.")
    return place.reduce(seen)


def _smooth(place: _Place, activation: Tensor, alpha: float) -> None:
    weights = torch.stack(
        [m.read().abs().flatten(0, -2).amax(0) for m in place.readers if not m.router]
    )
    try:
        s = smoothing_factors(activation, place.reduce(weights.amax(0)), alpha)
    except ValueError as error:
        raise ValueError(f"{place.name}: {error}") from error
    place.divide(s)
    for matrix in place.readers:
        matrix.write(matrix.read() * place.spread(s))
