"""Which modules of a changed model take or give other hidden states than the unchanged one's.

Rotation, smoothing and AWQ leave the logits what they were and change what lies between: a linear
layer behind a smoothed norm expects inputs divided by s, a rotated layer gives its output times Q.
Who compares hidden states module by module has to know, or compares different things. Marks are
kept beside a module's state, not in it: they are no part of what is computed. A checkpoint notes
them in its description (`marks_to_json`), since its weights alone can't tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.hadamard import Hadamard

__all__ = [
    "carry_marks",
    "give_back",
    "mark_from_json_",
    "mark_input",
    "mark_output",
    "marks_to_json",
    "residual_rotation",
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
    """Return an output [.., H] in the unchanged model's basis, or why it can't be had.

    What is rotated back is float32 (float64 for float64): rounded to 16 bits a second time it would
    show an error that the model doesn't have.
    """
    mark = module.__dict__.get(_OUTPUT)
    if not isinstance(mark, _Output):
        return output
    if mark.rotation is None:
        return mark.reason
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    return mark.rotation.to(output.device).inverse(exact)


def why_other_output(module: nn.Module) -> str | None:
    """Say why a module's output can't be brought back to the unchanged model's basis."""
    mark = module.__dict__.get(_OUTPUT)
    return mark.reason if isinstance(mark, _Output) and mark.rotation is None else None


def residual_rotation(model: nn.Module) -> Hadamard | None:
    """Return Q of a model with a rotated residual stream: its hidden states are the plain · Q."""
    marks = (module.__dict__.get(_OUTPUT) for module in model.modules())
    turned = (mark.rotation for mark in marks if isinstance(mark, _Output))
    return next((rotation for rotation in turned if rotation is not None), None)


def carry_marks(old: nn.Module, new: nn.Module) -> None:
    """Give a module that replaces another one its marks."""
    for name in (_INPUT, _OUTPUT):
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]


def marks_to_json(model: nn.Module) -> dict[str, Any]:
    """Return all marks of a model by path, and its rotation; {} when it has none."""
    inputs = {path: why_other_input(module) for path, module in model.named_modules()}
    outputs = {path: module.__dict__.get(_OUTPUT) for path, module in model.named_modules()}
    marked = {path: mark for path, mark in outputs.items() if isinstance(mark, _Output)}
    first = residual_rotation(model)
    values: dict[str, Any] = {
        "inputs": {path: reason for path, reason in inputs.items() if reason is not None},
        "rotated": {path: mark.reason for path, mark in marked.items() if mark.rotation},
        "changed": {path: mark.reason for path, mark in marked.items() if not mark.rotation},
        "rotation": first and {"width": first.width, "seed": first.seed, "block": first.block},
    }
    return {name: value for name, value in values.items() if value}


def mark_from_json_(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Mark a model as `marks_to_json` described it.

    Raises ValueError for a description that isn't understood or names a module that isn't there.
    """
    try:
        rotation = Hadamard(**values["rotation"]) if "rotation" in values else None
        for path, reason in values.get("inputs", {}).items():
            mark_input(model.get_submodule(path), str(reason))
        for kind, turned in (("rotated", rotation), ("changed", None)):
            for path, reason in values.get(kind, {}).items():
                if kind == "rotated" and rotation is None:
                    raise ValueError(f"{path} is rotated, but no rotation is given")
                mark_output(model.get_submodule(path), turned, str(reason))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"other_basis = {dict(values)!r:.80} isn't understood: {error}") from None
