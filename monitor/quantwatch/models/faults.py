"""Plant the faults a configuration declares: proof that the monitor finds them."""

import difflib
import math
from collections.abc import Sequence

import torch
from torch import nn

from quantwatch.config.schema import FaultConfig
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.quiet import shorten


def plant(
    module: nn.Module,
    anatomy: Anatomy,
    faults: Sequence[FaultConfig],
    packed: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Change weights in place as the faults say; return what was done, in words.

    `packed` are the scopes whose weights are integer codes by now.

    A weight that is shared (tied) with another module is untied first, so that the fault stays
    where it was declared.

    Raises:
        ModelError: the scope doesn't exist, has no weight of its own, is packed, or is too small.
    """
    for fault in faults:
        if fault.scope in packed:
            raise _packed(fault.scope, "integer codes")
    return tuple(note for fault in faults for note in _plant(module, anatomy, fault))


def _packed(scope: str, form: object) -> ModelError:
    return ModelError(
        f"fault scope {scope!r}: its weight is packed ({form}) and can't be changed; "
        'use execution = "dequantized"'
    )


def _plant(module: nn.Module, anatomy: Anatomy, fault: FaultConfig) -> list[str]:
    part = _part(module, anatomy, fault.scope)
    notes = _untie(module, part, fault.scope)
    weight = _weight(part)
    assert weight is not None
    with torch.no_grad():
        if fault.scale is not None:
            weight.mul_(fault.scale)
            return [*notes, f"fault planted: {fault.scope} weight × {fault.scale:g}"]
        assert fault.nan_at is not None
        _set_nan(weight, fault.nan_at, fault.scope)
    return [*notes, f"fault planted: {fault.scope} weight{list(fault.nan_at)} = NaN"]


def _set_nan(weight: torch.Tensor, at: tuple[int, int], scope: str) -> None:
    shape = tuple(weight.shape)
    inside = len(shape) == 2 and all(0 <= i < size for i, size in zip(at, shape, strict=True))
    if not inside:
        raise ModelError(f"fault nan_at = {list(at)}: the weight of {scope} has shape {shape}")
    weight[at] = math.nan


def _part(module: nn.Module, anatomy: Anatomy, scope: str) -> nn.Module:
    """Return the module of a scope; it has a floating-point weight."""
    places = {**anatomy.linears, **anatomy.taps}
    if scope not in places:
        close = difflib.get_close_matches(scope, places, n=3)
        hint = f"close: {', '.join(close)}" if close else f"it has {shorten(list(places), 6)}"
        raise ModelError(f"fault scope {scope!r} does not exist in this model; {hint}")
    part = module.get_submodule(anatomy.module_path(scope))
    weight = _weight(part)
    if weight is None:
        inside = [name for name in anatomy.linears if name.startswith(f"{scope}.")]
        raise ModelError(
            f"fault scope {scope!r} has no weight of its own; "
            + (
                f"name one inside it: {shorten(inside, 8)}"
                if inside
                else "none is inside it either"
            )
        )
    if not weight.is_floating_point():
        raise _packed(scope, weight.dtype)
    return part


def _weight(part: nn.Module) -> torch.Tensor | None:
    weight = getattr(part, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _untie(module: nn.Module, part: nn.Module, scope: str) -> list[str]:
    weight = _weight(part)
    assert weight is not None
    sharing = [
        f"{path}.{name}" if path else name
        for path, other in module.named_modules(remove_duplicate=False)
        for name, parameter in other.named_parameters(recurse=False)
        if parameter is weight and other is not part
    ]
    if not sharing:
        return []
    part.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return [f"{scope} was untied from {shorten(sharing)} so that the fault stays in it"]
