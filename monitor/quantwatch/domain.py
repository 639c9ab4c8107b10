"""The records that travel from stage to stage. No torch, no SQL, no clock.

Shapes in this module: S scopes, P measured positions of one prompt, N prompts, K kept logits.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

Json = Mapping[str, Any]
Scope = NewType("Scope", str)
"""Canonical name of a measured place, the same on every architecture: ``embedding``, ``layers.12``,
``layers.12.attention``, ``layers.12.mlp``, ``layers.12.mlp.down_proj``, ``final_norm``, ``head``, ``model``."""

MODEL = Scope("model")
EMBEDDING = Scope("embedding")
FINAL_NORM = Scope("final_norm")
HEAD = Scope("head")


def layer_index(scope: str) -> int | None:
    """Return the number of the decoder layer a scope belongs to, None outside the layers."""
    found = re.match(r"layers\.(\d+)(\.|$)", scope)
    return int(found.group(1)) if found else None


def is_layer(scope: str) -> bool:
    """Say whether a scope is a whole decoder layer (``layers.12``)."""
    return re.fullmatch(r"layers\.\d+", scope) is not None


class Verdict(StrEnum):
    """What a succeeded run says. Ordered by `severity_order`, worst first."""

    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    WARN = "warn"
    IMPROVEMENT = "improvement"
    PASS = "pass"

    @classmethod
    def worst(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """Return the worst of several verdicts; raises ValueError on none."""
        return min(verdicts, key=list(cls).index)


class RunStatus(StrEnum):
    """Execution status, a field of its own: the monitor's own trouble never looks like a regression."""

    QUEUED = "queued"
    PREPARING = "preparing"
    MEASURING = "measuring"
    FINALIZING = "finalizing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Severity(StrEnum):
    """`warning` turns the verdict to warn, `critical` to regression."""

    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids. `pieces[i]` is the text of token i (the dashboard can't detokenize)."""

    index: int
    category: str
    source: str
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str | None = None
    score_start: int = 0
    """First scored position (0-based): llama.cpp's protocol scores the second half of each window."""

    @property
    def num_scored(self) -> int:
        """Number of scored positions."""
        return len(self.token_ids) - self.score_start


@dataclass(frozen=True, slots=True)
class Suite:
    """An ordered set of prompts, identified by the SHA-256 of its token ids and score starts."""

    name: str
    hash: str
    prompts: tuple[Prompt, ...]

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a variant as a set of digests, so that a drift can be named. SHA-256 hex or ''."""

    weights_sha: str
    config_sha: str
    tokenizer_sha: str
    recipe_sha: str
    serve_sha: str
    fault_sha: str

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the six digests."""
        from quantwatch.telemetry import canonical_sha

        return canonical_sha({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Variant:
    """What was loaded as the reference or as a candidate."""

    name: str
    fingerprint: Fingerprint
    execution: str
    """`float32`, `bfloat16`, … for plain models; `dequantized`, `aten`, … for quantized ones."""
    size_bytes: int
    bits_per_weight: float
    source: Json
    notes: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    """Layers a recipe left alone: (scope, reason)."""


@dataclass(frozen=True, slots=True)
class TokenMatrix:
    """One metric at S scopes for P positions of one prompt.

    `positions` is None when all scored positions were measured. A role of `extra` marks positions that
    are shown but never enter a mean or a test (the tokens with the largest final KL).
    """

    metric: str
    scopes: tuple[Scope, ...]
    values: NDArray[np.float64]
    positions: NDArray[np.int64] | None = None
    role: Literal["sample", "extra"] = "sample"


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The K largest logits per scored position of one prompt, both models. Ids int32, logits float32, [P, K]."""

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
class Observation:
    """Everything capture measured of one candidate on one prompt. Values leave capture only this way."""

    candidate: str
    prompt: int
    matrices: tuple[TokenMatrix, ...]
    top: TopLogits | None = None
    first_nonfinite: NonFinite | None = None


class Sink(Protocol):
    """Where capture's results go; the pipeline hands one in."""

    def observe(self, observation: Observation) -> None:
        """Take one candidate's measurements on one prompt. Prompts may arrive in any order."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All statistics of one metric at one scope for one candidate: one wide row.

    Finite statistics skip non-finite values and are None only when none is left. `se` is clustered by
    prompt. `max` is the worst-direction extreme's value for metrics where lower is better.
    """

    metric: str
    scope: Scope
    n: int
    n_nan: int
    n_posinf: int
    n_neginf: int
    n_missing: int
    mean: float | None
    std: float | None
    se: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None
    max_prompt: int | None
    max_position: int | None
    method: str

    @property
    def num_nonfinite(self) -> int:
        """Number of NaN and infinite values."""
        return self.n_nan + self.n_posinf + self.n_neginf


@dataclass(frozen=True, slots=True)
class Block:
    """A matrix kept as a blob; the store chooses the codec. `prompt` is None for blocks over all prompts.

    kind `per_prompt`: float64 [N, S, 4] = n, Σ, Σ², max of the finite values of each prompt and scope;
    kind `per_token`: float64 [S, P] of one prompt, `missing` [S, P] marks cells that were not measured;
    kind `topk`: float64 [5, P, K] of one prompt in the order of the fields of `TopLogits`.
    """

    candidate: str
    kind: Literal["per_prompt", "per_token", "topk"]
    metric: str
    prompt: int | None
    scopes: tuple[Scope, ...]
    values: NDArray[np.float64]
    missing: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Culprit:
    """The finest scope whose isolated error stands out, in words too."""

    scope: Scope | None
    value: float | None
    first_difference: Scope | None
    words: str
    head_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Alert:
    """One scope of one candidate that breaches one rule. A non-finite value has value None and a kind."""

    rule: str
    candidate: str
    metric: str
    statistic: str
    scope: Scope
    value: float | None
    value_kind: str
    threshold: float
    severity: Severity
    words: str


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """One candidate of one run. `failure` is the reason when it could not be measured."""

    name: str
    variant: Variant | None
    verdict: Verdict | None
    measurements: tuple[Measurement, ...] = ()
    culprit: Culprit | None = None
    first_nonfinite: NonFinite | None = None
    bit_equal: bool = False
    failure: str | None = None
    baseline_differences: tuple[Json, ...] = ()

    def find(self, metric: str, scope: str = MODEL) -> Measurement | None:
        """Return the measurement of one metric at one scope, None when it wasn't measured."""
        return next((m for m in self.measurements if m.metric == metric and m.scope == scope), None)


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run as the store keeps it and the reports show it (blobs apart)."""

    run_id: str
    check: str
    status: RunStatus
    verdict: Verdict | None
    started_at: datetime
    finished_at: datetime | None
    suite_name: str
    suite_hash: str
    num_tokens: int
    num_prompts: int
    reference: Variant | None
    capture_sha: str
    metrics_version: int
    environment: Json
    config: Json
    candidates: tuple[CandidateResult, ...] = ()
    alerts: tuple[Alert, ...] = ()
    noise_floor: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(metric, scope) → largest difference of the reference against itself."""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    baseline_run_id: str | None = None
    baseline_mismatch: tuple[str, ...] = ()
    capture: Json = field(default_factory=dict)
    """Coverage proof, observer effect, padding, module paths of the taps."""
    reason: str | None = None
