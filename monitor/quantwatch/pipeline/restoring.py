"""The smallest set of parts to restore so that a check passes, found by running it.

Parts are taken in the order of what they cost alone, the costliest first; how many of them are
needed is found by halving (each try restores some, loads the candidate anew and runs and judges the
whole check), so that 30 layers take five tries. Given up: sets that are no beginning of that order;
where errors cancel, a smaller one may exist.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from quantwatch.config.recipe_parts import LayerConfig
from quantwatch.config.recipes import RecipeConfig, recipe_config
from quantwatch.domain import (
    EMBEDDING,
    HEAD,
    Attribution,
    CandidateResult,
    Progress,
    Restoration,
    Scope,
    Verdict,
)
from quantwatch.errors import ModelError, UserError
from quantwatch.pipeline.attribution import restorable
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.loading import load_one
from quantwatch.pipeline.measure import Models, measure_models
from quantwatch.pipeline.reloading import Reloaded
from quantwatch.telemetry import new_run_id

if TYPE_CHECKING:
    from quantwatch.store.session import Database

PASSES = (Verdict.PASS, Verdict.IMPROVEMENT)


class Prefix(NamedTuple):
    """The fewest that pass, None where none that was tried does."""

    size: int | None
    num_tries: int
    is_smallest: bool
    """Whether one fewer was tried, too (or is none at all), or all of them, and doesn't pass."""


def smallest_prefix(count: int, passes: Callable[[int], bool], most: int) -> Prefix:
    """Return the smallest of 1 … count that passes by halving, in at most so many tries.

    None restored does not pass, and is not tried. If more restored never fails where fewer passes,
    it is the smallest there is.
    """
    fails, enough, tries = 0, count + 1, 0
    while enough - fails > 1 and tries < most:
        middle = (fails + enough) // 2
        tries += 1
        if passes(middle):
            enough = middle
        else:
            fails = middle
    return Prefix(enough if enough <= count else None, tries, enough - fails == 1)


def own_recipe(models: Reloaded) -> RecipeConfig:
    """Return the candidate's recipe. Raises UserError for a candidate that was made without one."""
    config = models.config
    if config.recipe is None:
        raise UserError(
            f"{config.name} has no recipe that a layer could be left out of: it is a checkpoint of "
            "its own; its shares can be attributed (leave --out away), a recipe can't be made"
        )
    return recipe_config(config.recipe, models.request.base_dir)


def restored_recipe(recipe: RecipeConfig, scopes: Sequence[Scope]) -> RecipeConfig:
    """Return a recipe that leaves these parts as they are; whatever else it says stays.

    Raises UserError for what would leave nothing to quantize by its own rules.
    """
    rules = tuple(
        LayerConfig(match=str(scope) if scope == HEAD else f"{scope}.*")
        for scope in scopes
        if scope != EMBEDDING
    )
    said = recipe.model_dump(exclude_defaults=True)
    said |= {"layers": (*rules, *recipe.layers)} if rules else {}
    if EMBEDDING in scopes:
        said.pop("embedding", None)
    try:
        return RecipeConfig.model_validate(said)
    except ValidationError as error:
        raise UserError(f"without {', '.join(scopes)} the recipe can't be: {error}") from error


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs the check with parts of the candidate restored. Nothing of it is stored."""

    models: Reloaded
    progress: Progress
    database: "Database | None" = None
    """Where the check's baseline is; without one the absolute rules decide."""
    tell: Callable[[str], None] = lambda _: None

    def run(self, recipe: RecipeConfig) -> CandidateResult:
        """Load the candidate with another recipe, measure the whole suite and judge it."""
        models, request = self.models, self.models.request
        config = models.config.model_copy(update={"recipe": recipe})
        check = request.check.model_copy(update={"candidates": (config,)})
        request = replace(request, check=check)
        loaded = load_one(request, config.name, config)
        both = Models(models.reference, {config.name: loaded}, {}, {config.name: ()})
        started = datetime.now(UTC)
        with measure_models(request, both, models.suite, self.progress) as measured:
            result = judge(request, measured, new_run_id(), started, self.database)
        found = result.find(config.name)
        if found is None:
            raise RuntimeError(f"{config.name} was measured, but the result doesn't name it")
        return found


def restore(bench: Bench, found: Attribution, before: Verdict | None, most: int) -> Restoration:
    """Return which parts to restore, tried at most so often; `before` is the run's own verdict.

    Raises UserError for a candidate without a recipe.
    """
    recipe = own_recipe(bench.models)
    if before in PASSES:
        return Restoration((), before, None, 0, True, "the check passes as it is", None)
    order = restorable(bench.models, found)
    results: dict[int, CandidateResult] = {}

    def passes(size: int) -> bool:
        result = _run(bench, recipe, order, size)
        if result is None:
            return False
        results[size] = result
        bench.tell(f"{size} of {len(order)} restored: {result.verdict}, KL {_kl(result):.4g}")
        return result.verdict in PASSES

    prefix = smallest_prefix(len(order), passes, most)
    if prefix.size is None:
        words = _none(len(order), prefix, results)
        return Restoration((), None, None, prefix.num_tries, prefix.is_smallest, words, None)
    chosen = tuple(order[: prefix.size])
    result = results[prefix.size]
    words = f"{prefix.size} of {len(order)} parts restored: {result.verdict}"
    if not prefix.is_smallest:
        words += f" (fewer may do: {prefix.num_tries} tries were allowed)"
    said = restored_recipe(recipe, chosen).model_dump(mode="json", exclude_defaults=True)
    verdict, tries = result.verdict, prefix.num_tries
    return Restoration(chosen, verdict, _kl(result), tries, prefix.is_smallest, words, said)


def _kl(result: CandidateResult) -> float:
    row = result.find("logit_kl")
    return float("nan") if row is None or row.mean is None else row.mean


def _run(
    bench: Bench, recipe: RecipeConfig, order: Sequence[Scope], size: int
) -> CandidateResult | None:
    """Return a try's result; None when it would be the reference: nothing is left to quantize."""
    try:
        return bench.run(restored_recipe(recipe, order[:size]))
    except ModelError:
        if size < len(order):
            raise
        bench.tell(f"all {size} restored: nothing is left to quantize")
        return None


def _none(count: int, prefix: Prefix, results: Mapping[int, CandidateResult]) -> str:
    """Return why no set is enough, and what the largest that was run reaches."""
    if not count:
        return "no part costs anything, so there is none to restore"
    size = max(results, default=0)
    many = f"all {count}" if size == count else f"{size} of {count}"
    reached = f"; {many} parts restored reach {_reached(results[size])}" if size else ""
    if not prefix.is_smallest:
        return f"none is found with the tries that are allowed ({prefix.num_tries}){reached}"
    if size == count:
        return f"none is enough{reached}"
    return f"none is enough that leaves anything to quantize{reached}"


def _reached(result: CandidateResult) -> str:
    return f"KL {_kl(result):.4g}, verdict {result.verdict}"
