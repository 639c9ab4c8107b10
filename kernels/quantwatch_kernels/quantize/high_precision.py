"""Norm statistics and router logits in float32, where a 16-bit model doesn't make them so.

Norms and routers are tried out. In float16 x² of 300 overflows, in bfloat16 a mean square is
coarse: a norm whose result isn't the float64 one, rounded where norms round, is computed in float32
instead (those of transformers 5.24 are right already). Routers of transformers 5.24 (Mixtral,
Qwen2-MoE, …) multiply in the model's dtype and only then take a float32 softmax: bfloat16 logits
tie and experts flip. Their weights are widened to float32, and so is their input; what they hand
the experts keeps the model's dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.blocks import Gain, norm_children, norm_gain
from quantwatch_kernels.quantize.interpose import interpose
from quantwatch_kernels.quantize.routers import choosing_matrices, unrouted_experts
from quantwatch_kernels.quantize.stacks import lies_flat

__all__ = ["KEEPS_STATISTICS", "keep_norms_high_", "keep_routers_high_", "keep_statistics_high_"]

_SAME_BITS = 0.99
"""Share of a probe; float32 sums in another order decide the rounding of a few in 10 000."""
Notes = list[tuple[str, str]]


class _Float32Norm(nn.Module):
    """A norm whose statistics and product are float32, rounded once."""

    norm_offset: float
    norm_centred: bool
    norm_eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        if self.norm_centred:
            x = x - x.mean(-1, keepdim=True)
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        gained = unit * (self.weight.float() + self.norm_offset)  # type: ignore[operator]
        bias = getattr(self, "bias", None)
        gained = gained if bias is None else gained + bias.float()
        return gained.to(hidden_states.dtype)


class _Float32Router(nn.Module):
    """A router on float32 input and weights; all it returns but the logits has the input's dtype.

    A plain linear layer returns the logits, transformers' routers do so first; only Llama 4's,
    itself a linear layer, returns what scales the experts first and the logits last.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(hidden_states.float(), *args, **kwargs)
        if not isinstance(output, tuple):
            return output
        logits = output[-1] if isinstance(self, nn.Linear) else output[0]
        return tuple(
            x.to(hidden_states.dtype) if _is_float(x) and x is not logits else x for x in output
        )


class _TakesOneDtype(nn.Module):
    """Experts that add what they make to sums of the input's dtype, whatever weighs it (DBRX)."""

    def forward(self, hidden_states: Tensor, *args: Any) -> Any:
        taken = [x.to(hidden_states.dtype) if _is_float(x) else x for x in args]
        return super().forward(hidden_states, *taken)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


KEEPS_STATISTICS = (_Float32Norm, _Float32Router, _TakesOneDtype)
"""What `keep_statistics_high_` makes of modules; called on the plain model it does so again."""


def keep_statistics_high_(model: nn.Module) -> Notes:
    """Compute norm statistics and router logits in float32 where a 16-bit model doesn't.

    Returns (path, what was changed). Raises ValueError for a norm that loses its statistics in the
    model's dtype and isn't understood.
    """
    return [*keep_norms_high_(model), *keep_routers_high_(model)]


def keep_norms_high_(model: nn.Module, prefix: str = "") -> Notes:
    """Compute norm statistics in float32; a norm without values (on meta) can't be tried out yet.

    Returns (path, what was changed), paths beginning with `prefix`. Raises ValueError as above.
    """
    notes: Notes = []
    for path, module in list(model.named_modules()):
        for name, child in norm_children(module):
            if _is_norm(name, child) and _is_16_bit(child) and not _is_blank(child):
                notes += _keep_norm(prefix + f"{path}.{name}".lstrip("."), child)
    return notes


