"""What capture hands on. Shapes: S scopes, P positions of one prompt, N prompts, K kept logits."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantwatch.domain.words import Scope


@dataclass(frozen=True, slots=True)
class TokenMatrix:
    """One metric at S scopes for P positions of one prompt.

    `positions` is None when all scored positions were measured. A role of `extra` marks positions
    that are shown but never enter a mean or a test (the tokens with the largest final KL).
    """

    metric: str
    scopes: tuple[Scope, ...]
    values: NDArray[np.float64]
    positions: NDArray[np.int64] | None = None
    role: Literal["sample", "extra"] = "sample"
    num_missing: int = 0
    """Positions that were asked for and came to nothing: a server's answer that can't be read."""


@dataclass(frozen=True, slots=True)
class TopLogits:
    """Both models' K largest logits at one prompt's scored positions, all [P, K]."""

    reference_ids: NDArray[np.int32]
    reference_logits: NDArray[np.float32]
    candidate_ids: NDArray[np.int32]
    candidate_logits: NDArray[np.float32]
    candidate_at_reference: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where a non-finite value appears first in forward order."""

    scope: Scope
    prompt: int
    position: int


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How many slots of one prompt's scored tokens each expert of a layer has, int64 [E]."""

    scope: Scope
    reference: NDArray[np.int64]
    candidate: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Observation:
    """All that capture measured of one candidate on one prompt, or on a piece of a long one."""

    candidate: str
    prompt: int
    matrices: tuple[TokenMatrix, ...]
    top: TopLogits | None = None
    first_nonfinite: NonFinite | None = None
    loads: tuple[ExpertLoad, ...] = ()
    offset: int | None = None
    """Of a piece of a prompt: how many scored positions the pieces before it cover. Pieces come in
    order, loads add up, and what is of the whole prompt comes with the last one. None: no piece."""


class Sink(Protocol):
    """Where capture's results go; the pipeline hands one in."""

    def observe(self, observation: Observation) -> None:
        """Take one candidate's measurements on one prompt. Prompts may arrive in any order."""


class Progress(Protocol):
    """Where a long stage reports: a progress bar, a log, or nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        """Begin a stage of so many tokens (0 when it has no tokens)."""

    def advance(self, tokens: int) -> None:
        """Report tokens done since the last call. May raise KeyboardInterrupt to cancel."""


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix kept as a blob; the store chooses the codec. `prompt` is None for blocks over all
    prompts.

    kind `per_prompt`: float64 [N, S, 4] = n, Σ, Σ², max of the finite values of each prompt and
    scope; kind `per_token`: float64 [S, P] of one prompt, `missing` [S, P] marks cells that were
    not measured; kind `topk`: float64 [5, P, K] of one prompt in the order of the fields of
    `TopLogits`.
    """

    candidate: str
    kind: Literal["per_prompt", "per_token", "topk"]
    metric: str
    prompt: int | None
    scopes: tuple[Scope, ...]
    values: NDArray[np.float64]
    missing: NDArray[np.bool_] | None = None
