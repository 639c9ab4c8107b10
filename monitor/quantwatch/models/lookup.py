"""Whether all that a variant names is there, before any weight is read."""

from pathlib import Path

from quantwatch.config.recipes import recipe_config
from quantwatch.config.schema import VariantConfig
from quantwatch.models import hub
from quantwatch.models.opening import check_device
from quantwatch.models.sources import resolve_source


def look_up(config: VariantConfig, base_dir: Path) -> None:
    """Find a variant's device, model and recipe; of a hub repository the small files are fetched.

    Raises:
        ModelError: the model or the device doesn't exist, or the hub can't give it.
        ConfigError: the recipe's file is missing or wrong.
    """
    check_device(config.device)
    if config.recipe is not None:
        recipe_config(config.recipe, base_dir)
    source = resolve_source(config, base_dir)
    if source.kind == "hub":
        hub.snapshot(source.location, config.revision, source.similar)
