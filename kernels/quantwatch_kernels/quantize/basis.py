"""Which modules of a changed model take or give other hidden states than the unchanged one's.

Rotation, smoothing and AWQ leave the logits what they were and change what lies between: a linear
layer behind a smoothed norm expects inputs divided by s, a rotated layer gives its output times Q.
Who compares hidden states module by module has to know, or compares different things. Marks are
kept beside a module's state, not in it: they are no part of what is computed or saved.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from quantwatch_kernels.quantize.hadamard import Hadamard

__all__ = [
    "carry_marks",
    "give_back",
    "mark_input",
    "mark_output",
    "why_other_input",
    "why_other_output",
]

_INPUT, _OUTPUT = "quantwatch_other_input", "quantwatch_other_output"


@dataclass(frozen=True, slots=True)
class _Output:
    rotation: Hadamard | None
    reason: str


def mark_input(module: nn.Module, reason: str) -> None:
    """Note that a module expects other inputs than before; the first reason stays."""
    module.__dict__.setdefault(_INPUT, reason)


def why_other_input(module: nn.Module) -> str | None:
    """Say why a module can't be fed what the unchanged model's module is fed; None: it can."""
    reason = module.__dict__.get(_INPUT)
    return reason if isinstance(reason, str) else None


def mark_output(module: nn.Module, rotation: Hadamard | None, reason: str) -> None:
    """Note that a module gives its output times `rotation`, or (None) something else altogether."""
    module.__dict__[_OUTPUT] = _Output(rotation, reason)


def give_back(module: nn.Module, output: Tensor) -> Tensor | str:
    """Return an output [.., H] in the unchanged model's basis, or why it can't be had."""
    mark = module.__dict__.get(_OUTPUT)
    if not isinstance(mark, _Output):
        return output
    return mark.reason if mark.rotation is None else mark.rotation.inverse(output)


def why_other_output(module: nn.Module) -> str | None:
    """Say why a module's output can't be brought back to the unchanged model's basis."""
    mark = module.__dict__.get(_OUTPUT)
    return mark.reason if isinstance(mark, _Output) and mark.rotation is None else None


def carry_marks(old: nn.Module, new: nn.Module) -> None:
    """Give a module that replaces another one its marks."""
    for name in (_INPUT, _OUTPUT):
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]
