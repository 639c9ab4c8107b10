"""What a recipe moved between modules: hidden states that can't be compared as they are.

A rotated stream is rotated back before it is compared; a module behind a smoothed norm can't be fed
the reference's input, so it has no isolated error. What is not measurable is told, never guessed.
"""

from quantwatch.domain import HEAD, Scope
from quantwatch.errors import CaptureError
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.quantize.basis import why_other_input, why_other_output


def other_inputs(model: LoadedModel) -> dict[Scope, str]:
    """Return the places that expect other inputs than an unchanged model's, with the reason."""
    places = {**model.anatomy.linears, **model.anatomy.taps}
    found = {s: why_other_input(model.module.get_submodule(p)) for s, p in places.items()}
    return {scope: reason for scope, reason in found.items() if reason is not None}


def incomparable(model: LoadedModel) -> dict[Scope, str]:
    """Return what is not measured at each place of a changed model, in words."""
    told = {s: f"no isolated error: {why}" for s, why in other_inputs(model).items()}
    for scope, path in model.anatomy.taps.items():
        reason = why_other_output(model.module.get_submodule(path))
        if reason is not None and scope != HEAD:
            told[scope] = f"not compared: {reason}"
    return told


def refuse_as_reference(model: LoadedModel) -> None:
    """Raise CaptureError for a model in another basis: it is no instrument for others."""
    changed = other_inputs(model)
    if changed:
        scope, reason = next(iter(changed.items()))
        raise CaptureError(
            f"the reference can't have this recipe: {scope}: {reason}, so candidates could not be "
            "compared with it layer by layer; quantize the candidates"
        )
