"""A multiple-choice task by log-likelihood: which of four options would a model rather write?

The score of an option is Σ log p(token | all before), natural logarithm, over its tokens as the
continuation of the question, in float64 from the model's logits in float32. Accuracy is the share
of items whose right option has the largest sum; the field calls it acc. `accuracy_norm` divides
each sum by the option's length in characters first (acc_norm). acc is what is kept or not, since it
needs no choice of a length; on options of about the same length they say the same.

Where does an option begin? Question and option are tokenized as one text, and scored is what lies
beyond the tokens that the question alone and all four whole texts begin with. A tokenizer that
joins the question's end with an option's beginning is thus scored on that token, for all four
options from the same place on. The tokenizer's BOS is in front where it wants one; no EOS is ever
scored.

A question is run once, with a cache that its four options share; questions with equally many tokens
are run together, so that nothing is padded but the ends of options, which nothing looks back at.
The margin is the right option's sum minus the best wrong one's. Ties take the first letter and are
counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch.errors import PromptError
from quantwatch.kernel_lab.kept import Kept, kept_share
from quantwatch.kernel_lab.throughput import run_cached
from quantwatch.prompts.choices import LETTERS, ChoiceItem
from quantwatch.prompts.tokens import special_prefix, text_ids

_BATCH = 8
"""Questions run at once: 32 rows of options, 60 MB of logits at 49k ids."""


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """Token ids of what all options continue, and of each option; none is empty."""

    prefix: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ChoiceFigures:
    """A candidate beside the reference. If any score isn't finite, only `num_nonfinite` says so."""

    accuracy: float
    accuracy_norm: float
    kept: Kept
    """Of accuracy; the standard error is paired over items."""
    kept_norm: Kept
    same_choice: float
    """Share of items on which candidate and reference choose the same option."""
    margin_change: float
    """Mean change of the margin, nats; negative: less sure of the right option."""
    num_ties: int
    """Items of the candidate whose best score two options share."""
    num_nonfinite: int


def encode_item(item: ChoiceItem, tokenizer: Any) -> EncodedItem:
    """Split an item where its options begin to differ from its question, in tokens.

    Raises PromptError where nothing is left to continue, or an option has no token of its own.
    """
    start = special_prefix(tokenizer)
    question = [*start, *text_ids(tokenizer, item.prompt, special=False)]
    wholes = [
        [*start, *text_ids(tokenizer, f"{item.prompt} {option}", special=False)]
        for option in item.options
    ]
    prefix = _common([question, *wholes])
    if not prefix:
        raise PromptError(f"{item.where}: no token is common to its question and its options")
    options = tuple(tuple(whole[len(prefix) :]) for whole in wholes)
    for letter, option in zip(LETTERS, options, strict=True):
        if not option:
            raise PromptError(f"{item.where}: option {letter} has no token of its own")
    return EncodedItem(tuple(prefix), options)


def _common(sequences: Sequence[list[int]]) -> list[int]:
    """Return what all sequences begin with."""
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*sequences, strict=False))
    return [ids[0] for ids in same]


def option_scores(module: nn.Module, items: Sequence[EncodedItem]) -> NDArray[np.float64]:
    """Return Σ log p of each option, [items, 4], nats. Raises ValueError without a cache."""
    scores = np.empty((len(items), len(LETTERS)))
    with torch.inference_mode():
        for numbers in _batches(items):
            scores[numbers] = _batch(module, [items[number] for number in numbers]).numpy()
    return scores


def _batches(items: Sequence[EncodedItem]) -> Iterator[list[int]]:
    """Yield the numbers of up to 8 items with equally long prefixes."""

    def length(number: int) -> int:
        return len(items[number].prefix)

    for _, same in groupby(sorted(range(len(items)), key=length), key=length):
        numbers = list(same)
        yield from (numbers[at : at + _BATCH] for at in range(0, len(numbers), _BATCH))


