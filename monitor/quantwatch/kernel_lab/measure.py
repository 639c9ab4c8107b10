"""How far a model departs from a reference on a text: one harness for every table.

The reference's logits at the scored positions are computed once and kept in memory (0.4 GB for
8 × 512 tokens and 49k ids), never stored. A candidate is compared with the product's own kernel
(`output_statistics`, float32 logits, float64 sums), so a table and a run can't disagree. The mean
KL is over all scored tokens, its standard error is clustered by window. KL in nats.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch.kernel_lab.kept import kept_share
from quantwatch.kernel_lab.texts import Text
from quantwatch.metrics.statistics import PromptValues, clustered_se
from quantwatch_kernels.compare.output import OutputStatistics, output_statistics
from quantwatch_kernels.quantize.api import Execution, QuantReport, model_size, quantize_
from quantwatch_kernels.quantize.calibrate import head_inputs
from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Figures:
    """What one candidate measured. Figures of the output are NaN if any token's KL is."""

    kl: float
    """Mean KL(reference ‖ candidate), nats."""
    kl_se: float
    """Its standard error, clustered by window; NaN with one window."""
    kl_p99: float
    kl_max: float
    same_top1: float
    """Share of tokens with the same likeliest next token."""
    ppl: float
    """Perplexity of the candidate on the scored tokens."""
    ppl_reference: float
    accuracy: float
    """Share of tokens whose next token is the candidate's likeliest."""
    accuracy_reference: float
    bits_per_weight: float
    """Everything counted: codes, scales, zeros, what stays in floats, tied weights once."""
    size_bytes: int
    num_tokens: int
    num_nonfinite: int
    """Tokens whose KL is NaN or infinite."""
    kept: float = math.nan
    """accuracy ÷ accuracy_reference; NaN where the reference is never right."""
    kept_se: float = math.nan
    """Its standard error, paired and clustered by window; NaN with one window."""


class Yardstick:
    """A reference model and its logits on a text. `module` is never changed."""

    def __init__(self, module: nn.Module, text: Text, scopes: Mapping[str, str]) -> None:
        """Run the reference; `scopes` maps its module paths to canonical names."""
        self.module = module.eval()
        self.text = text
        self.scopes = dict(scopes)
        self._known: tuple[object, InputStats] | None = None
        self._logits = [scored_logits(module, text, window) for window in text.windows]

    def quantized(
        self,
        recipe: Recipe,
        *,
        execution: Execution = "dequantized",
        calibration: Sequence[Tensor] | None = None,
    ) -> tuple[nn.Module, QuantReport]:
        """Return a quantized copy of the reference and what was done."""
        candidate = copy.deepcopy(self.module)
        report = quantize_(
            candidate,
            recipe,
            execution=execution,
            scopes=self.scopes,
            calibration=calibration,
            head=self._head_inputs(recipe, calibration),
        )
        return candidate, report

    def _head_inputs(
        self, recipe: Recipe, calibration: Sequence[Tensor] | None
    ) -> InputStats | None:
        """Return what several recipes need of the reference on the same texts, computed once."""
        embedding = recipe.embedding
        if embedding is None or not embedding.calibrated or recipe.changes_model or not calibration:
            return None
        key = tuple(tuple(ids.flatten().tolist()) for ids in calibration)
        if self._known is None or self._known[0] != key:
            self._known = key, head_inputs(self.module, calibration)
        return self._known[1]

    def measure(self, candidate: nn.Module, report: QuantReport | None = None) -> Figures:
        """Compare a model with the reference; without a report its size is as it is in memory."""
        rows = [self._window(candidate, number) for number in range(len(self.text.windows))]
        if report is None:
            size, count = model_size(candidate)
            return _figures(rows, size, 8 * size / count)
        return _figures(rows, report.size_bytes, report.bits_per_weight)

    def try_recipe(
        self,
        recipe: Recipe,
        *,
        execution: Execution = "dequantized",
        calibration: Sequence[Tensor] | None = None,
    ) -> Figures:
        """Quantize a copy and measure it."""
        candidate, report = self.quantized(recipe, execution=execution, calibration=calibration)
        return self.measure(candidate, report)

    def _window(self, candidate: nn.Module, number: int) -> "_Row":
        window = self.text.windows[number]
        targets = window[0, self.text.scored(window) + 1]
        statistics = output_statistics(
            self._logits[number],
            scored_logits(candidate, self.text, window),
            targets,
            reference_dtype=torch.float32,
            candidate_dtype=torch.float32,
            keep=5,
        )
        return _Row(statistics, targets)


@dataclass(frozen=True, slots=True)
class _Row:
    statistics: OutputStatistics
    targets: Tensor


def scored_logits(module: nn.Module, text: Text, window: Tensor) -> Tensor:
    """Return float32 logits [scored, V] of one window; the head runs at the scored positions only.

    Raises ValueError when the model doesn't return one row of logits per token.
    """
    scored = text.scored(window)
    with torch.inference_mode():
        keeps = "logits_to_keep" in module.forward.__code__.co_varnames
        arguments = {"use_cache": False, "logits_to_keep": scored} if keeps else {}
        found = module(window, **arguments)
        logits: Tensor = getattr(found, "logits", found)
        if not keeps:
            logits = logits[:, scored]
    if logits.ndim != 3 or logits.shape[1] != len(scored):
        raise ValueError(
            f"{type(module).__name__} returned logits {list(logits.shape)} "
            f"for {len(scored)} scored positions of {window.shape[1]} tokens."
        )
    return logits[0].float()


def _figures(rows: Sequence[_Row], size: int, bits: float) -> Figures:
    values = {
        name: np.concatenate([getattr(row.statistics, name).numpy() for row in rows])
        for name in ("logit_kl", "top1_agreement", "nll_candidate", "nll_reference")
    }
    kl = values["logit_kl"]
    broken = int((~np.isfinite(kl)).sum())
    right, right_reference = (_hits(rows, ids) for ids in ("candidate_ids", "reference_ids"))
    kept = kept_share(right, right_reference)
    said = {
        "kl": float(kl.mean()),
        "kl_se": _clustered(rows, float(kl.mean())),
        "kl_p99": math.nan if broken else float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "same_top1": float(values["top1_agreement"].mean()),
        "ppl": float(np.exp(values["nll_candidate"].mean())),
        "accuracy": float(np.concatenate(right).mean()),
        "kept": kept.share,
        "kept_se": kept.se,
    }
    return Figures(
        **(dict.fromkeys(said, math.nan) if broken else said),
        ppl_reference=float(np.exp(values["nll_reference"].mean())),
        accuracy_reference=float(np.concatenate(right_reference).mean()),
        bits_per_weight=bits,
        size_bytes=size,
        num_tokens=int(kl.size),
        num_nonfinite=broken,
    )


def _clustered(rows: Sequence[_Row], mean: float) -> float:
    parts = [
        PromptValues(number, row.statistics.logit_kl.numpy(), np.arange(len(row.targets)))
        for number, row in enumerate(rows)
    ]
    se = clustered_se(parts, mean, sum(len(row.targets) for row in rows))
    return math.nan if se is None else se


def _hits(rows: Sequence[_Row], ids: str) -> list[NDArray[np.bool_]]:
    """Say, window by window, where the likeliest next token is the text's."""
    return [(getattr(row.statistics, ids)[:, 0] == row.targets).numpy() for row in rows]
