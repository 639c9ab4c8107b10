"""Output statistics of a batch, a chunk of rows at a time: the reference's logits are made once.

Full logits of a whole sequence never exist. S scored rows, V ids.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantwatch.capture.layout import Layout
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.compare.lens import Readout
from quantwatch_kernels.compare.output import OutputStatistics, leaked_mass, output_statistics
from quantwatch_kernels.compare.tap import TapStatistics, isolated_error, tap_statistics
from quantwatch_kernels.registry import Watch, watched

_CHUNK_LOGITS = 15 << 20
"""Logits of one model that are alive at a time: 63 MB."""
_MIN_ROWS, _MAX_ROWS = 32, 512


@dataclass(frozen=True, slots=True)
class Head:
    """A model's way from the head's input to logits."""

    readout: Readout
    inputs: Tensor
    """The head's input [R, H] at the measured rows of a batch."""
    dtype: torch.dtype
    num_tokens: int | None = None
    watch: Watch | None = None
    """Counts what its kernels do."""

    @classmethod
    def of(
        cls, model: LoadedModel, readout: Readout, inputs: Tensor, watch: Watch | None = None
    ) -> "Head":
        """Bundle a model's readout with what goes into it on one batch."""
        return cls(readout, inputs, model.dtype, model.num_tokens, watch)

    def logits(self, rows: Tensor, *, into: str) -> Tensor:
        """Return float32 logits [rows, V], valid until the buffer `into` is used again."""
        with watched(self.watch):
            return self.readout.head_logits(self.inputs[rows], into=into)


@dataclass(slots=True)
class Outputs:
    """What the output stage found for one candidate on one batch."""

    statistics: OutputStatistics
    """Columns over the S scored rows."""
    leaked_mass: Tensor | None
    """None when both vocabularies are equally wide."""
    head: TapStatistics
    """The head as a tap, at the layout's sampled positions, one after another."""
    is_equal: bool
    """Whether the logits are equal bit for bit."""
    width: int
    """Number of ids that both heads share."""
    reference_bad: Tensor
    """Scored rows where the reference's logits are NaN or +∞, bool [S]."""
    candidate_bad: Tensor
    """Other scored rows whose KL is not finite, bool [S]."""


@dataclass(slots=True)
class _Parts:
    statistics: list[OutputStatistics] = field(default_factory=list)
    leaked: list[Tensor] = field(default_factory=list)
    head: list[TapStatistics] = field(default_factory=list)
    reference_bad: list[Tensor] = field(default_factory=list)
    is_equal: bool = True
    width: int = 0


def compare_outputs(
    reference: Head,
    candidates: Mapping[str, Head],
    layout: Layout,
    *,
    keep: int,
    check_equal: frozenset[str],
) -> dict[str, Outputs]:
    """Compare the logits at all scored rows; bit-equality only of those named in `check_equal`."""
    parts = {name: _Parts(is_equal=name in check_equal) for name in candidates}
    sampled = [layout.scored(n, at) for n, at in enumerate(layout.positions)]
    chosen = torch.zeros(len(layout.rows), dtype=torch.bool)
    chosen[torch.cat(sampled)] = True
    nothing = TapStatistics(*(torch.empty(0, dtype=torch.float64) for _ in TapStatistics._fields))
    chunk = chunk_rows(reference.readout, len(layout.rows))
    for first in range(0, len(layout.rows), chunk):
        part = slice(first, first + chunk)
        rows, targets, sample = layout.rows[part], layout.targets[part], chosen[part]
        z_ref = reference.logits(rows, into="reference logits")
        for name, head in candidates.items():
            z_cand = head.logits(rows, into="candidate logits").to(z_ref.device)
            pair = _Pair(reference, head, z_ref, z_cand)
            pair.add_to(parts[name], targets.to(z_ref.device), sample.to(z_ref.device), keep)
    return {name: _join(found, nothing) for name, found in parts.items()}


def chunk_rows(readout: Readout, count: int) -> int:
    """Return how many of `count` rows go through a head at a time, in chunks of about one size.

    Few rows cost more each, since the head's weights are read once per chunk.
    """
    width = getattr(readout.head, "out_features", None) or _CHUNK_LOGITS // 128
    limit = min(max(_CHUNK_LOGITS // width, _MIN_ROWS), _MAX_ROWS)
    return math.ceil(count / max(1, math.ceil(count / limit)))


def shared_width(reference: Head, width: int, other: int) -> int:
    """Return how many ids two heads share: the real ones when they are differently wide."""
    if width == other:
        return width
    return min(reference.num_tokens or width, width, other)


class _Pair:
    """Logits of both models on one chunk of rows."""

    def __init__(self, reference: Head, candidate: Head, z_ref: Tensor, z_cand: Tensor) -> None:
        self._dtypes = reference.dtype, candidate.dtype
        self._shared = shared_width(reference, z_ref.shape[1], z_cand.shape[1])
        self._wide = z_cand if z_ref.shape[1] != z_cand.shape[1] else None
        self._z_ref, self._z_cand = z_ref[:, : self._shared], z_cand[:, : self._shared]

    def add_to(self, parts: _Parts, targets: Tensor, sample: Tensor, keep: int) -> None:
        z_ref, z_cand = self._z_ref, self._z_cand
        parts.statistics.append(
            output_statistics(
                z_ref,
                z_cand,
                targets,
                reference_dtype=self._dtypes[0],
                candidate_dtype=self._dtypes[1],
                keep=keep,
            )
        )
        if self._wide is not None:
            parts.leaked.append(leaked_mass(self._wide, self._shared))
        if sample.any():
            parts.head.append(tap_statistics(z_ref[sample], z_cand[sample]))
        parts.reference_bad.append(_spoiled(z_ref, parts.statistics[-1].logit_kl))
        parts.width = self._shared
        parts.is_equal = parts.is_equal and torch.equal(z_ref, z_cand)


def _spoiled(z_ref: Tensor, kl: Tensor) -> Tensor:
    """Say which rows' KL is not finite because of the reference; −∞ is a legitimate logit."""
    bad = ~kl.isfinite()
    if bad.any():
        bad[bad.clone()] = (z_ref[bad].isnan() | (z_ref[bad] == torch.inf)).any(-1)
    return bad


def _join(parts: _Parts, nothing: TapStatistics) -> Outputs:
    statistics = [torch.cat(column) for column in zip(*parts.statistics, strict=True)]
    joined, reference_bad = OutputStatistics(*statistics), torch.cat(parts.reference_bad)
    return Outputs(
        joined,
        torch.cat(parts.leaked) if parts.leaked else None,
        TapStatistics(*map(torch.cat, zip(*(parts.head or [nothing]), strict=True))),
        parts.is_equal,
        parts.width,
        reference_bad,
        ~joined.logit_kl.isfinite() & ~reference_bad,
    )


def isolate_head(
    reference: Head, candidate: Head, rows: Tensor, width: int
) -> tuple[Tensor, set[int]]:
    """Feed the candidate's head the reference's input at some rows, over `width` shared ids.

    Return the isolated errors float64 [rows] and the ids whose logit differs anywhere.
    """
    fed = replace(candidate, inputs=reference.inputs.to(candidate.inputs), watch=None)
    theirs = reference.logits(rows, into="reference logits")[:, :width]
    ours = fed.logits(rows, into="candidate logits")[:, :width].to(theirs.device)
    same = (theirs == ours) | (theirs.isnan() & ours.isnan())
    differing = (~same).any(0).nonzero().flatten().tolist()
    return isolated_error(theirs, ours, theirs), set(differing)
