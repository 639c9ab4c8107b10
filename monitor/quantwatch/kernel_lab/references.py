"""The reference of a table: a model in float32, taken off the grid it may lie on."""

from pathlib import Path

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import UserError
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.texts import Text, measured_text
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch_kernels.quantize.off_grid import take_off_grid_


def load_reference(model: str, cache_dir: Path, *, off_grid_seed: int | None = 0) -> LoadedModel:
    """Load a model in float32 and rescale its channels; None leaves it on its grid.

    Raises ModelError when it can't be loaded, ValueError when it can't be rescaled.
    """
    config = VariantConfig(model=model, dtype="float32")
    loaded = load_variant("reference", config, base_dir=Path.cwd(), cache_dir=cache_dir)
    if off_grid_seed is not None:
        take_off_grid_(loaded.module, off_grid_seed)
    return loaded


def yardstick(
    loaded: LoadedModel, text: Path | None = None, *, windows: int | None = 8
) -> Yardstick:
    """Return the harness of a loaded reference on a text file, or on core-v1."""
    measured: Text = measured_text(loaded.tokenizer, text, windows=windows)
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
    layers = take_off_grid_(loaded.module, seed)
    for part in (loaded.module, loaded.tokenizer):
        save = getattr(part, "save_pretrained", None)
        if save is None:
            raise UserError(f"{model}: a {type(part).__name__} can't be saved as a checkpoint")
        save(folder)
    return layers
