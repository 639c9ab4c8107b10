"""Put something in front of or behind a module's forward, where every caller passes by.

Not by hooks: what replays a module calls `module.forward` itself, and a hook would be skipped there
(isolated errors would then measure another model). The module becomes an instance of a subclass
with the same name, so hooks on it still fire once and see what the caller gives and gets:
parameters, paths and `isinstance` stay as they were. Transforms run in the order in which they were
added: a rotation first, the rounding of what it gives second.
"""

from typing import Any

from torch import Tensor, nn

from quantwatch_kernels.quantize.basis import carry_marks

__all__ = [
    "add_input_transform",
    "add_output_transform",
    "carry_transforms",
    "has_input_transform",
    "interpose",
    "transformed_input",
]


class _TransformsInput(nn.Module):
    input_transforms: nn.ModuleList

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for transform in self.input_transforms:
            x = transform(x)
        return super().forward(x, *args, **kwargs)


class _TransformsOutput(nn.Module):
    output_transforms: nn.ModuleList

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        for transform in self.output_transforms:
            output = transform(output)
        return output


def interpose(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Make `mixin.forward` the forward of `module`; what it was is `super().forward` there."""
    if not isinstance(module, mixin):
        module.__class__ = _combined(mixin, type(module))


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _combined(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    if (mixin, base) not in _classes:
        made = type(base.__name__, (mixin, base), {"__module__": base.__module__})
        _classes[mixin, base] = made
    return _classes[mixin, base]


def add_input_transform(module: nn.Module, transform: nn.Module) -> None:
    """Let `module` compute on transform(input), after the transforms it has already."""
    if not isinstance(module, _TransformsInput):
        interpose(module, _TransformsInput)
        module.input_transforms = nn.ModuleList()
    module.input_transforms.append(transform)  # type: ignore[operator,union-attr]


def add_output_transform(module: nn.Module, transform: nn.Module) -> None:
    """Let `module` return transform(output), after the transforms it has already."""
    if not isinstance(module, _TransformsOutput):
        interpose(module, _TransformsOutput)
        module.output_transforms = nn.ModuleList()
    module.output_transforms.append(transform)  # type: ignore[operator,union-attr]


def has_input_transform(module: nn.Module) -> bool:
    """Say whether what `module` is called with is not what its matrix is multiplied with."""
    return isinstance(module, _TransformsInput)


def transformed_input(module: nn.Module, x: Tensor) -> Tensor:
    """Return what the matrix of `module` is multiplied with when the module is called with `x`.

    Calibration of a weight needs this, not what a hook on the module sees.
    """
    if isinstance(module, _TransformsInput):
        for transform in module.input_transforms:
            x = transform(x)
    return x


def carry_transforms(old: nn.Module, new: nn.Module) -> None:
    """Give a module that replaces another one its input transforms and the marks of its basis."""
    carry_marks(old, new)
    if isinstance(old, _TransformsInput):
        for transform in old.input_transforms:
            add_input_transform(new, transform)
