"""One candidate's chunks of one prompt, joined to what a single pass over the prompt would say.

Values per token leave chunk by chunk. What is of the whole prompt waits: the positions with the
largest output KL (a chunk's are read while its hidden states are there, and dropped when a later
chunk has worse ones) and the first non-finite value in forward order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from quantwatch.capture.chunks import Chunk
from quantwatch.capture.layers import LayerReading, worst_positions
from quantwatch.capture.layout import Positions
from quantwatch.domain import NonFinite, Observation, Scope, TokenMatrix


@dataclass(slots=True, eq=False)
class _Worst:
    """A position that is among the worst so far, and its column of every layer's statistics."""

    badness: float
    position: int
    reading: LayerReading | None = None

    @property
    def rank(self) -> tuple[float, int]:
        return (-self.badness, self.position)


@dataclass(slots=True)
class Joined:
    """What is known of one candidate on one prompt after some chunks."""

    count: int
    """How many of the worst positions are shown."""
    worst: list[_Worst] = field(default_factory=list)
    births: dict[str, tuple[int, NonFinite]] = field(default_factory=dict)
    """Model → rank of the scope in forward order, and its first value that isn't finite."""

    def worst_here(self, chunk: Chunk, kl: NDArray[np.float64], sampled: Positions) -> Positions:
        """Return which positions of a chunk are among the worst so far, from its own start on.

        `kl` [P] covers its scored positions; sampled ones never count, a NaN is worse than all.
        """
        start = chunk.piece.score_start
        fresh = worst_positions(kl, start, sampled, self.count)
        badness = np.where(np.isnan(kl), np.inf, kl)[fresh - start]
        pairs = zip(badness.tolist(), fresh.tolist(), strict=True)
        found = [_Worst(size, chunk.start + at) for size, at in pairs]
        self.worst = sorted([*self.worst, *found], key=lambda each: each.rank)[: self.count]
        kept = [each.position - chunk.start for each in self.worst if each in found]
        return np.array(sorted(kept), dtype=np.int64)

    def keep(self, chunk: Chunk, reading: LayerReading) -> None:
        """Keep what was read at the positions that `worst_here` named."""
        places = {int(at) + chunk.start: column for column, at in enumerate(reading.positions)}
        for each in self.worst:
            column = places.get(each.position)
            if column is not None:
                values = {m: v[:, column : column + 1] for m, v in reading.statistics.items()}
                each.reading = LayerReading(reading.scopes, np.array([each.position]), values)

    def note_birth(
        self, name: str, chunk: Chunk, scopes: Sequence[Scope], found: NonFinite | None
    ) -> NonFinite | None:
        """Note a model's first non-finite value in a chunk: the first scope, then position, wins.

        `scopes` are all places in forward order. Return the prompt's with its last chunk.
        """
        if found is not None:
            self._note(name, chunk, scopes, found)
        return self.births[name][1] if chunk.is_last and name in self.births else None

    def _note(self, name: str, chunk: Chunk, scopes: Sequence[Scope], found: NonFinite) -> None:
        rank = list(scopes).index(found.scope)
        moved = replace(found, position=found.position + chunk.start)
        known = self.births.get(name)
        if known is None or (rank, moved.position) < (known[0], known[1].position):
            self.births[name] = rank, moved

    def observation(self, found: Observation, chunk: Chunk) -> Observation:
        """Return what was observed on a chunk as a piece of what is observed on its prompt."""
        matrices = [_moved(matrix, chunk) for matrix in found.matrices]
        if chunk.is_last:
            matrices += self._extras()
        offset = max(chunk.start - chunk.prompt.score_start, 0)
        return replace(found, matrices=tuple(matrices), offset=offset)

    def _extras(self) -> list[TokenMatrix]:
        """Return the worst positions' statistics, by position."""
        kept = sorted(self.worst, key=lambda each: each.position)
        readings = [each.reading for each in kept if each.reading is not None]
        if not readings:
            return []
        at = np.concatenate([reading.positions for reading in readings])
        return [
            TokenMatrix(
                metric,
                readings[0].scopes,
                np.concatenate([reading.statistics[metric] for reading in readings], axis=1),
                at,
                "extra",
            )
            for metric in readings[0].statistics
        ]


def _moved(matrix: TokenMatrix, chunk: Chunk) -> TokenMatrix:
    """Return a matrix with positions in the whole prompt; isolated errors cover only a part."""
    at = matrix.positions
    if at is None and matrix.metric == "isolated_error":
        at = np.arange(chunk.piece.score_start, len(chunk.piece.token_ids))
    return matrix if at is None else replace(matrix, positions=at + chunk.start)
