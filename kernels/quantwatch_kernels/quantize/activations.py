"""Quantized activations: the input of a linear layer, rounded before it is multiplied.

x ≈ (code − zero) · scale, M rows (tokens), K inputs. Per token (one scale per row), per token and
group of inputs, or per tensor; dynamic, from the input itself, or static, from an observer over
calibration data. Scales are float32 and chosen by the same rules as a weight's (`qparams`): halves
to even, 0 always representable, rows of zeros exact. `clip_ratio` shrinks dynamic ranges.

What isn't finite stays measurable: dynamic, a NaN or infinity makes its whole scale's values NaN;
static, it becomes NaN itself (saturating an infinity to the largest code would hide it).

Integer arithmetic gives the same: with W ≈ Wq · s_w per output channel,
y = (Xq·Wqᵀ − zero_row · Σ_k Wq) · s_row · s_w + bias, sums exact in int32 (`integer_linear`).
Computed here in floating point on rounded values: what is lost is rounding of the float product.
"""

import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import IntFormat
from quantwatch_kernels.quantize.affine import QuantizedWeight, within_range
from quantwatch_kernels.quantize.interpose import add_input_transform
from quantwatch_kernels.quantize.observers import Observer, make_observer, tensor_qparams
from quantwatch_kernels.quantize.qparams import QParams, group_range, qparams_of_range, spread
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, WeightSpec
from quantwatch_kernels.quantize.rounding import round_to_code

__all__ = [
    "ActivationQuantizer",
    "fake_quantize_input",
    "fake_quantize_input_reference",
    "input_qparams",
    "integer_linear",
    "quantize_input",
]


def _as_weight_spec(spec: ActivationSpec) -> WeightSpec:
    zero = "none" if spec.format.symmetric else "integer"
    return WeightSpec(spec.format, spec.granularity, zero)  # type: ignore[arg-type]


def input_qparams(x_MK: Tensor, spec: ActivationSpec) -> QParams:
    """Return dynamic scales and zeros [M, G] of a matrix; NaN where a range isn't finite."""
    like = _as_weight_spec(spec)
    low, high = group_range(x_MK, like)
    return qparams_of_range(low * spec.clip_ratio, high * spec.clip_ratio, like)


def quantize_input(x_MK: Tensor, qparams: QParams, spec: ActivationSpec) -> Tensor:
    """Return codes [M, K] in the format's storage; 0 where the input or its scale isn't finite."""
    size, columns = spec.granularity.group_size(x_MK.shape[1]), x_MK.shape[1]
    codes = round_to_code(x_MK.float() / spread(qparams.scales, size, columns))
    if qparams.zeros is not None:
        codes = codes + spread(qparams.zeros, size, columns)
    fmt = spec.format
    return codes.nan_to_num(nan=0.0).clamp(fmt.qmin, fmt.qmax).to(fmt.storage)


def fake_quantize_input(x: Tensor, spec: ActivationSpec, static: QParams | None = None) -> Tensor:
    """Return the input [.., K] rounded to its grid, in its own dtype; an empty one as it is.

    `static` are the scale and zero point [1, 1] of a static spec. Raises ValueError when a static
    spec comes without them.
    """
    if spec.static and static is None:
        raise ValueError("a static activation needs the scale of an observer.")
    if not x.numel():
        return x
    columns = x.shape[-1]
    size = min(spec.granularity.group_size(columns), columns)
    rows = x.reshape(-1, columns).float()
    qparams = static or input_qparams(rows, spec)
    if size == columns:
        scales, zeros = qparams.scales, qparams.zeros
    else:
        scales = spread(qparams.scales, size, columns)
        zeros = None if qparams.zeros is None else spread(qparams.zeros, size, columns)
    rounded = _on_grid(rows, scales, zeros, spec.format)
    if static is not None:
        rounded = rounded.where(torch.isfinite(rows), torch.nan)
    return within_range(rounded.reshape(x.shape), x.dtype)


def _on_grid(x: Tensor, scales: Tensor, zeros: Tensor | None, fmt: IntFormat) -> Tensor:
    codes = round_to_code(x / scales)
    if zeros is None:
        return codes.clamp_(fmt.qmin, fmt.qmax).mul_(scales)
    shift = zeros.float()
    return codes.add_(shift).clamp_(fmt.qmin, fmt.qmax).sub_(shift).mul_(scales)


