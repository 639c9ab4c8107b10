"""A sample's score: how uncertain the model is on it, and how unevenly it attends.

    score = 0.6 · rank(next-token entropy) + 0.4 · rank(largest variance of attention weights)

- Entropy: −Σ p ln p of the model's distribution in nats, mean over the T − 1 positions whose next
  token is in the sample; float64.
- Variance: `attention.attention_variance`, the largest over layers and heads.
- The two have different units and spreads (some nats against some hundredths), so that a plain sum
  would be the entropy alone. Each is replaced by its rank in the pool, 0 for the smallest and 1
  for the largest, equals sharing their mean rank. Min-max scaling would let one odd sample squeeze
  all others together, and z-scores would leave the shares of 0.6 and 0.4 to the tails. Given up:
  how far apart two neighbours are.

The highest scores are chosen, of equal ones the first in the pool. Each sample runs alone: there is
no padding that could be counted. The score depends on a sample's length (see `attention`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.attention import attention_reader, head_variances
from quantwatch_kernels.calibration.pool import check_count, check_pool

__all__ = ["combined_score", "highest", "next_token_entropy", "pool_ranks", "sample_scores"]

_ENTROPY, _VARIANCE = 0.6, 0.4
_ROWS = 64


def next_token_entropy(logits_TV: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats, float64 [T]; NaN where a row has a NaN."""
    starts = range(0, len(logits_TV), _ROWS)
    parts = [logits_TV[start : start + _ROWS].double().softmax(-1) for start in starts]
    return torch.cat([torch.special.entr(part).sum(-1) for part in parts])


def sample_scores(model: nn.Module, pool: Sequence[Tensor]) -> Tensor:
    """Return (mean entropy in nats, largest attention variance) per sample, float64 [N, 2].

    Raises ValueError for a bad pool, a sample of one token, a model without attention weights, and
    naming the sample when something isn't finite.
    """
    check_pool(model, pool, shortest=2)
    rows = []
    with attention_reader(model) as read:
        for number, ids in enumerate(pool):
            try:
                variances, logits = head_variances(read, ids)
            except ValueError as error:
                raise ValueError(f"sample {number} of the pool: {error}") from error
            entropy = next_token_entropy(logits[:-1]).mean().item()
            if math.isnan(entropy):
                raise ValueError(f"sample {number} of the pool: its logits are not finite.")
            rows.append([entropy, variances.max().item()])
    return torch.tensor(rows, dtype=torch.float64)


def pool_ranks(values_N: Tensor) -> Tensor:
    """Return each value's rank scaled to 0 … 1, equals sharing their mean; 0.5 for a single one."""
    below = (values_N[:, None] > values_N).sum(1).double()
    equal = (values_N[:, None] == values_N).sum(1).double() - 1
    others = len(values_N) - 1
    return (below + equal / 2) / others if others else torch.full_like(below, 0.5)


def combined_score(scores_N2: Tensor) -> Tensor:
    """Return 0.6 · rank of the entropy + 0.4 · rank of the variance, float64 [N] in 0 … 1."""
    entropy, variance = scores_N2.unbind(1)
    return _ENTROPY * pool_ranks(entropy) + _VARIANCE * pool_ranks(variance)


def highest(score_N: Tensor, count: int) -> list[int]:
    """Return the numbers of the highest scores, best first; of equal ones the first."""
    check_count(count, len(score_N))
    order: list[int] = torch.argsort(score_N, descending=True, stable=True).tolist()
    return order[:count]
