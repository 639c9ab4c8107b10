"""The reference of a table: a model in float32, taken off the grid it may lie on."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError, UserError
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.texts import Text, measured_text
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.quiet import quiet
from quantwatch_kernels.quantize.off_grid import take_off_grid_
from quantwatch_kernels.quantize.saved import save_whole


def load_reference(model: str, cache_dir: Path, *, off_grid_seed: int | None = 0) -> LoadedModel:
    """Load a model in float32 and rescale its channels; None leaves it on its grid.

    Raises ModelError when it can't be loaded or rescaled.
    """
    config = VariantConfig(model=model, dtype="float32")
    loaded = load_variant("reference", config, base_dir=Path.cwd(), cache_dir=cache_dir)
    if off_grid_seed is not None:
        try:
            take_off_grid_(loaded.module, off_grid_seed)
        except ValueError as error:
            raise ModelError(f"{model}: {error}") from error
    return loaded


def yardstick(
    loaded: LoadedModel,
    text: Path | None = None,
    *,
    windows: int | None = 8,
    last: int | None = None,
) -> Yardstick:
    """Return the harness of a loaded reference on a text file, or on core-v1.

    `last`: of each window at most so many tokens are scored; None: the second half.
    """
    measured: Text = measured_text(loaded.tokenizer, text, windows=windows)
    measured = replace(measured, last=last)
    scopes = {path: str(scope) for path, scope in loaded.anatomy.scopes_by_path.items()}
    return Yardstick(loaded.module, measured, scopes)


def write_off_grid(model: str, cache_dir: Path, folder: Path, seed: int) -> int:
    """Write a model, taken off its grid, as a float32 checkpoint that a check can name.

    Returns how many layers were rescaled. Raises UserError when the folder exists or the model
    can't be saved, ValueError when it can't be rescaled.
    """
    if folder.exists():
        raise UserError(f"{folder} exists already; name a new folder")
    loaded = load_reference(model, cache_dir, off_grid_seed=None)
    _check_parts(model, loaded)
    layers = take_off_grid_(loaded.module, seed)
    _save_whole((loaded.module, loaded.tokenizer), folder)
    return layers


def _check_parts(model: str, loaded: LoadedModel) -> None:
    for what, part in (("model", loaded.module), ("tokenizer", loaded.tokenizer)):
        if part is None:
            raise UserError(f"{model}: it has no {what}, which a checkpoint needs")
        if not hasattr(part, "save_pretrained"):
            kind = type(part).__name__
            raise UserError(f"{model}: its {what}, a {kind}, can't be saved as a checkpoint")


def _save_whole(parts: Sequence[Any], folder: Path) -> None:
    """Write a folder whole or not at all: beside its place first."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
            with quiet():
                for part in parts:
                    save_whole(part, Path(work) / folder.name)
            (Path(work) / folder.name).rename(folder)
    except OSError as error:
        raise UserError(f"{folder} can't be written: {error}") from error
