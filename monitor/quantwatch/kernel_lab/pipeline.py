"""The int4 pipeline as recipes: three steps up to a recipe that has int4 as its main format.

1. Linear layers in the recipe's main format, rounded to nearest, ranges as the recipe has them.
2. The same, rounded by GPTQ.
3. The recipe whole: its format for the embedding (tied to the head, it is one matrix) and its rules
   for layers that lose most in int4. The embedding saves more than the rules cost.

`FILE` is the one that is shipped for SmolLM2-135M; its rules name layers of that model, as those of
the ladder do, and `quantize_` refuses a model that lacks them.
"""

from dataclasses import replace
from typing import NamedTuple

from quantwatch_kernels.quantize.recipe import PerGroup, Recipe, WeightSpec

FILE = "smollm2-int4-pipeline.toml"


class Step(NamedTuple):
    """A name that says what the step adds, and the recipe so far."""

    name: str
    recipe: Recipe


def steps(recipe: Recipe) -> tuple[Step, ...]:
    """Return the three recipes in order, the last being `recipe`.

    Raises ValueError for one that isn't an int4 pipeline: 4 bits in groups by GPTQ, an embedding.
    """
    main = recipe.weights
    grouped = isinstance(main.granularity, PerGroup)
    if main.format.bits != 4 or main.method != "gptq" or not grouped or recipe.embedding is None:
        raise ValueError(
            "an int4 pipeline has int4 or uint4 in groups by gptq as its main format and a format "
            f"for the embedding; {recipe.name} with "
            f"{'no' if recipe.embedding is None else 'an'} embedding isn't one."
        )
    second = replace(recipe, layers=(), embedding=None)
    return (
        Step(
            f"1: linear layers {main.format.name}, groups of {main.granularity.group_size(0)}",
            second.with_weights(method="nearest"),
        ),
        Step("2: rounded by GPTQ", second),
        Step(f"3: {recipe.embedding.format.name} for embedding and sensitive layers", recipe),
    )


def nearest(recipe: Recipe) -> Recipe:
    """Return a recipe of the same bytes and kernels that is quick to apply: rounded to nearest."""

    def quick(spec: WeightSpec | None) -> WeightSpec | None:
        return None if spec is None else replace(spec, method="nearest", clip="none")

    rules = tuple(replace(rule, weights=quick(rule.weights)) for rule in recipe.layers)
    return replace(
        recipe.with_weights(method="nearest", clip="none"),
        embedding=quick(recipe.embedding),
        layers=rules,
    )