def fake_quantize_input_reference(x: Tensor, spec: ActivationSpec) -> Tensor:
    """Float64 twin of a dynamic `fake_quantize_input`: one range after the other, [.., K]."""
    rows = x.double().reshape(-1, x.shape[-1])
    width = spec.granularity.group_size(x.shape[-1])
    whole = isinstance(spec.granularity, PerTensor)
    parts = [rows] if whole else [p for row in rows for p in row.split(width)]
    done = [_reference_range(part, spec) for part in parts]
    return torch.cat([part.flatten() for part in done]).reshape(x.shape)


def _reference_range(x: Tensor, spec: ActivationSpec) -> Tensor:
    fmt = spec.format
    low, high = (float(end) * spec.clip_ratio for end in torch.aminmax(x))
    if fmt.symmetric:
        scale, zero = max(-low, high) / fmt.qmax, 0.0
    else:
        scale = (max(high, 0.0) - min(low, 0.0)) / fmt.qmax
        zero = round(-min(low, 0.0) / scale) if scale else 0.0
    if scale == 0:
        return torch.zeros_like(x)
    codes = ((x / scale).round() + zero).clamp(fmt.qmin, fmt.qmax)
    return (codes - zero) * scale


def integer_linear(
    x_MK: Tensor, spec: ActivationSpec, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """Multiply as integer kernels do: exact sums of codes, scales afterwards; float64 [M, N].

    One dynamic scale per row or tensor, a symmetric weight with one scale per output channel or
    tensor: raises ValueError for others, whose scales don't leave the sum.
    """
    if weight.qparams.zeros is not None or weight.qparams.scales.shape[1] != 1:
        raise ValueError("integer arithmetic needs a symmetric weight with one scale per row.")
    made = input_qparams(x_MK, spec)
    if made.scales.shape[1] != 1:
        raise ValueError("integer arithmetic needs one activation scale per row.")
    codes, weights = quantize_input(x_MK, made, spec).long(), weight.codes.long()
    total = codes @ weights.T
    if made.zeros is not None:
        total = total - made.zeros.long() * weights.sum(1)
    y = total.double() * made.scales.double() * weight.qparams.scales.double().T
    return y if bias is None else y + bias.double()


class ActivationQuantizer(nn.Module):
    """The rounding in front of one layer: an input transform.

    While `observing` it passes its input on and lets the observer see it; `freeze` ends that.
    Buffers `scale` and `zero` [1, 1] exist once a static spec is frozen.
    """

    scale: Tensor | None
    zero: Tensor | None

    def __init__(self, name: str, spec: ActivationSpec) -> None:
        """`name` is the layer's, for messages."""
        super().__init__()
        self.layer_name = name
        self.spec = spec
        self.register_buffer("scale", None)
        self.register_buffer("zero", None)
        self._observer: Observer | None = None

    def observe(self) -> None:
        """Start observing afresh."""
        self._observer = make_observer(self.spec.observer)

    def freeze(self) -> None:
        """Take the observer's range. Raises ValueError naming the layer if it never saw a value."""
        if self._observer is None:
            raise ValueError(f"{self.layer_name}: its activations were never observed.")
        try:
            made = tensor_qparams(*self._observer.range(self.spec.format), self.spec.format)
        except ValueError as error:
            raise ValueError(f"{self.layer_name}: {error}") from error
        self.scale, self.zero = made.scales, made.zeros
        self._observer = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the rounded input [.., K]."""
        if self._observer is not None:
            try:
                self._observer.update(x)
            except ValueError as error:
                raise ValueError(f"{self.layer_name}: {error}") from error
            return x
        if not self.spec.static:
            return fake_quantize_input(x, self.spec)
        if self.scale is None:
            raise ValueError(f"{self.layer_name}: its static scale was never calibrated.")
        return fake_quantize_input(x, self.spec, QParams(self.scale, self.zero))

    def extra_repr(self) -> str:
        """Say in `print(model)` what is rounded how."""
        return f"{self.spec.format.name}, static={self.spec.static}"


def add_activation_quantizer(
    module: nn.Module, name: str, spec: ActivationSpec
) -> ActivationQuantizer:
    """Round the inputs of `module` from now on; returns the quantizer, for calibration."""
    quantizer = ActivationQuantizer(name, spec)
    add_input_transform(module, quantizer)
    return quantizer
