"""Check that the files that a configuration names exist, before anything is loaded."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantwatch.config.problems import config_error, dotted
from quantwatch.config.recipes import is_recipe_file, recipe_config
from quantwatch.config.schema import CheckConfig, Config
from quantwatch.config.variants import VariantConfig
from quantwatch.errors import ConfigError

Location = tuple[int | str, ...]


def validate_files(config: Config, base_dir: Path, origin: str = "quantwatch.toml") -> None:
    """Raise ConfigError if a suite, calibration or recipe file or a local model does not exist.

    A recipe file is read, and must hold a recipe.

    Relative paths start at `base_dir`, the configuration's folder. What looks like a hub id
    (`owner/name`) is not looked up: that needs the network.
    """
    problems = [
        problem
        for name, check in config.checks.items()
        for problem in _missing_files(("checks", name), check, base_dir)
    ]
    if problems:
        raise config_error(origin, problems)


def looks_like_path(model: str) -> bool:
    """Say whether a model is meant as a path: a hub id is `name` or `owner/name`, never more."""
    return model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1


def local_path(text: str, base_dir: Path) -> Path:
    """Return a path as configured, `~` expanded, relative to the configuration's folder."""
    # Unlike Path's, this leaves ~nobody as it is: a file that isn't there, like any other.
    return base_dir / os.path.expanduser(text)


def is_there(path: Path) -> bool:
    """Say whether a path can be reached; a name that no system allows is not there, either."""
    return os.path.exists(path)


def listed_twice(files: Sequence[str], base_dir: Path) -> str | None:
    """Return a file that is in the list twice, under two names perhaps; its prompts would count
    double.
    """
    places = [os.path.realpath(local_path(file, base_dir)) for file in files]
    again = [file for at, file in enumerate(files) if places[at] in places[:at]]
    return again[0] if again else None


def _missing_files(location: Location, check: CheckConfig, base_dir: Path) -> Iterator[str]:
    yield from _missing_texts((*location, "suite"), check.suite.files, base_dir)
    yield from _missing_model((*location, "reference"), check.reference, base_dir)
    for index, candidate in enumerate(check.candidates):
        yield from _missing_model((*location, "candidates", index), candidate, base_dir)


def _missing_texts(location: Location, files: Sequence[str], base_dir: Path) -> Iterator[str]:
    for index, file in enumerate(files):
        path = local_path(file, base_dir)
        if not is_there(path) or path.is_dir():
            what = "is a folder; name the files in it" if is_there(path) else "does not exist"
            yield f"{dotted((*location, 'files', index))}: {path} {what}"
    if (again := listed_twice(files, base_dir)) is not None:
        yield f"{dotted((*location, 'files'))}: {again} is listed twice"


def recipe_path(variant: VariantConfig, base_dir: Path) -> Path | None:
    """Return the file that a variant's recipe is in; None for a table or a name."""
    recipe = variant.recipe
    return (
        local_path(recipe, base_dir) if isinstance(recipe, str) and is_recipe_file(recipe) else None
    )


def _missing_recipe(location: Location, variant: VariantConfig, base_dir: Path) -> Iterator[str]:
    path, where = recipe_path(variant, base_dir), (*location, "recipe")
    if variant.recipe is None:
        return
    if path is not None and not path.is_file():
        yield f"{dotted(where)}: {path} does not exist or is not a file"
        return
    try:
        recipe = recipe_config(variant.recipe, base_dir)
    except ConfigError as error:
        yield f"{dotted(where)}: {error}"
        return
    if recipe.calibration is not None:
        files = recipe.calibration.suite.files
        yield from _missing_texts((*where, "calibration", "suite"), files, base_dir)


def _missing_model(location: Location, variant: VariantConfig, base_dir: Path) -> Iterator[str]:
    yield from _missing_recipe(location, variant, base_dir)
    if variant.serve is not None and variant.serve.calibration is not None:
        files = variant.serve.calibration.suite.files
        yield from _missing_texts((*location, "serve", "calibration", "suite"), files, base_dir)
    if variant.model is None:
        return
    path = local_path(variant.model, base_dir)
    if not is_there(path):
        if looks_like_path(variant.model):
            yield f"{dotted((*location, 'model'))}: {path} does not exist"
    elif path.is_dir() and variant.gguf_file and not is_there(path / variant.gguf_file):
        yield f"{dotted((*location, 'gguf_file'))}: {path / variant.gguf_file} does not exist"
