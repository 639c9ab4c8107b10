"""Globs of a recipe that match nothing: a misspelt one would quantize what it was to keep.

A rule must match at least one matrix that rules decide about (the embedding has a spec of its own),
an exclusion at least one module that holds weights: norms may be named, they are never quantized
anyway. `head` and `router` stand in every recipe and may be absent from a model.
"""

import fnmatch
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from torch import nn

from quantwatch_kernels.quantize.recipe import Recipe

__all__ = ["module_names", "own_globs", "refuse_unmatched"]

Aliases = Collection[str]
"""What a glob may match of one place."""

_MAY_BE_ABSENT = frozenset({"head", "router"})
_MOST_NAMES = 3


def refuse_unmatched(
    recipe: Recipe, matrices: Iterable[Aliases], others: Iterable[Aliases]
) -> None:
    """Check the globs of `layers` on `matrices`, those of `exclude` on the `others` as well.

    Raises ValueError naming the glob and the names that are most like it.
    """
    matrices = list(matrices)
    for rule in recipe.layers:
        _require(recipe, f"the rule {rule.match!r}", rule.match, matrices)
    everything = [*matrices, *others]
    for glob in recipe.exclude:
        if glob not in _MAY_BE_ABSENT:
            _require(recipe, f"the exclusion {glob!r}", glob, everything)


def module_names(names: object) -> list[str] | None:
    """Return `modules_to_not_convert` as a list; raises ValueError for anything but names."""
    if names is None:
        return None
    given = list(names) if isinstance(names, list | tuple) else []
    wanted = isinstance(names, list | tuple)
    if not wanted or not all(isinstance(name, str) and name for name in given):
        allowed = "a list of module paths, or of their last components"
        raise ValueError(f"modules_to_not_convert is {names!r:.80}; allowed: {allowed}.")
    return given


def own_globs(path: str, module: nn.Module) -> set[str]:
    """Return globs over the weights that a module holds itself; none if it only holds modules."""
    # Stacked experts are places below their module, and so is what isn't called weight.
    return {
        path if name == "weight" and parameter.ndim < 3 else f"{path}.*"
        for name, parameter in module.named_parameters(recurse=False)
    }


def _require(recipe: Recipe, what: str, glob: str, places: Collection[Aliases]) -> None:
    if any(fnmatch.fnmatchcase(alias, glob) for aliases in places for alias in aliases):
        return
    names = sorted({alias for aliases in places for alias in aliases})
    nearest = ", ".join(get_close_matches(glob, names, _MOST_NAMES, cutoff=0.0))
    raise ValueError(
        f"recipe {recipe.name}: {what} matches nothing in the model; "
        f"the nearest names are {nearest or '(there is no matrix)'}."
    )
