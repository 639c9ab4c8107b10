"""Long texts for the table of strategies: windows of a text, what a model continues them with.

A reference's greedy continuation is decoded once, with a plain cache. Whether a candidate would
write the same needs no decoding of its own: fed the reference's tokens in one pass that reads what
a decode loop would, its first other choice is where the two part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantwatch.errors import PromptError
from quantwatch.kernel_lab.texts import WINDOW, measured_text
from quantwatch.kernel_lab.throughput import run_cached


@dataclass(frozen=True, slots=True)
class LongTexts:
    """Windows of equal length, int64 [1, T] each."""

    name: str
    windows: tuple[Tensor, ...]


def long_texts(tokenizer: Any, text: Any, count: int, length: int) -> LongTexts:
    """Return `count` windows of `length` tokens, the text's own windows or prompts joined.

    Raises PromptError when there is less text.
    """
    per = -(-length // WINDOW)
    found = measured_text(tokenizer, text, windows=None if text is None else count * per)
    joined = torch.cat([window.flatten() for window in found.windows])
    if len(joined) < count * length:
        raise PromptError(
            f"{found.name}: {len(joined)} tokens; {count} windows of {length} are needed"
        )
    windows = joined[: count * length].reshape(count, 1, length)
    return LongTexts(found.name, tuple(windows))


@dataclass(frozen=True, slots=True)
class Continued:
    """Prompts with a reference's greedy continuations, int64 [N, prompt + new]."""

    ids: Tensor
    prompt: int
    usable: Tensor
    """int64 [N]: new tokens up to the first that one pass of the reference would choose otherwise.

    A tie in the last bit: nobody can be said to part there.
    """


def greedy(model: Any, prompts: Tensor, new: int) -> Continued:
    """Continue prompts [N, T], all of one length, by `new` tokens each."""
    with torch.inference_mode():
        output, cached = run_cached(model, prompts)
        parts = [prompts, output.logits[:, -1:].argmax(-1)]
        for _ in range(new - 1):
            logits = model(parts[-1], use_cache=True, **cached).logits
            parts.append(logits[:, -1:].argmax(-1))
    ids = torch.cat(parts, 1)
    continued = Continued(ids, prompts.shape[1], torch.full((len(ids),), new))
    at, parted = parting(model, continued)
    return Continued(ids, prompts.shape[1], torch.where(parted, at, new))


def parting(model: Any, continued: Continued) -> tuple[Tensor, Tensor]:
    """Return where a model's greedy text parts from the reference's, and whether it does.

    Number of new tokens in common int64 [N], at most those usable, and bool [N].
    """
    first, last = continued.prompt - 1, continued.ids.shape[1] - 1
    common, parted = list[int](), list[bool]()
    for ids, usable in zip(continued.ids, continued.usable.tolist(), strict=True):
        with torch.inference_mode():
            keep = torch.arange(first, last)
            logits = model(ids[None], use_cache=False, logits_to_keep=keep).logits[0]
        other = (logits.argmax(-1) != ids[first + 1 :]).nonzero()
        at = min(int(other[0]) if len(other) else last - first, usable)
        common.append(at)
        parted.append(len(other) > 0 and at < usable)
    return torch.tensor(common), torch.tensor(parted)


def rate_per_1000(common: Tensor, parted: Tensor) -> float:
    """Return partings per 1,000 tokens written in common: those that never part count, too."""
    # The token at which they part was written as well.
    exposure = int(common.sum()) + int(parted.sum())
    return 1000 * int(parted.sum()) / exposure if exposure else 0.0


def median_parting(common: Sequence[int], parted: Sequence[bool]) -> float | None:
    """Return the median number of tokens in common; None where half or more never parted."""
    order = sorted(zip(common, parted, strict=True))
    position, has = order[(len(order) - 1) // 2]
    return float(position) if has and sum(parted) * 2 > len(order) else None
