"""Where models and prompts of the service's checks may lie: what the file names can't leave it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from quantwatch.config.files import is_there, local_path, looks_like_path, recipe_path
from quantwatch.config.problems import config_error, dotted
from quantwatch.config.recipes import RecipeConfig, load_recipe, recipe_config
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.config.variants import VariantConfig
from quantwatch.errors import ConfigError

Location = tuple[int | str, ...]
Variant = TypeVar("Variant", bound=VariantConfig)


def allowed_roots(config: Config, base_dir: Path) -> tuple[Path, ...]:
    """Return the folders that the service may read from, links followed: the file's by default."""
    roots = [local_path(root, base_dir) for root in config.service.allowed_roots] or [base_dir]
    return tuple(Path(os.path.realpath(root)) for root in roots)


def require_inside(config: Config, base_dir: Path, origin: str = "quantwatch.toml") -> None:
    """Raise ConfigError naming every path of a check that leaves the allowed roots."""
    roots = allowed_roots(config, base_dir)
    problems = [
        problem
        for name, check in config.checks.items()
        for problem in outside(check, base_dir, roots, ("checks", name))
    ]
    _refuse(problems, origin)


def outside(
    check: CheckConfig, base_dir: Path, roots: Sequence[Path], location: Location = ()
) -> list[str]:
    """Return what is wrong with a check's paths, in words; [] when all lie inside the roots.

    Links are followed, so that a link inside does not lead out. Hub ids and the demo model are no
    paths. Call it again right before a run: a link may have been moved since.
    """
    named = list(_paths(check, base_dir, location))
    return [
        f"{dotted(where)}: {path} lies outside of what the service may read; allowed: "
        f"{', '.join(map(str, roots)) or 'nothing'} (service.allowed_roots)"
        for where, path in named
        if not any(_resolved(path).is_relative_to(root) for root in roots)
    ]


def read_inside(
    check: CheckConfig, base_dir: Path, roots: Sequence[Path], location: Location, origin: str
) -> CheckConfig:
    """Return a check whose recipe files have become tables, every path inside the roots.

    A file is read once, so that what was looked at is what is used, and two candidates that name
    it have the same recipe. Raises ConfigError for paths outside and for files that can't be read.
    """
    _refuse(outside(check, base_dir, roots, location), origin)
    whole = _recipes_read(check, base_dir)
    _refuse(outside(whole, base_dir, roots, location), origin)
    return whole


def _refuse(problems: Sequence[str], origin: str) -> None:
    if problems:
        raise config_error(origin, problems)


def _recipes_read(check: CheckConfig, base_dir: Path) -> CheckConfig:
    known: dict[Path, RecipeConfig] = {}

    def read(variant: Variant) -> Variant:
        path = recipe_path(variant, base_dir)
        if path is None:
            return variant
        if path not in known:
            known[path] = load_recipe(path)
        return variant.model_copy(update={"recipe": known[path]})

    candidates = tuple(read(candidate) for candidate in check.candidates)
    return check.model_copy(update={"reference": read(check.reference), "candidates": candidates})


def runs_own_code(check: CheckConfig) -> tuple[str, ...]:
    """Return which variants of a check may run code of their own (`allow_code = true`)."""
    variants: list[tuple[str, VariantConfig]] = [("reference", check.reference)]
    variants += [(candidate.name, candidate) for candidate in check.candidates]
    return tuple(name for name, variant in variants if variant.allow_code)


def _paths(check: CheckConfig, base_dir: Path, at: Location) -> Iterator[tuple[Location, Path]]:
    for index, file in enumerate(check.suite.files):
        yield (*at, "suite", "files", index), local_path(file, base_dir)
    yield from _model_paths((*at, "reference"), check.reference, base_dir)
    for index, candidate in enumerate(check.candidates):
        yield from _model_paths((*at, "candidates", index), candidate, base_dir)


def _model_paths(
    at: Location, variant: VariantConfig, base_dir: Path
) -> Iterator[tuple[Location, Path]]:
    recipe = recipe_path(variant, base_dir)
    if recipe is not None:
        yield (*at, "recipe"), recipe
    for index, file in enumerate(_calibration_files(variant, base_dir)):
        yield (*at, "recipe", "calibration", "files", index), file
    served = variant.serve.calibration if variant.serve is not None else None
    for index, text in enumerate(served.suite.files if served is not None else ()):
        yield (*at, "serve", "calibration", "files", index), local_path(text, base_dir)
    if variant.model is None:
        return
    path = local_path(variant.model, base_dir)
    # What exists is loaded as a path, even if it looks like a hub id.
    if looks_like_path(variant.model) or is_there(path):
        yield (*at, "model"), path
    if variant.gguf_file is not None:
        # A hub repository has no parent folders, either.
        yield (*at, "gguf_file"), (path / variant.gguf_file)


def _calibration_files(variant: VariantConfig, base_dir: Path) -> list[Path]:
    """Files that the recipe is calibrated on; a recipe file that can't be read names none."""
    if variant.recipe is None:
        return []
    try:
        calibration = recipe_config(variant.recipe, base_dir).calibration
    except ConfigError:
        return []
    return [] if calibration is None else [local_path(f, base_dir) for f in calibration.suite.files]


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
