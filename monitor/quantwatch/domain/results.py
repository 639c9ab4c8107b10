"""What a finished run says: measurements, culprits, alerts, verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from quantwatch.domain.detection import Detectable
from quantwatch.domain.inputs import Variant
from quantwatch.domain.observations import NonFinite
from quantwatch.domain.words import MODEL, Json, RunStatus, Scope, Severity, Verdict


@dataclass(frozen=True, slots=True)
class Measurement:
    """All statistics of one metric at one scope for one candidate: one wide row.

    Finite statistics skip non-finite values and are None only when none is left. `se` is clustered
    by prompt. `max_prompt` and `max_position` locate the worst value (the smallest
    where higher is better, a non-finite one before any finite one).
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
class Culprit:
    """The finest scope whose isolated error stands out, in words too."""

    scope: Scope | None
    value: float | None
    first_difference: Scope | None
    words: str
    head_rows: tuple[int, ...] = ()


UNDECIDED = ("missing", "inconclusive")
"""Value kinds of what a rule could not decide: nothing measured, or not clear enough."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One scope of one candidate that breaches one rule, or that the rule can't decide.

    A value that is not finite, or not decided, is None and a kind.
    """

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

    @property
    def is_decided(self) -> bool:
        """Whether the rule is breached; otherwise it can't tell, and the verdict can't either."""
        return self.value_kind not in UNDECIDED


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """What one rule says of one candidate in one run: the alert state machine's only input.

    `outcome`: breach · clear (beyond the leave threshold as well) · between the two · undecided
    (measured, but nothing can be told from it) · missing (nothing was measured). `scope` and
    `value` are the worst reading.
    """

    rule: str
    candidate: str
    rule_sha: str
    severity: Severity
    outcome: Literal["breach", "between", "clear", "undecided", "missing"]
    enter_runs: int
    leave_runs: int
    scope: Scope | None
    value: float | None
    value_kind: str
    threshold: float | None
    words: str
    direction: int = 1
    """+1 when higher is worse, −1 when lower is."""
    may_be_chance: bool = False
    """Whether it rests on a statistical test: a confirmation run then precedes any message."""
    enter_window: int | None = None
    """Among how many judged runs the `enter_runs` breaches are; None: they are in a row."""
    was_tested: bool = False
    """Of what is undecided: whether everything was measured and the test did not establish it. A
    confirmation run has then answered: it does not confirm."""
    opens: bool = True
    """Whether a breach opens an alert: not if all of it was told before, and nothing has become
    worse since it was last found good."""


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
    detectable: tuple[Detectable, ...] = ()
    """What its rules would have found, in their order."""

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
    outcomes: tuple[RuleOutcome, ...] = field(default=(), compare=False)
    """What every rule says of every candidate; alerts are the breaches among them. For the alert
    state machine: a run that was read back has none."""

    def find(self, candidate: str) -> CandidateResult | None:
        """Return a candidate's result by name, None when the run has no such candidate."""
        return next((result for result in self.candidates if result.name == candidate), None)
