"""References small enough for a test: tied, frozen, and over few ids; and texts for them."""

from typing import Any

import torch
from tests.monitor.tiny_models import llama
from torch import Tensor

VOCABULARY = 96
WINDOW = 512
"""Tokens of a window, as tables cut a text."""


def tied_llama(*, scale: float = 1.0, **changes: Any) -> Any:
    """Return a frozen model with one matrix for embedding and head; see `llama` for `scale`."""
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 48, "tie_word_embeddings": True}
    built = llama(**{**sizes, **changes}, scale=scale)
    return built.requires_grad_(False)


def token_ids(count: int, length: int, seed: int) -> list[Tensor]:
    """Return `count` texts [1, length] of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (1, length), generator=generator) for _ in range(count)]


def byte_text(num_windows: int) -> str:
    """Return a text of so many windows for a tokenizer of bytes."""
    return "".join(chr(97 + (i * i) % 23) for i in range(WINDOW * num_windows))