def _batch(module: nn.Module, items: Sequence[EncodedItem]) -> Tensor:
    rows = [option for item in items for option in item.options]
    found, cached = run_cached(module, torch.tensor([item.prefix for item in items]))
    first = torch.tensor([option[0] for option in rows]).view(len(items), -1)
    sums = _log_softmax(found.logits[:, -1]).gather(1, first).flatten()
    if (width := max(map(len, rows)) - 1) > 0:
        for cache in cached.values():
            cache.batch_repeat_interleave(len(LETTERS))
        # Padded at the end with id 0: only positions after an option's last token see that.
        inputs, targets = (
            torch.tensor([[*row[at:], *[0] * width][:width] for row in rows]) for at in (0, 1)
        )
        found = module(inputs, use_cache=True, **cached)
        said = _log_softmax(found.logits).gather(2, targets[..., None])[..., 0]
        counts = torch.tensor([len(row) - 1 for row in rows])
        sums = sums + torch.where(torch.arange(width) < counts[:, None], said, 0.0).sum(1)
    return sums.view(len(items), -1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.float().double().log_softmax(-1)


class ChoiceTask:
    """Items encoded for one tokenizer, and the reference's scores. `module` is never changed."""

    def __init__(self, module: nn.Module, tokenizer: Any, items: Sequence[ChoiceItem]) -> None:
        """Run the reference. Raises PromptError for items that the tokenizer can't tell apart,
        ValueError where the reference's scores aren't finite.
        """
        self._encoded = [encode_item(item, tokenizer) for item in items]
        self._lengths = np.array([[len(option) for option in item.options] for item in items])
        self._answers = np.array([item.answer for item in items])
        self.reference = option_scores(module, self._encoded)
        for item, row in zip(items, self.reference, strict=True):
            if not np.isfinite(row).all():
                raise ValueError(f"{item.where}: the reference's scores are {row.tolist()}.")

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self._encoded)

    @property
    def accuracy(self) -> float:
        """The reference's."""
        return float(_hits(self.reference, self._answers).mean())

    def measure(self, candidate: nn.Module) -> ChoiceFigures:
        """Score a model and hold it against the reference."""
        return compare_scores(
            option_scores(candidate, self._encoded), self.reference, self._answers, self._lengths
        )


def compare_scores(
    candidate: NDArray[np.float64],
    reference: NDArray[np.float64],
    answers: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> ChoiceFigures:
    """Return the figures of scores [items, 4]; lengths of options in characters [items, 4]."""
    broken = int((~np.isfinite(candidate).all(1)).sum())
    if broken:
        nothing, nan = Kept(float("nan"), float("nan")), float("nan")
        return ChoiceFigures(nan, nan, nothing, nothing, nan, nan, 0, broken)
    plain, normed = (_hits(s, answers) for s in (candidate, candidate / lengths))
    was, was_normed = (_hits(s, answers) for s in (reference, reference / lengths))
    change = _margins(candidate, answers) - _margins(reference, answers)
    return ChoiceFigures(
        accuracy=float(plain.mean()),
        accuracy_norm=float(normed.mean()),
        kept=_kept(plain, was),
        kept_norm=_kept(normed, was_normed),
        same_choice=float((candidate.argmax(1) == reference.argmax(1)).mean()),
        margin_change=float(change.mean()),
        num_ties=int(((candidate == candidate.max(1, keepdims=True)).sum(1) > 1).sum()),
        num_nonfinite=0,
    )


def _hits(scores: NDArray[np.float64], answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which items are right; argmax takes the first of equals."""
    return np.asarray(scores.argmax(1) == answers)


def _kept(candidate: NDArray[np.bool_], reference: NDArray[np.bool_]) -> Kept:
    return kept_share(list(candidate[:, None]), list(reference[:, None]))


def _margins(scores: NDArray[np.float64], answers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return right − best wrong, nats, [items]."""
    right = np.take_along_axis(scores, answers[:, None], 1)[:, 0]
    wrong = scores.copy()
    np.put_along_axis(wrong, answers[:, None], -np.inf, 1)
    return np.asarray(right - wrong.max(1))
