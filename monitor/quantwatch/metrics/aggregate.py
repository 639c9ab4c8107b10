"""The sink that turns observations into measurements and blocks.

Observations may arrive in any prompt order; everything is folded in prompt order at the end. Values
of model-wide metrics and cosines wait in float64 (a cosine of 1 − 1e-9 is not 1), all others in
float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain import (
    MODEL,
    Block,
    Measurement,
    NonFinite,
    Observation,
    Scope,
    Suite,
    TokenMatrix,
    TopLogits,
)
from quantwatch.metrics.loads import LoadCounts
from quantwatch.metrics.registry import METRICS
from quantwatch.metrics.spool import Slot, Spool
from quantwatch.metrics.statistics import PromptValues, partials, summarize

_GROUP_BYTES = 32 << 20
"""Scopes are read in groups of about this many bytes."""
_DOUBLE = {"cosine", "router_overlap", "router_weight_l1"}

Positions = NDArray[np.int64]
Kept = dict[int, tuple[Slot, Positions | None]]


@dataclass(slots=True)
class _Series:
    """One metric of one candidate at a group of scopes that arrive together, by prompt."""

    scopes: tuple[Scope, ...]
    samples: Kept = field(default_factory=dict)
    extras: Kept = field(default_factory=dict)


class Aggregator:
    """Collects all observations on a suite. A context manager: closing drops the spool."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self._prompts = {prompt.index: prompt for prompt in suite.prompts}
        self._spool = Spool(folder)
        self._series: dict[tuple[str, str], dict[tuple[Scope, ...], _Series]] = {}
        self._top: dict[str, dict[int, Slot]] = {}
        self._nonfinite: dict[str, NonFinite] = {}
        self._loads: dict[str, LoadCounts] = {}

    def observe(self, observation: Observation) -> None:
        """Take one candidate's measurements on one prompt. Raises ValueError on a second time."""
        for matrix in observation.matrices:
            self._keep(observation.candidate, observation.prompt, matrix)
        if observation.top is not None:
            slots = self._top.setdefault(observation.candidate, {})
            slots[observation.prompt] = self._spool.append(_stack(observation.top))
        for load in observation.loads:
            self._loads.setdefault(observation.candidate, LoadCounts()).add(load)
        found = observation.first_nonfinite
        known = self._nonfinite.get(observation.candidate)
        if found is not None and (known is None or found.prompt < known.prompt):
            self._nonfinite[observation.candidate] = found

    def first_nonfinite(self, candidate: str) -> NonFinite | None:
        """Return where the first non-finite value of the first affected prompt appears."""
        return self._nonfinite.get(candidate)

    def measurements(self, candidate: str) -> tuple[Measurement, ...]:
        """Return one row per metric and scope of a candidate."""
        rows: list[Measurement] = []
        for (name, metric), groups in self._series.items():
            if name == candidate:
                for series in groups.values():
                    rows.extend(self._summaries(metric, series))
        loads = self._loads.get(candidate)
        return (*rows, *(() if loads is None else loads.measurements()))

    def per_prompt(self, candidate: str, metric: str) -> Block | None:
        """Return the sums of every prompt and scope, None when the metric wasn't measured."""
        groups = self._series.get((candidate, metric))
        return None if groups is None else self._per_prompt(candidate, metric, (*groups.values(),))

    def blocks(self, candidate: str) -> Iterator[Block]:
        """Yield the blocks of a candidate one by one, so that memory stays flat."""
        for (name, metric), groups in self._series.items():
            if name == candidate:
                yield self._per_prompt(candidate, metric, tuple(groups.values()))
                if METRICS[metric].token_block:
                    yield from self._per_token(candidate, metric, tuple(groups.values()))
        for prompt, slot in sorted(self._top.get(candidate, {}).items()):
            values = self._spool.read(slot).astype(np.float64)
            yield Block(candidate, "topk", "logits", prompt, (MODEL,), values)

    def _keep(self, candidate: str, prompt: int, matrix: TokenMatrix) -> None:
        groups = self._series.setdefault((candidate, matrix.metric), {})
        series = groups.setdefault(matrix.scopes, _Series(matrix.scopes))
        kept = series.samples if matrix.role == "sample" else series.extras
        if prompt in kept:
            raise ValueError(
                f"{matrix.metric} of {candidate} on prompt {prompt} was observed twice"
            )
        double = matrix.scopes == (MODEL,) or matrix.metric in _DOUBLE
        slot = self._spool.append(matrix.values.astype(np.float64 if double else np.float32))
        kept[prompt] = (slot, matrix.positions)

    def _summaries(self, metric: str, series: _Series) -> Iterator[Measurement]:
        worst: Literal["max", "min"] = "min" if METRICS[metric].direction == "higher" else "max"
        in_order = sorted(series.samples.items())
        per_scope = max(1, sum(int(slot.shape[-1]) * 8 for _, (slot, _) in in_order))
        step = max(1, _GROUP_BYTES // per_scope)
        for first in range(0, len(series.scopes), step):
            group = series.scopes[first : first + step]
            read = [
                (p, self._spool.read(slot, first, first + len(group)), at)
                for p, (slot, at) in in_order
            ]
            for row, scope in enumerate(group):
                parts = [
                    PromptValues(p, v[row].astype(np.float64), self._positions(p, at))
                    for p, v, at in read
                ]
                yield summarize(
                    metric, scope, parts, worst=worst, method=self._method(metric, series)
                )

    def _method(self, metric: str, series: _Series) -> str:
        """Say what the mean was taken over. The last position of a prompt has no next token."""
        if METRICS[metric].estimated:
            return "estimated"
        if len(series.samples) < len(self._prompts):
            return "sampled prompts"
        counts = (
            (len(at), self._prompts[p].num_scored)
            for p, (_, at) in series.samples.items()
            if at is not None
        )
        return (
            "sampled positions"
            if any(some < every - 1 for some, every in counts)
            else "all positions"
        )

    def _positions(self, prompt: int, positions: Positions | None) -> Positions:
        if positions is not None:
            return positions
        record = self._prompts[prompt]
        return np.arange(record.score_start, len(record.token_ids))

    def _per_prompt(self, candidate: str, metric: str, groups: tuple[_Series, ...]) -> Block:
        scopes = tuple(scope for series in groups for scope in series.scopes)
        values = np.zeros((len(self._prompts), len(scopes), 4))
        values[..., 3] = np.nan
        first = 0
        for series in groups:
            for row, prompt in enumerate(sorted(self._prompts)):
                if prompt in series.samples:
                    part = self._spool.read(series.samples[prompt][0]).astype(np.float64)
                    values[row, first : first + len(part)] = partials(part)
            first += len(series.scopes)
        return Block(candidate, "per_prompt", metric, None, scopes, values)

    def _per_token(
        self, candidate: str, metric: str, groups: tuple[_Series, ...]
    ) -> Iterator[Block]:
        """Yield each prompt's matrix over all taps; cells that were not measured are marked."""
        scopes = tuple(scope for series in groups for scope in series.scopes)
        for prompt, record in sorted(self._prompts.items()):
            values = np.zeros((len(scopes), len(record.token_ids)))
            missing = np.ones(values.shape, dtype=np.bool_)
            first = 0
            for series in groups:
                rows = np.arange(first, first + len(series.scopes))[:, None]
                for kept in (series.extras, series.samples):
                    if prompt in kept:
                        slot, positions = kept[prompt]
                        at = self._positions(prompt, positions)
                        values[rows, at], missing[rows, at] = self._spool.read(slot), False
                first += len(series.scopes)
            if not missing.all():
                yield Block(candidate, "per_token", metric, prompt, scopes, values, missing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spool.__exit__(kind, error, trace)


def _stack(top: TopLogits) -> NDArray[np.float64]:
    """Return the five fields of TopLogits as float64 [5, P, K]; ids below 2⁵³ stay exact."""
    fields = (
        top.reference_ids,
        top.reference_logits,
        top.candidate_ids,
        top.candidate_logits,
        top.candidate_at_reference,
    )
    return np.stack([np.asarray(values, dtype=np.float64) for values in fields])
