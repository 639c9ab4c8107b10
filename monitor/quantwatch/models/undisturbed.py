"""A module that somebody else owns, measured and given back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from quantwatch.models.shapes import text_settings

_CACHE = "use_cache"


def prepare(module: nn.Module) -> None:
    """Put a module into eval mode, without a KV cache."""
    module.eval()
    for settings in _with_cache(module):
        setattr(settings, _CACHE, False)


@contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Restore what `prepare` changes when the body ends: training flags and `use_cache`."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    settings = [each for module in modules for each in _with_cache(module)]
    caches = [(each, getattr(each, _CACHE)) for each in settings]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for each, value in caches:
            setattr(each, _CACHE, value)


def _with_cache(module: nn.Module) -> list[Any]:
    found = (getattr(module, "config", None), text_settings(module))
    return [settings for settings in found if hasattr(settings, _CACHE)]
