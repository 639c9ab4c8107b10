"""The sink that turns observations into measurements and blocks.

Observations may arrive in any prompt order; everything is folded in prompt order at the end. Values
of model-wide metrics and cosines wait in float64 (a cosine of 1 − 1e-9 is not 1), all others in
float32.
"""

import copy
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from quantwatch.domain import (
    MODEL,
    Block,
    Measurement,
    NonFinite,
    Observation,
    PositionRange,
    Scope,
    Suite,
    TokenMatrix,
)
from quantwatch.metrics.by_position import METRICS as METRICS_BY_POSITION
from quantwatch.metrics.by_position import by_position
from quantwatch.metrics.loads import LoadCounts
from quantwatch.metrics.pieces import Pieces, Positions, Series, check_turn, only, stacked
from quantwatch.metrics.registry import METRICS
from quantwatch.metrics.spool import Spool, Strip
from quantwatch.metrics.statistics import PromptValues, partials, summarize

_GROUP_BYTES = 32 << 20
"""Scopes are read in groups of about this many bytes."""
_DOUBLE = {"cosine", "router_overlap", "router_weight_l1"}


class Aggregator:
    """Collects all observations on a suite. A context manager: closing drops the spool."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self._prompts = {prompt.index: prompt for prompt in suite.prompts}
        self._spool = Spool(folder)
        self._series: dict[tuple[str, str], dict[tuple[Scope, ...], Series]] = {}
        self._top: dict[str, dict[int, Strip]] = {}
        self._nonfinite: dict[str, NonFinite] = {}
        self._loads: dict[str, LoadCounts] = {}

    def observe(self, observation: Observation) -> None:
        """Take one candidate's measurements on one prompt, or on a piece of it.

        Raises ValueError on a second time, and for a piece that isn't the next one.
        """
        for matrix in observation.matrices:
            self._keep(observation, matrix)
        if observation.top is not None:
            strips = self._top.setdefault(observation.candidate, {})
            known = strips.get(observation.prompt)
            strips[observation.prompt] = self._spool.append(stacked(observation.top), known)
        for load in observation.loads:
            self._loads.setdefault(observation.candidate, LoadCounts()).add(load)
        found = observation.first_nonfinite
        first = self._nonfinite.get(observation.candidate)
        if found is not None and (first is None or found.prompt < first.prompt):
            self._nonfinite[observation.candidate] = found

    def among(self, prompts: Collection[int]) -> "Aggregator":
        """Return what was observed on some prompts, as if there had been no others.

        It reads from the same spool and lives as long. Loads of experts are left out: they are
        counted over all prompts together.
        """
        part = copy.copy(self)
        part._prompts = {index: self._prompts[index] for index in sorted(prompts)}
        part._loads = {}
        part._top = {name: only(strips, prompts) for name, strips in self._top.items()}
        part._nonfinite = {n: at for n, at in self._nonfinite.items() if at.prompt in prompts}
        part._series = {
            key: {scopes: series.among(prompts) for scopes, series in groups.items()}
            for key, groups in self._series.items()
        }
        return part

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

    def by_position(self, candidate: str) -> Iterator[PositionRange]:
        """Yield the mean KL of a candidate in ranges of positions, metric by metric."""
        for metric in METRICS_BY_POSITION:
            groups = self._series.get((candidate, metric), {})
            parts = [part for each in groups.values() for part in self._rows(each)]
            yield from by_position(metric, parts)

    def _rows(self, series: Series) -> Iterator[PromptValues]:
        """Yield each prompt's values, the mean over the scopes of those at one position."""
        for prompt, pieces in sorted(series.samples.items()):
            values = self._spool.read(pieces.values).astype(np.float64).mean(axis=0)
            yield PromptValues(prompt, values, self._positions(prompt, pieces))

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
        for prompt, strip in sorted(self._top.get(candidate, {}).items()):
            values = self._spool.read(strip)
            yield Block(candidate, "topk", "logits", prompt, (MODEL,), values)

    def _keep(self, observation: Observation, matrix: TokenMatrix) -> None:
        prompt = observation.prompt
        groups = self._series.setdefault((observation.candidate, matrix.metric), {})
        series = groups.setdefault(matrix.scopes, Series(matrix.scopes))
        kept = series.samples if matrix.role == "sample" else series.extras
        known = kept.get(prompt)
        check_turn(known, observation, matrix)
        double = matrix.scopes == (MODEL,) or matrix.metric in _DOUBLE
        values, at = matrix.values.astype(np.float64 if double else np.float32), matrix.positions
        if known is None:
            places = None if at is None else self._spool.append(_row(at))
            known = kept[prompt] = Pieces(self._spool.append(values), places, -1)
        else:
            self._spool.append(values, known.values)
            if at is not None:
                self._spool.append(_row(at), known.positions)
        known.last = known.last if at is None or not len(at) else int(at[-1])
        if matrix.num_missing:
            series.missing[prompt] = series.missing.get(prompt, 0) + matrix.num_missing

    def _summaries(self, metric: str, series: Series) -> Iterator[Measurement]:
        worst: Literal["max", "min"] = "min" if METRICS[metric].direction == "higher" else "max"
        in_order = sorted(series.samples.items())
        per_scope = max(1, sum(pieces.num_columns * 8 for _, pieces in in_order))
        step = max(1, _GROUP_BYTES // per_scope)
        for first in range(0, len(series.scopes), step):
            group = series.scopes[first : first + step]
            read = [
                (p, self._spool.read(e.values, first, first + len(group)), self._positions(p, e))
                for p, e in in_order
            ]
            for row, scope in enumerate(group):
                parts = [PromptValues(p, v[row].astype(np.float64), at) for p, v, at in read]
                yield summarize(
                    metric,
                    scope,
                    parts,
                    worst=worst,
                    method=self._method(metric, series),
                    num_missing=sum(series.missing.values()),
                )

    def _method(self, metric: str, series: Series) -> str:
        """Say what the mean was taken over. The last position of a prompt has no next token."""
        if METRICS[metric].estimated:
            return "estimated"
        if len(series.samples) < len(self._prompts):
            return "sampled prompts"
        counts = (
            (pieces.num_columns + series.missing.get(p, 0), self._prompts[p].num_scored)
            for p, pieces in series.samples.items()
            if pieces.positions is not None
        )
        return (
            "sampled positions"
            if any(some < every - 1 for some, every in counts)
            else "all positions"
        )

    def _positions(self, prompt: int, pieces: Pieces) -> Positions:
        if pieces.positions is not None:
            places: Positions = self._spool.read(pieces.positions)[0]
            return places
        record = self._prompts[prompt]
        return np.arange(record.score_start, len(record.token_ids))

    def _per_prompt(self, candidate: str, metric: str, groups: tuple[Series, ...]) -> Block:
        scopes = tuple(scope for series in groups for scope in series.scopes)
        values = np.zeros((len(self._prompts), len(scopes), 4))
        values[..., 3] = np.nan
        first = 0
        for series in groups:
            for row, prompt in enumerate(sorted(self._prompts)):
                if prompt in series.samples:
                    part = self._spool.read(series.samples[prompt].values).astype(np.float64)
                    values[row, first : first + len(part)] = partials(part)
            first += len(series.scopes)
        return Block(candidate, "per_prompt", metric, None, scopes, values)

    def _per_token(
        self, candidate: str, metric: str, groups: tuple[Series, ...]
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
                        at = self._positions(prompt, kept[prompt])
                        values[rows, at] = self._spool.read(kept[prompt].values)
                        missing[rows, at] = False
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


def _row(positions: Positions) -> Positions:
    """Return positions [P] as the spool keeps them, int64 [1, P]."""
    return positions.astype(np.int64, copy=False)[None]
