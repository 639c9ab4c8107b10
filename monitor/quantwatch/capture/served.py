"""Candidates that are servers: their few log-probabilities against the reference's whole logits.

The reference runs here once for all candidates. Of a server every scored position that has a next
token is asked for; what can't be read is missing, counted with its reason, and never a number. A
server that answers for another model, or not at all, fails alone: the other candidates go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantwatch.capture.layout import Layout
from quantwatch.capture.outputs import Head, chunk_rows
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.served_answers import Answers
from quantwatch.capture.trace import Trace, TraceSource
from quantwatch.domain import (
    HEAD,
    MODEL,
    NonFinite,
    Observation,
    Progress,
    Prompt,
    Sink,
    TokenMatrix,
)
from quantwatch.models.served.answers import Position, Positions
from quantwatch.models.served.model import ServedModel
from quantwatch.models.served.trouble import UnusableServerError
from quantwatch_kernels.compare.served import ServedStatistics, served_statistics

Matrix = NDArray[np.float64]
_OF_TARGETS = ("delta_p", "nll_reference", "nll_candidate", "nll_difference")
_SHOWN = 4


@dataclass
class _Standing:
    """How it goes with one server."""

    model: ServedModel
    shortest: tuple[Prompt, Positions] | None = None
    """The shortest prompt that it answered: asked again at the end."""
    num_read: int = 0
    beyond: int = 0
    """Targets that it tells nothing of, being beyond its top k."""
    repeat: float | None = None


class ServedMeasurer:
    """Compares servers with a source's traces; findings go to the sink and into the report."""

    def __init__(
        self,
        source: TraceSource,
        models: Mapping[str, ServedModel],
        reference_dtype: torch.dtype,
        sink: Sink,
        report: CaptureReport,
    ) -> None:
        self._source = source
        self._standings = {name: _Standing(model) for name, model in models.items()}
        self._dtype = reference_dtype
        self._sink = sink
        self._report = report

    @property
    def num_models(self) -> int:
        """Number of servers."""
        return len(self._standings)

    def measure(self, trace: Trace, layout: Layout, progress: Progress) -> None:
        """Ask every server that is left about the prompts of a trace."""
        if not self._standings:
            return
        head = self._source.head(trace.head_input)
        for number, prompt in enumerate(layout.batch.prompts):
            told = self._ask(prompt, progress)
            for found in self._compared(told, head, layout, number):
                self._sink.observe(found)

    def finish(self) -> None:
        """Prove that every server is still the one it was, and say what is missing."""
        for name, standing in self._left().items():
            try:
                self._prove(standing)
            except UnusableServerError as error:
                self._report.failed[name] = str(error)
        for name, standing in self._standings.items():
            self._report.events[name] = tuple(_words(standing))
            self._report.served[name] = _facts(standing)

    def _left(self) -> dict[str, _Standing]:
        failed = self._report.failed
        return {name: one for name, one in self._standings.items() if name not in failed}

    def _ask(self, prompt: Prompt, progress: Progress) -> dict[str, Positions]:
        told: dict[str, Positions] = {}
        progress.advance(len(prompt.token_ids) * len(self._standings))  # those that failed as well
        for name, standing in self._left().items():
            with self._report.timed("served"):
                try:
                    told[name] = _answer(standing, prompt)
                except UnusableServerError as error:
                    self._report.failed[name] = str(error)
        return told

    def _prove(self, standing: _Standing) -> None:
        model = standing.model
        if not standing.num_read and model.missing:
            reason, _ = model.missing.most_common(1)[0]
            raise UnusableServerError(f"no position could be read: {reason}")
        model.require_same()
        if standing.shortest is not None:
            standing.repeat = model.repeat(*standing.shortest)

    def _compared(
        self, told: Mapping[str, Positions], head: Head, layout: Layout, number: int
    ) -> Iterator[Observation]:
        """Yield what every server's answers are worth; the reference is read off once for all."""
        prompt, span = layout.batch.prompts[number], layout.spans[number]
        known = {name: Answers.of(told[name], self._standings[name].model) for name in told}
        asked = max((len(positions) for positions in told.values()), default=0)
        rows, targets = layout.rows[span][:asked], layout.targets[span][:asked]
        for name, found in self._statistics(head, rows, targets, known).items():
            self._standings[name].beyond += int(known[name].told.target.isnan().sum())
            places = prompt.score_start + known[name].kept.numpy()
            matrices = _matrices(found, places, asked)
            birth = self._birth(found, prompt, places)
            yield Observation(name, prompt.index, matrices, first_nonfinite=birth)

    def _statistics(
        self, head: Head, rows: Tensor, targets: Tensor, known: Mapping[str, Answers]
    ) -> dict[str, ServedStatistics]:
        """Read the reference off a chunk of rows at a time: its logits are large.

        The rows are all that were asked for, whoever answered: products of other shapes round
        otherwise, and no server's numbers may depend on another one.
        """
        step = max(1, chunk_rows(head.readout, len(rows)))
        parts: dict[str, list[ServedStatistics]] = {name: [] for name in known}
        for first in range(0, max(len(rows), 1), step):
            part = slice(first, first + step)
            z_ref = head.logits(rows[part], into="reference logits").cpu()
            for name, one in known.items():
                parts[name].append(self._chunk(z_ref, targets[part], one, first))
        return {
            name: ServedStatistics(*(torch.cat(columns) for columns in zip(*found, strict=True)))
            for name, found in parts.items()
        }

    def _chunk(self, z_ref: Tensor, targets: Tensor, one: Answers, first: int) -> ServedStatistics:
        """Compare one server's answers with a chunk of the reference's logits [rows, V]."""
        own = one.within(first, first + len(z_ref))
        at = one.kept[own] - first
        everything = len(at) == len(z_ref)
        return served_statistics(
            z_ref if everything else z_ref[at],
            one.told.rows(own),
            targets[at],
            reference_dtype=self._dtype,
            candidate_dtype=one.dtype,
        )

    def _birth(
        self, found: ServedStatistics, prompt: Prompt, places: NDArray[np.int64]
    ) -> NonFinite | None:
        """Return the first value that isn't finite; what the reference has is the reference's."""
        reference = ~found.nll_reference.isfinite() & found.served_unseen.isnan()
        for mask, name in ((reference, "reference"), (~found.served_kl.isfinite(), None)):
            hits = mask.nonzero().flatten()
            if len(hits):
                birth = NonFinite(HEAD, prompt.index, int(places[int(hits[0])]))
                if name is None:
                    return birth
                self._report.note_nonfinite(name, birth)
                return None
        return None