def keep_routers_high_(model: nn.Module) -> Notes:
    """Compute router logits in float32; a model without values (on meta) gets them in float32.

    Returns (path, what was changed).
    """
    notes: Notes = []
    for router, paths in list(choosing_matrices(model)):
        narrow = [path for path in paths if _is_16_bit(model.get_submodule(path))]
        if len(paths) > 1 and narrow:
            why = f"a router of {len(paths)} matrices: its logits stay in the model's dtype"
            notes.append((router, why))
        elif narrow:
            notes += _keep_router(narrow[0], model.get_submodule(narrow[0]))
            for child in model.get_submodule(router.rpartition(".")[0]).children():
                if any(lies_flat(inner) for inner in child.modules()):
                    interpose(child, _TakesOneDtype)
    notes += [
        (path, "no router was found beside these experts") for path in unrouted_experts(model)
    ]
    return notes


def _keep_router(path: str, module: nn.Module) -> Notes:
    weight = module.get_parameter("weight")
    stored = str(weight.dtype)[6:]
    weight.data = weight.data.float()
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter):
        bias.data = bias.data.float()
    interpose(module, _Float32Router)
    return [(path, f"router logits are float32; the module made them in {stored}")]


def _is_16_bit(module: nn.Module) -> bool:
    return module.get_parameter("weight").dtype in (torch.float16, torch.bfloat16)


def _is_blank(module: nn.Module) -> bool:
    return module.get_parameter("weight").is_meta


def _is_norm(name: str, module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() or "norm" in name.lower()


def _keep_norm(path: str, norm: nn.Module) -> Notes:
    """Try a norm on values whose squares overflow in float16; correct it if it is wrong there."""
    weight = norm.get_parameter("weight")
    generator = torch.Generator().manual_seed(0)
    probe = 300 * (0.5 + torch.rand(4, len(weight), generator=generator))
    probe[:, ::3] *= -1
    probe = probe.to(weight.device, weight.dtype)
    try:
        with torch.no_grad():
            found = norm(probe).double()
    except (AttributeError, TypeError):  # a gated norm (Qwen3-Next's) without its gate
        return [(path, f"{type(norm).__name__} takes more than its input: left alone")]
    gain = norm_gain(norm)
    if gain is not None:
        if _keeps_statistics(norm, gain, probe, found):
            return []
        eps = next(
            (float(v) for n in ("variance_epsilon", "eps") if (v := getattr(norm, n, None))), 0.0
        )
        interpose(norm, _Float32Norm)
        norm.norm_offset, norm.norm_centred = gain.offset, gain.centred  # type: ignore[assignment]
        norm.norm_eps = eps  # type: ignore[assignment]
        return [(path, f"statistics are float32; in {str(weight.dtype)[6:]} they were wrong")]
    if bool(torch.isfinite(found).all()) and bool((found != 0).any()):
        return [(path, f"what {type(norm).__name__} does with its gain is not known: left alone")]
    raise ValueError(
        f"{path}: {type(norm).__name__} loses its statistics in {weight.dtype}, and what it does "
        "with its gain is not known."
    )


def _keeps_statistics(norm: nn.Module, gain: Gain, probe: Tensor, found: Tensor) -> bool:
    """Say whether what a norm made of the probe is the exact result, rounded where norms round.

    That may be the normalized value, 1 + w, and the product. Bits are compared: a mean or a root of
    few bits moves a whole row by less than these roundings do, but moves half of its bits.
    """
    x = probe.double()
    x = x - x.mean(-1, keepdim=True) if gain.centred else x
    unit = x / x.square().mean(-1, keepdim=True).sqrt()
    weight = norm.get_parameter("weight").detach().double() + gain.offset
    bias = getattr(norm, "bias", None)
    shift = 0 if bias is None else bias.detach().double()
    exact = unit * weight + shift
    allowed = 2 * torch.finfo(probe.dtype).eps * exact.abs() + 1e-6
    if not bool(((found - exact).abs() <= allowed).all()):
        return False
    forms = [
        (u.double() * w.double() + shift).to(probe.dtype)
        for u in (unit, unit.to(probe.dtype))
        for w in (weight, weight.to(probe.dtype))
    ]
    return any(float((found == form).double().mean()) >= _SAME_BITS for form in forms)
