"""The files of a model folder, checked before transformers sees them, so that errors name one."""

import json
from pathlib import Path
from typing import Any

from quantwatch.errors import ModelError
from quantwatch.models.quiet import listing, one_line, shorten

# In the order in which transformers looks for them.
_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_LFS_POINTER = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ModelError naming file and line when it isn't one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {one_line(error)}") from error
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object but a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; raises ModelError when it isn't a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; name the GGUF file itself, or set gguf_file = {ggufs[0]!r}" if ggufs else ""
        raise ModelError(
            f"{folder} is not a model folder: no config.json ({listing(folder)}){hint}"
        )
    return read_json(path)


def weight_files(folder: Path) -> list[Path]:
    """List the weight files that transformers would load from a folder, each of them present.

    Raises:
        ModelError: there are none, or a shard that the index names is missing.
    """
    explicit = read_config(folder).get("transformers_weights")
    candidates = _WEIGHTS if explicit is None else (str(explicit),)
    found = next((folder / name for name in candidates if (folder / name).is_file()), None)
    if found is None:
        wanted = ", ".join(candidates)
        raise ModelError(f"{folder} has no weights: none of {wanted} ({listing(folder)})")
    return _shards(found) if found.name.endswith(".index.json") else [found]


def check_folder(folder: Path) -> None:
    """Check configuration and weight files of a model folder without reading the weights.

    Raises:
        ModelError: naming the file that is missing, truncated or garbled, and how.
    """
    for path in weight_files(folder):
        _check_weights(path)


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    files = [index.parent / str(name) for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{index} names weight files that are missing: {shorten(missing)}")
    return files


def _check_weights(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if not start:
        raise ModelError(f"{path} is empty")
    if start == _LFS_POINTER:
        raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`")
    if path.suffix == ".safetensors":
        tensor_shapes(path)


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype (``F32``, ``BF16``, ``I8``, …) and shape of each tensor of a safetensors file.

    Raises:
        ModelError: the file is truncated or garbled.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or corrupt: {one_line(error)}") from error
