"""What a model says of fixed texts, in float64, and how far two answers are apart."""

from typing import Any

import torch
from torch import Tensor

IDS = torch.arange(1, 41).view(2, 20)  # 0 is padding: its embedding is zero


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    """Return logits [batch, tokens, vocabulary], float64."""
    found: Tensor = model(ids, use_cache=False).logits
    return found.double()


def moved(after: Tensor, before: Tensor) -> float:
    """Return the distance relative to how much the logits of a token differ among themselves."""
    return float((after - before).norm() / (before - before.mean(-1, keepdim=True)).norm())
