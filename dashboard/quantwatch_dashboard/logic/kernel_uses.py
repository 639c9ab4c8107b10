"""Which checks run an operator, as far as their configuration tells. Pure.

Kept are a check's recipe and execution, not which kernel answered for each layer. So this says
which operators are asked for, and what the newest run noted: layers that fell back, and calls that
another back end did or that were slow. An operator of which neither says anything is `unknown`,
unless a check names it literally.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quantwatch.config.recipes import RECIPES, is_recipe_file
from quantwatch.domain import WARNING, Json

_MEASURING = {
    "output_statistics": "",
    "leaked_mass": "",
    "tap_statistics": "",
    "feature_kl": "",
    "lens_statistics": "lens_positions",
    "lens_bfloat16": "lens_products",
    "lens_int16": "lens_products",
    "head_rows": "lens",
    "isolated_error": "isolated_fraction",
}
"""Operators that every check measures with → the setting that is 0 where it doesn't."""
_CHOSEN = {"head_rows": "estimated", "lens_bfloat16": "bfloat16", "lens_int16": "int16"}
"""Operators that a check measures with where the setting is this word."""
_BY_BITS = {8: "int8_linear", 4: "int4_linear"}
_OTHER_BITS = "lowbit_linear"
_INTEGERS = "w8a8_linear"
_COMPUTED = frozenset({*_BY_BITS.values(), _OTHER_BITS, _INTEGERS})
"""Operators of which a recipe and an execution say whether they run."""


FALLBACK = "computed dequantized, since "
"""How the note on layers begins that no kernel computes (models/recipes.py)."""
_SILENT: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Use:
    """One variant of a check that asks for an operator. `backend` is None for the default one.

    `fallbacks` are the notes of its newest run on what was computed another way, or slowly.
    """

    check: str
    variant: str
    backend: str | None
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Uses:
    """Who asks for an operator.

    `measures` is the number of checks that measure with it, None for an operator that is itself
    measured. `doubtful` are checks whose recipe is in a file that this page does not read.
    """

    known: bool
    uses: tuple[Use, ...] = ()
    measures: int | None = None
    doubtful: tuple[str, ...] = ()


Notes = Mapping[tuple[str, str], tuple[str, ...]]
"""What the newest run noted, by check and variant."""


def uses(
    operators: Iterable[str], configs: Mapping[str, Json], notes: Notes = _SILENT
) -> dict[str, Uses]:
    """Return who asks for each operator, from the checks' configurations by name."""
    asked = [
        (op, _noted(op, use, notes))
        for check, config in configs.items()
        for op, use in _asked(check, config)
    ]
    doubtful = tuple(check for check, config in configs.items() if any(map(_in_file, _all(config))))
    return {
        name: _uses(name, [*asked, *_seen(name, asked, notes)], doubtful, configs)
        for name in operators
    }


def _uses(
    name: str, asked: list[tuple[str, Use]], doubtful: tuple[str, ...], configs: Mapping[str, Json]
) -> Uses:
    if name in _MEASURING:
        setting = _MEASURING[name]
        measured = [c for c in configs.values() if _is_set(c, setting, _CHOSEN.get(name))]
        return Uses(known=True, measures=len(measured))
    found = [use for op, use in asked if op == name]
    found += [
        Use(check, str(variant.get("name", "reference")), None)
        for check, config in configs.items()
        for variant in _all(config)
        if _names(variant, name)
    ]
    found = list(dict.fromkeys(found))
    if name in _COMPUTED:
        return Uses(known=True, uses=tuple(found), doubtful=doubtful)
    return Uses(known=bool(found), uses=tuple(found))


def _is_set(config: Json, setting: str, word: str | None) -> bool:
    if setting == "lens_positions" and config.get("lens_products", "float32") != "float32":
        return False  # another operator reads them
    if word is not None:
        return bool(config.get(setting) == word)
    return not setting or bool(config.get(setting, 1))


def _noted(operator: str, use: Use, notes: Notes) -> Use:
    own = notes.get((use.check, use.variant), ())
    layers = tuple(note for note in own if note.startswith(FALLBACK))
    return replace(use, fallbacks=(*layers, *_events(operator, own)))


def _events(operator: str, notes: Iterable[str]) -> tuple[str, ...]:
    """Return what an operator did unasked in a run, as `capture/events.py` words it."""
    said = (note.removeprefix(WARNING) for note in notes if note.startswith(WARNING))
    return tuple(words for words in said if words.startswith(f"{operator} ("))


def _seen(
    operator: str, asked: Iterable[tuple[str, Use]], notes: Notes
) -> Iterator[tuple[str, Use]]:
    """Yield who was seen to run an operator of which the configuration doesn't tell."""
    known = {(use.check, use.variant) for op, use in asked if op == operator}
    for (check, variant), own in notes.items():
        events = _events(operator, own)
        if events and (check, variant) not in known:
            yield operator, Use(check, variant, None, events)


def _all(config: Json) -> Iterator[Mapping[str, Any]]:
    """Yield the reference and the candidates."""
    if config.get("reference"):
        yield config["reference"]
    yield from config.get("candidates") or ()


def _asked(check: str, config: Json) -> Iterator[tuple[str, Use]]:
    for variant in _all(config):
        execution = str(variant.get("execution") or "dequantized")
        recipe = _recipe(variant)
        # Dequantized is float arithmetic on the quantized values: no kernel runs.
        if recipe is not None and execution != "dequantized":
            use = Use(check, str(variant.get("name", "reference")), execution)
            yield from ((op, use) for op in _operators(recipe))


def _recipe(variant: Mapping[str, Any]) -> Mapping[str, Any] | None:
    given = variant.get("recipe")
    if isinstance(given, Mapping):
        return given
    named = RECIPES.get(str(given))
    return None if named is None else named.model_dump(mode="json")


def _in_file(variant: Mapping[str, Any]) -> bool:
    executes = str(variant.get("execution") or "dequantized") != "dequantized"
    return executes and is_recipe_file(variant.get("recipe"))


def _operators(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Yield the operators that a recipe's weights and inputs ask for."""
    inputs = recipe.get("activations") or {}
    integer = (
        str(inputs.get("format", "")).endswith("8")
        and not inputs.get("static")
        and inputs.get("granularity", "token") == "token"
    )
    for spec in (recipe, *(recipe.get("layers") or ())):
        by_channel = spec.get("granularity") in ("channel", "tensor")
        if integer and spec.get("weights") == "int8" and by_channel:
            yield _INTEGERS
        elif spec.get("weights"):
            yield _packed(spec)
    if recipe.get("embedding"):
        yield _packed(recipe["embedding"])


def _packed(spec: Mapping[str, Any]) -> str:
    bits = int(str(spec["weights"]).removeprefix("u").removeprefix("int"))
    return _BY_BITS.get(bits, _OTHER_BITS)


def _names(value: object, name: str) -> bool:
    """Say whether a configuration has this very word as a value, at any depth."""
    if isinstance(value, Mapping):
        return any(_names(each, name) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_names(each, name) for each in value)
    return value == name
