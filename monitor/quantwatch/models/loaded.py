"""A model that is ready to be measured."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch.domain import Variant
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.marks import NO_FILES, Marks
from quantwatch.models.shapes import device_of


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module in eval mode on its device, with what the comparison needs to know about it."""

    module: nn.Module
    tokenizer: Any | None
    """A transformers tokenizer, None when the source has none."""
    variant: Variant
    anatomy: Anatomy
    num_tokens: int | None
    """Number of real token ids (`len(tokenizer)`); the logits may be wider (padded vocabulary)."""
    max_positions: int | None
    """Context length, None when the configuration doesn't say."""
    dtype: torch.dtype
    """Computing dtype: of the head's output and of the hidden states."""
    calibrated_on: tuple[Tensor, ...] = ()
    """Token ids, int64 [1, T] each, that its recipe looked at."""
    files: Marks = NO_FILES
    """Those that its module computes in."""

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where token ids go."""
        return device_of(self.module)
