"""Recipes read back from the JSON that `to_json` writes: what isn't understood is an error.

A recipe is stored beside results and in checkpoints, so a misread key would quantize another way
than the file says. Every key is known, has one type, and its combination with the others is what
the values of `recipe` allow; the message names the key, the value found and what is allowed.
`recipe_from_json(r.to_json()).to_json() == r.to_json()` for every recipe.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from quantwatch_kernels.formats import INT_FORMATS, IntFormat
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    Granularity,
    LayerRule,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
    WeightSpec,
)

__all__ = ["recipe_from_json", "spec_from_json"]

T = TypeVar("T")
_CHOICES = ("zero", "clip", "method", "rounding", "scales")
_SPEC = frozenset({"weights", "range", "granularity", "group_size", "scale_dtype", *_CHOICES})
_RECIPE = ("exclude", "layers", "embedding", "activations", "smooth", "rotation", "residual_dtype")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WHOLE: dict[str, Granularity] = {"tensor": PerTensor(), "channel": PerChannel()}


def recipe_from_json(values: object) -> Recipe:
    """Return the recipe that `Recipe.to_json` described.

    Raises ValueError naming the key, its value and what is allowed.
    """
    read = _Reader(values, "recipe")
    read.known(_SPEC | set(_RECIPE))
    given: dict[str, Callable[[str], object]] = {
        name: parse
        for name, parse in (
            ("exclude", read.globs),
            ("layers", lambda key: tuple(_rules(read.listed(key)))),
            ("embedding", lambda key: spec_from_json(read[key], read.at(key))),
            ("activations", lambda key: _activations(_Reader(read[key], read.at(key)))),
            ("smooth", read.number),
            ("rotation", lambda key: _rotation(_Reader(read[key], read.at(key)))),
            ("residual_dtype", lambda key: tuple(_residual(read.listed(key)))),
        )
        if name in read
    }
    weights = _spec(read)
    parsed: dict[str, Any] = {name: parse(name) for name, parse in given.items()}
    return read.build(lambda: Recipe(weights, **parsed))


def spec_from_json(values: object, where: str = "weights") -> WeightSpec:
    """Return the spec that `WeightSpec.to_json` described; `where` names it in errors.

    Raises ValueError naming the key, its value and what is allowed.
    """
    read = _Reader(values, where)
    read.known(_SPEC)
    return _spec(read)


def _spec(read: "_Reader") -> WeightSpec:
    fmt = read.format("weights")
    if "range" in read and read["range"] != [fmt.qmin, fmt.qmax]:
        raise read.wrong("range", f"[{fmt.qmin}, {fmt.qmax}], the codes of {fmt.name}")
    granularity = read.granularity()
    hints = get_type_hints(WeightSpec)
    chosen: dict[str, Any] = {
        name: read.choice(name, get_args(hints[name])) for name in _CHOICES if name in read
    }
    if "scale_dtype" in read:
        chosen["scale_dtype"] = read.dtype("scale_dtype")
    return read.build(lambda: WeightSpec(fmt, granularity, **chosen))


def _rules(values: list[object]) -> list[LayerRule]:
    rules = []
    for index, value in enumerate(values):
        read = _Reader(value, f"recipe.layers[{index}]")
        read.known({"match"} | _SPEC)
        match = read.text("match")
        # A rule of a glob alone keeps its layers in full precision.
        rules.append(LayerRule(match, _spec(read) if len(read.values) > 1 else None))
    return rules


def _activations(read: "_Reader") -> ActivationSpec:
    read.known({"format", "granularity", "group_size", "static", "observer", "clip_ratio"})
    fmt, granularity = read.format("format"), read.granularity()
    chosen: dict[str, Any] = {}
    if "static" in read:
        chosen["static"] = read.flag("static")
    if "clip_ratio" in read:
        chosen["clip_ratio"] = read.number("clip_ratio")
    # Written as null where nothing is observed.
    if read.values.get("observer") is not None:
        allowed = get_args(get_type_hints(ActivationSpec)["observer"])
        chosen["observer"] = read.choice("observer", allowed)
    return read.build(lambda: ActivationSpec(fmt, granularity, **chosen))


def _rotation(read: "_Reader") -> RotationSpec:
    read.known({field.name for field in fields(RotationSpec)})
    chosen: dict[str, Any] = {}
    for name in ("residual", "values", "down"):
        if name in read:
            chosen[name] = read.flag(name)
    if "seed" in read:
        chosen["seed"] = read.whole("seed")
    if read.values.get("block") is not None:
        chosen["block"] = read.whole("block")
    return read.build(lambda: RotationSpec(**chosen))


def _residual(values: list[object]) -> Iterator[tuple[str, torch.dtype]]:
    for index, value in enumerate(values):
        read = _Reader(value, f"recipe.residual_dtype[{index}]")
        read.known({"match", "dtype"})
        yield read.text("match"), read.dtype("dtype")


class _Reader:
    """One JSON object and its place, for messages."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"{where} must be a JSON object; it is {values!r:.80}.")
        self.values: dict[str, object] = dict(values)
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> object:
        if key not in self.values:
            raise ValueError(f"{self.where} lacks {key!r}; it has {', '.join(self.values)}.")
        return self.values[key]

    def at(self, key: str) -> str:
        return f"{self.where}.{key}"

    def wrong(self, key: str, allowed: str) -> ValueError:
        return ValueError(f"{self.at(key)} is {self[key]!r:.80}; allowed: {allowed}.")

    def known(self, names: "set[str] | frozenset[str]") -> None:
        if unknown := sorted(self.values.keys() - names):
            raise ValueError(
                f"{self.where} has the unknown key {unknown[0]!r} = "
                f"{self.values[unknown[0]]!r:.80}; allowed: {', '.join(sorted(names))}."
            )

    def build(self, make: Callable[[], T]) -> T:
        """Name the place of a combination that the values themselves refuse."""
        try:
            return make()
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def text(self, key: str) -> str:
        value = self[key]
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that isn't empty")
        return value

    def choice(self, key: str, allowed: tuple[object, ...]) -> object:
        value = self[key]
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, ", ".join(map(str, allowed)))
        return value

    def flag(self, key: str) -> bool:
        value = self[key]
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def whole(self, key: str) -> int:
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "a whole number")
        return value

    def number(self, key: str) -> float:
        value = self[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return float(value)

    def listed(self, key: str) -> list[object]:
        value = self[key]
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list")
        return list(value)

    def globs(self, key: str) -> tuple[str, ...]:
        globs = [glob for glob in self.listed(key) if isinstance(glob, str) and glob]
        if len(globs) != len(self.listed(key)):
            raise self.wrong(key, "a list of globs")
        return tuple(globs)

    def dtype(self, key: str) -> torch.dtype:
        value = self[key]
        if not isinstance(value, str) or value not in _DTYPES:
            raise self.wrong(key, ", ".join(_DTYPES))
        return _DTYPES[value]

    def format(self, key: str) -> IntFormat:
        value = self[key]
        if not isinstance(value, str) or value not in INT_FORMATS:
            raise self.wrong(key, ", ".join(INT_FORMATS))
        return INT_FORMATS[value]

    def granularity(self) -> Granularity:
        name = self.choice("granularity", ("tensor", "channel", "group"))
        if name == "group":
            size = self.whole("group_size")
            return self.build(lambda: PerGroup(size))
        if self.values.get("group_size") is not None:
            raise self.wrong("group_size", f"null with granularity {name}")
        return _WHOLE[str(name)]
