"""The files of a model folder, checked before transformers sees them, so that errors name one."""

import json
from collections.abc import Iterable
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


def refuse_bare_codes(files: Iterable[Path]) -> None:
    """Refuse weights stored as whole numbers: they are codes, and nothing says of which values.

    For checkpoints that don't say how they are quantized: as floats they would be garbage. Raises
    ModelError.
    """
    for path in files:
        stored = tensor_shapes(path) if path.suffix == ".safetensors" else {}
        for name, (dtype, shape) in stored.items():
            if dtype[0] in "IU" and len(shape) > 1 and name.endswith(".weight"):
                raise ModelError(
                    f"{path}: {name} is stored as {dtype}, and config.json has no "
                    "quantization_config that says which values its codes stand for"
                )


def refuse_contradictions(files: Iterable[Path]) -> None:
    """Raise ModelError for a weight that two shards have with different values or types.

    Which one counts depends on who reads them.
    """
    shards = [path for path in files if path.suffix == ".safetensors"]
    first: dict[str, Path] = {}
    for path in shards if len(shards) > 1 else ():
        for name in tensor_shapes(path):
            other = first.setdefault(name, path)
            if other != path and _bits(other, name) != _bits(path, name):
                raise ModelError(
                    f"{path.parent}: {name} is in {other.name} and in {path.name}, with different "
                    "values: which of them counts depends on who reads them"
                )


def _bits(path: Path, name: str) -> tuple[object, ...]:
    """Return a stored tensor so that it compares equal to a copy, NaN included."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    odd = [file for file in weight_map.values() if not isinstance(file, str) or not file]
    if odd:
        raise ModelError(f"{index}: weight_map names files by text; one is {odd[0]!r:.80}")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
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
