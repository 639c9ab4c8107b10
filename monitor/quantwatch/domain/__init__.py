"""The records that travel from stage to stage: no torch, no SQL, no clock."""

from quantwatch.domain.comparisons import MIN_SAMPLES, Baseline, Comparison
from quantwatch.domain.history import Ended, Judged
from quantwatch.domain.inputs import (
    WARNING,
    Fingerprint,
    Prompt,
    Suite,
    Variant,
)
from quantwatch.domain.lifecycle import RunEvent
from quantwatch.domain.observations import (
    Block,
    NonFinite,
    Observation,
    Progress,
    Sink,
    TokenMatrix,
    TopLogits,
)
from quantwatch.domain.results import (
    UNDECIDED,
    Alert,
    CandidateResult,
    Culprit,
    Measurement,
    RuleOutcome,
    RunResult,
)
from quantwatch.domain.words import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MODEL,
    REASON_CODES,
    Json,
    RunStatus,
    Scope,
    Severity,
    Verdict,
    is_layer,
    layer_index,
)

__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "HEAD",
    "MIN_SAMPLES",
    "MODEL",
    "REASON_CODES",
    "UNDECIDED",
    "WARNING",
    "Alert",
    "Baseline",
    "Block",
    "CandidateResult",
    "Comparison",
    "Culprit",
    "Ended",
    "Fingerprint",
    "Json",
    "Judged",
    "Measurement",
    "NonFinite",
    "Observation",
    "Progress",
    "Prompt",
    "RuleOutcome",
    "RunEvent",
    "RunResult",
    "RunStatus",
    "Scope",
    "Severity",
    "Sink",
    "Suite",
    "TokenMatrix",
    "TopLogits",
    "Variant",
    "Verdict",
    "is_layer",
    "layer_index",
]
