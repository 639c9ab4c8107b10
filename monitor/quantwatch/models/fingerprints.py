"""Digests that say what a variant is made of, one per cause of drift."""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.recipes import recipe_digest
from quantwatch.config.schema import FaultConfig, RecipeConfig
from quantwatch.domain import Json
from quantwatch.errors import ResourceError
from quantwatch.models.checkpoint import read_config
from quantwatch.models.quantized import leaf_tensors
from quantwatch.telemetry import canonical_sha

# Who wrote a configuration, and what we set ourselves: none of it changes the model.
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
_SETTLED_S = 2.0


def files_sha(paths: Iterable[Path], cache_dir: Path) -> str:
    """Return the digest of files as stored; where they lie, and how they are listed, is no part."""
    return canonical_sha(sorted(file_sha(path, cache_dir) for path in paths))


def file_sha(path: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of a file, remembered under (path, size, mtime, inode)."""
    real = path.resolve()
    stat = real.stat()
    key = canonical_sha([str(real), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    note = cache_dir / "shas" / key
    known = note.read_text() if note.is_file() else ""
    if re.fullmatch("[0-9a-f]{64}", known):
        return known
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file written a moment ago may change again within the clock's step, with equal size.
    if time.time() - stat.st_mtime > _SETTLED_S:
        _remember(note, digest)
    return digest


def _remember(note: Path, digest: str) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=note.parent)
        with os.fdopen(handle, "w") as file:
            file.write(digest)
        Path(temporary).replace(note)
    except OSError as error:
        raise ResourceError(f"cache folder {note.parent}: {error.strerror}") from error


def module_sha(module: nn.Module) -> str:
    """Return the digest of a module's parameters and buffers: names, dtypes, shapes and bits."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return canonical_sha({name: tensor_sha(tensor) for name, tensor in named})


def tensor_sha(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bits."""
    digest = hashlib.sha256()
    for leaf in leaf_tensors(tensor):
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)};".encode())
        flat = leaf.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def folder_config_sha(folder: Path, *, allow_code: bool) -> str:
    """Return the digest of a folder's configuration, and of its model code where that may run."""
    config = read_config(folder)
    code = sorted(folder.glob("*.py")) if allow_code and "auto_map" in config else []
    shas = [hashlib.sha256(path.read_bytes()).hexdigest() for path in code]
    return canonical_sha([_stable(config), shas])


def module_config_sha(module: nn.Module) -> str:
    """Return the digest of a module's configuration, or of its printed structure without one."""
    settings: Any = getattr(module, "config", None)
    if hasattr(settings, "to_dict"):
        return canonical_sha(_jsonable(_stable(settings.to_dict())))
    return canonical_sha(repr(module))


def recipe_sha(recipe: RecipeConfig | None, calibration_sha: str = "") -> str:
    """Return the digest of a recipe and of the token ids it was calibrated on, '' without one.

    Where those ids came from, and how they were chosen, is no part of it.
    """
    if recipe is None:
        return ""
    if not calibration_sha:
        return recipe_digest(recipe)
    without_source = recipe.model_copy(update={"calibration": None})
    return canonical_sha([recipe_digest(without_source), calibration_sha])


def fault_sha(faults: tuple[FaultConfig, ...]) -> str:
    """Return the digest of the planted faults, '' without any."""
    return canonical_sha([fault.model_dump(mode="json") for fault in faults]) if faults else ""


def serve_sha(
    module: nn.Module,
    dtype: torch.dtype,
    device: str,
    execution: str,
    serve: Json | None = None,
) -> str:
    """Return the digest of how a model is computed: dtype, device type, attention, execution.

    And of its serving, if it has any: without, the digest is what it always was.
    """
    settings = getattr(module, "config", None)
    attention = getattr(settings, "_attn_implementation", None)
    return canonical_sha(
        {
            "dtype": str(dtype),
            "device": torch.device(device).type,
            "attention": attention,
            "execution": execution,
            **({} if serve is None else {"serve": serve}),
        }
    )


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _stable(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _VOLATILE
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else repr(value)
