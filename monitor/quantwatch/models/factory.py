"""Models built by the user's own code: ``pkg.mod:build``."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from quantwatch.errors import ModelError
from quantwatch.models.quiet import explained


def build(spec: str, base_dir: Path) -> tuple[nn.Module, Any | None]:
    """Call a factory; `base_dir` is importable for it. Return the module and its tokenizer, if any.

    Raises:
        ModelError: nothing to import, an error inside the factory, or a return value that is
            neither a module nor (module, tokenizer).
    """
    with _importable(base_dir):
        function = _find(spec, base_dir)
        with explained(f"factory {spec!r} failed"):
            built = function()
    module, tokenizer = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"factory {spec!r} returned {type(module).__name__}; "
            "a torch.nn.Module or (module, tokenizer) is wanted"
        )
    return module, tokenizer


def _find(spec: str, base_dir: Path) -> Callable[[], Any]:
    module_name, _, name = spec.partition(":")
    importlib.invalidate_caches()
    with explained(f"factory {spec!r}: can't import {module_name!r} (looked in {base_dir} too)"):
        module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise ModelError(f"factory {spec!r}: {module_name} has no function {name!r}")
    return function  # type: ignore[no-any-return]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
