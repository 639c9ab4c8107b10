"""Tokenizers: load one if there is one, and say what it does to text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantwatch.domain import Json
from quantwatch.models.checkpoint import read_json
from quantwatch.models.quiet import explained
from quantwatch.telemetry import canonical_sha

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "tekken.json")
_OTHER_VOCABULARIES = ("spiece.model", "sentencepiece*.model", "*.vocab")
# Settings of one call, not properties of the tokenizer.
_TRANSIENT = ("truncation", "padding", "version")


def load_tokenizer(folder: Path, *, allow_code: bool = False) -> Any | None:
    """Load a folder's tokenizer; None when it has none.

    Raises:
        ModelError: there is one, but it can't be read.
    """
    from transformers import AutoTokenizer

    patterns = (*_VOCABULARIES, *_OTHER_VOCABULARIES)
    if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
        return None
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            read_json(folder / name)
    with explained(f"{folder}: its tokenizer can't be loaded"):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=allow_code)


def vocabulary(tokenizer: Any) -> dict[str, int]:
    """Return the token → id map, added tokens included."""
    return {str(token): int(index) for token, index in tokenizer.get_vocab().items()}


def num_ids(tokenizer: Any) -> int:
    """Return the number of ids in use: the largest plus one, since vocabularies may have holes."""
    return max(vocabulary(tokenizer).values(), default=-1) + 1


def backend_parts(tokenizer: Any) -> Json:
    """Return the parts that decide how text becomes ids: model, merges, normalizer, added tokens, …

    A tokenizer without a `tokenizers` backend gives its class and vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__, "model": {"vocab": vocabulary(tokenizer)}}
    parts: Mapping[str, Any] = json.loads(backend.to_str())
    return {name: value for name, value in parts.items() if name not in _TRANSIENT}


def tokenizer_sha(tokenizer: Any | None) -> str:
    """Return the SHA-256 of what a tokenizer does, chat template and special tokens included."""
    if tokenizer is None:
        return ""
    special = getattr(tokenizer, "special_tokens_map", {})
    return canonical_sha(
        {
            "parts": backend_parts(tokenizer),
            "chat_template": getattr(tokenizer, "chat_template", None),
            "special_tokens": {name: str(value) for name, value in special.items()},
        }
    )