def _answer(standing: _Standing, prompt: Prompt) -> Positions:
    positions = standing.model.ask(prompt)
    num_read = sum(isinstance(one, Position) for one in positions)
    standing.num_read += num_read
    known = standing.shortest
    if num_read and (known is None or len(prompt.token_ids) < len(known[0].token_ids)):
        standing.shortest = prompt, positions
    return positions


def _matrices(
    found: ServedStatistics, places: NDArray[np.int64], asked: int
) -> tuple[TokenMatrix, ...]:
    """Return one matrix per statistic; what the server doesn't tell at a position is missing."""
    undefined = found.served_unseen.isnan()  # the reference's own NaN is no missing answer
    matrices = []
    for name, column in found._asdict().items():
        optional = name in _OF_TARGETS or name in ("top1_agreement", "topk_overlap_k5")
        kept = ~(column.isnan() & ~undefined) if optional else torch.ones_like(undefined)
        if name in _OF_TARGETS:  # means of the two models are of the same tokens
            kept = ~(found.nll_candidate.isnan() & ~undefined)
        values = column[kept].numpy()[None]
        at = places[kept.numpy()]
        matrices.append(TokenMatrix(name, (MODEL,), values, at, num_missing=asked - len(at)))
    return tuple(matrices)


def _words(standing: _Standing) -> list[str]:
    """Return what the figures of a server must not be read without."""
    words, missing = list[str](), standing.model.missing
    if missing:
        reasons = "; ".join(f"{n:,} × {why}" for why, n in missing.most_common(_SHOWN))
        total = standing.num_read + missing.total()
        words.append(f"{missing.total():,} of {total:,} positions are missing: {reasons}")
    if standing.beyond:
        top_k = standing.model.terms.top_k
        words.append(
            f"{standing.beyond:,} of {standing.num_read:,} next tokens are beyond its {top_k} "
            "likeliest: NLL and perplexity are of the others, likelier ones"
        )
    return words


def _facts(standing: _Standing) -> dict[str, object]:
    client = standing.model.client
    return {
        "requests": client.num_requests,
        "retries": client.num_retries,
        "read": standing.num_read,
        "missing": dict(standing.model.missing.most_common()),
        "targets_beyond": standing.beyond,
        "repeat_difference": standing.repeat,
    }
