"""The records that travel from stage to stage: no torch, no SQL, no clock."""

from quantwatch.domain.inputs import (
    Fingerprint,
    Prompt,
    Suite,
    Variant,
)
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
    Alert,
    CandidateResult,
    Culprit,
    Measurement,
    RunResult,
)
from quantwatch.domain.words import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MODEL,
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
    "MODEL",
    "Alert",
    "Block",
    "CandidateResult",
    "Culprit",
    "Fingerprint",
    "Json",
    "Measurement",
    "NonFinite",
    "Observation",
    "Progress",
    "Prompt",
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
