"""Tokenizer and context length of a variant without its weights: enough to count tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantwatch.config.schema import VariantConfig
from quantwatch.models.checkpoint import read_config
from quantwatch.models.declared import DeclaredSizes, declared_sizes
from quantwatch.models.fingerprints import file_sha
from quantwatch.models.gguf_cache import converted_folder
from quantwatch.models.quiet import explained, quiet
from quantwatch.models.shapes import CONTEXT_KEYS
from quantwatch.models.sources import resolve_source
from quantwatch.models.tokenizers import load_tokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """What a model makes of text."""

    tokenizer: Any | None
    max_positions: int | None
    sizes: DeclaredSizes | None = None
    """What the configuration declares of its layers; None where it doesn't."""


def load_text_side(config: VariantConfig, *, base_dir: Path, cache_dir: Path) -> TextSide | None:
    """Return a local variant's tokenizer and context; None for hub repositories and factories.

    A GGUF file is converted on the way, as the run itself will need it.

    Raises:
        ModelError: the files are missing or corrupt.
    """
    source = resolve_source(config, base_dir)
    with quiet():
        if source.kind == "gguf":
            digest = file_sha(source.path, cache_dir)
            folder = converted_folder(source.path, digest, cache_dir)
        elif source.kind == "folder":
            folder = source.path
        else:
            return None
        tokenizer = load_tokenizer(folder, allow_code=config.allow_code)
    with explained(f"{folder / 'config.json'}: its context length can't be read"):
        settings = read_config(folder)
        settings = settings.get("text_config") or settings
        found = (settings.get(key) for key in CONTEXT_KEYS)
        context = next((int(value) for value in found if value), None)
        return TextSide(tokenizer, context, declared_sizes(settings))
