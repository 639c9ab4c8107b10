"""Continue a sample, token by token: greedily, or sampled with a seed.

Through the model's own cache where its forward takes one; a model without is run on the whole
sequence each time. Ends after the model's end-of-sequence token. Written out, since the library's
own generation draws from the global random state and takes settings from a model's defaults.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.pool import device_of

__all__ = ["cache_name", "continue_sample"]


def continue_sample(
    model: nn.Module, ids: Tensor, steps: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Return up to `steps` tokens [S] that follow ids [1, T], at least one; temperature 0: greedy.

    Raises ValueError when they don't fit the model's context or the logits aren't finite.
    """
    if steps < 1 or temperature < 0:
        raise ValueError(
            f"steps must be at least 1 and the temperature 0 or more; they are {steps} and "
            f"{temperature}."
        )
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + steps > limit:
        raise ValueError(
            f"{ids.shape[1]} tokens and {steps} generated ones don't fit the context of {limit}."
        )
    generator = torch.Generator().manual_seed(seed)
    ends, found = _end_tokens(model), []
    given = whole = ids.to(device_of(model))
    name, cache = cache_name(model), None
    with torch.no_grad():
        for _ in range(steps):
            output = model(given, **({name: cache, "use_cache": True} if name else {}))
            token = _choose(output.logits[0, -1], temperature, generator)
            found.append(token)
            if token in ends:
                break
            cache = getattr(output, name, None) if name else None
            new = torch.tensor([[token]], device=whole.device)
            whole = torch.cat([whole, new], 1)
            given = whole if cache is None else new
    return torch.tensor(found)


def cache_name(model: nn.Module) -> str | None:
    """Return what the model's forward calls its cache, if it takes one."""
    # The library renamed it; the old name warns.
    known: Any = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), None)


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    logits = logits_V.double().cpu()
    if not bool(torch.isfinite(logits).any()) or bool(logits.isnan().any()):
        raise ValueError("the logits of a generated token are not finite.")
    if temperature == 0:
        return int(logits.argmax())
    shares = (logits / temperature).softmax(-1)
    return int(torch.multinomial(shares, 1, generator=generator))


def _end_tokens(model: nn.Module) -> frozenset[int]:
    """Return the ids that end a text; generation settings, where there are any, know more."""
    found: set[int] = set()
    for place in ("generation_config", "config"):
        ends = getattr(getattr(model, place, None), "eos_token_id", None)
        found |= set(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
    return frozenset(found)
