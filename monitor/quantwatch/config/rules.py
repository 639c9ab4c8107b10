"""Rules: a condition on one statistic of one metric at the scopes that match."""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from pydantic import Field, field_validator, model_validator

from quantwatch.config.base import Name, Strict
from quantwatch.config.counts import MOST_RUNS, MOfN, counts_problem
from quantwatch.config.drift import name_problem
from quantwatch.config.scopes import as_globs, scope_problem
from quantwatch.domain import Severity
from quantwatch.metrics.registry import METRICS

Statistic = Literal["mean", "p50", "p90", "p95", "p99", "p999", "max", "min"]
Kind = Literal["absolute", "median_ratio", "baseline"]
NonFinitePolicy = Literal["breach", "ignore", "inconclusive"]
Globs = str | tuple[str, ...]

NUMBER_OF_KIND = {"absolute": "threshold", "median_ratio": "factor", "baseline": "min_effect"}
"""The one number that each kind of rule takes."""
NONFINITE = "nonfinite"
"""The metric of the one rule that counts NaN and infinite values instead of measuring."""
DRIFT = "drift"
"""The metric of rules that count what changed beside the numbers: weights, versions, drivers."""
NOT_MEASURED, NOT_COMPARED = "not-measured", "not-compared"
OWN_RULES = (NOT_MEASURED, NOT_COMPARED)
"""The service's own rules on a candidate (alerts/unmeasured.py): nobody configures them."""
COUNTED = (NONFINITE, DRIFT)
"""Metrics that are counted, not measured: they are in no registry and have no statistic."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A number that rules may use and that follows from the row of a measured metric."""

    source: str
    title: str
    best_value: float
    formula: str


DERIVED = {
    "ppl_ratio": Derived("nll_difference", "Perplexity ratio", 1.0, "exp(mean nll_difference)"),
    "rms_delta_p": Derived("delta_p", "RMS of Δp", 0.0, "√(mean(delta_p²))"),
}


class RuleOverride(Strict):
    """A rule as it is written: a full one, or a name and the fields that change."""

    name: Name
    metric: str | None = None
    scope: Globs | None = None
    statistic: Statistic | None = None
    kind: Kind | None = None
    threshold: float | None = Field(default=None, allow_inf_nan=False)
    factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    min_effect: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    severity: Severity | None = None
    enter_runs: int | None = Field(default=None, ge=1, le=MOST_RUNS)
    m_of_n: MOfN | None = None
    leave_runs: int | None = Field(default=None, ge=1, le=MOST_RUNS)
    leave_factor: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    non_finite: NonFinitePolicy | None = None
    enabled: bool | None = None


class RuleConfig(RuleOverride):
    """A complete rule; impossible combinations fail on construction."""

    name: Name = Field(
        description="With the name of a default rule (or a rule of the check), only the fields "
        "that are given change."
    )
    metric: str = Field(
        description="A slug of docs/metrics.md, ppl_ratio, rms_delta_p, or drift: what changed "
        "since the baseline beside the numbers."
    )
    scope: Globs = Field(
        default="model",
        description="Glob over scopes, or a list of them; layers.* means whole layers only. For "
        "drift over names: weights_sha, reference.*, environment.libraries.torch, …",
    )
    statistic: Statistic = Field(default="mean", description="Which statistic of the measurement.")
    kind: Kind = Field(
        default="absolute",
        description="absolute: beyond threshold. median_ratio: beyond factor × the median over "
        "whole layers. baseline: worse than the baseline by more than "
        "max(min_effect, 3 × noise floor).",
    )
    threshold: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="For absolute: above it is a breach; below it where higher is better.",
    )
    factor: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="For median_ratio."
    )
    min_effect: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="For baseline: a smaller change for the worse is no breach.",
    )
    severity: Severity = Field(
        default=Severity.CRITICAL, description="warning → warn, critical → regression."
    )
    enter_runs: int = Field(
        default=1,
        ge=1,
        le=MOST_RUNS,
        description="Succeeded runs in a row that breach before it fires.",
    )
    m_of_n: MOfN | None = Field(
        default=None,
        description="Instead of enter_runs: [2, 5] fires when a run breaches and so did two of the "
        "last five judged ones, itself included. At most 30.",
    )
    leave_runs: int = Field(
        default=2,
        ge=1,
        le=MOST_RUNS,
        description="Succeeded runs in a row that are clear of it again.",
    )
    leave_factor: float = Field(
        default=0.8,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Clear means: at most this part of the limit's distance from the best value.",
    )
    non_finite: NonFinitePolicy = Field(
        default="breach",
        description="What NaN and infinite values of the metric are to this rule; the rule "
        "nonfinite, which nobody can change, finds them anyway.",
    )
    enabled: bool = Field(default=True, description="false switches the rule off.")

    @property
    def globs(self) -> tuple[str, ...]:
        """The scope as a tuple of globs."""
        return as_globs(self.scope)

    @property
    def source(self) -> str:
        """Slug of the measured metric that the rule reads."""
        return DERIVED[self.metric].source if self.metric in DERIVED else self.metric

    @property
    def entering(self) -> tuple[int, int | None]:
        """How many breaches it takes, and among how many judged runs; None: they are in a row.

        One breach is enough whatever it is one of.
        """
        if self.m_of_n is None:
            return self.enter_runs, None
        m, n = self.m_of_n
        return m, n if m > 1 else None

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, metric: str) -> str:
        if metric in COUNTED or metric in DERIVED:
            return metric
        usable = [slug for slug, spec in METRICS.items() if spec.direction != "neutral"]
        if metric in usable:
            return metric
        close = get_close_matches(metric, [*usable, *DERIVED], n=1)
        why = "has no worse direction" if metric in METRICS else "is unknown"
        hint = f"; did you mean {close[0]}?" if close and metric not in METRICS else ""
        allowed = ", ".join([*usable, *DERIVED, DRIFT])
        raise ValueError(f"{metric!r} {why}{hint}; allowed: {allowed}")

    @model_validator(mode="after")
    def _consistent(self) -> "RuleConfig":
        if (problem := counts_problem(self.enter_runs, self.m_of_n)) is not None:
            raise ValueError(problem)
        if self.metric == NONFINITE:
            return self
        if self.metric == DRIFT:
            return self._watching_names()
        for problem in self._problems():
            if problem is not None:
                raise ValueError(problem)
        for glob in self.globs:
            if (problem := scope_problem(glob, self.source)) is not None:
                raise ValueError(problem)
        return self

    def _watching_names(self) -> "RuleConfig":
        """Return the rule; raises ValueError when it watches nothing, or takes a number."""
        given = [key for key in NUMBER_OF_KIND.values() if getattr(self, key) is not None]
        if given or self.kind != "absolute" or self.statistic != "mean":
            raise ValueError("a rule on drift takes scope only: the names that it watches")
        problems = [name_problem(glob) for glob in self.globs] or ["scope is empty"]
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)
        return self

    def _problems(self) -> tuple[str | None, ...]:
        return (
            self._number_problem(),
            self._derived_problem(),
            self._ratio_problem(),
            self._baseline_problem(),
            self._estimate_problem(),
        )

    def _number_problem(self) -> str | None:
        wanted = NUMBER_OF_KIND[self.kind]
        given = [key for key in NUMBER_OF_KIND.values() if getattr(self, key) is not None]
        if given == [wanted]:
            return None
        return f'kind = "{self.kind}" takes {wanted}; given: {", ".join(given) or "none"}'

    def _derived_problem(self) -> str | None:
        if self.metric in DERIVED and self.statistic != "mean":
            return f"{self.metric} has only the statistic mean, not {self.statistic}"
        return None if self.globs else "scope is empty; give at least one glob"

    def _ratio_problem(self) -> str | None:
        """A factor of a median means something only when 0 is best and layers are measured."""
        if self.kind != "median_ratio":
            return None
        spec = METRICS[self.source]
        if self.metric not in DERIVED and spec.where != "model" and spec.best_value == 0:
            return None
        usable = [s.slug for s in METRICS.values() if s.where != "model" and s.best_value == 0]
        lower = [slug for slug in usable if METRICS[slug].direction == "lower"]
        return f'kind = "median_ratio" needs one of {", ".join(lower)}'

    def _estimate_problem(self) -> str | None:
        """Only a mean can be held against the exact sample's."""
        is_plain = (self.kind, self.statistic) == ("absolute", "mean")
        if is_plain or not METRICS[self.source].estimated:
            return None
        return f'{self.metric} takes kind = "absolute" and the statistic mean; lens_kl takes all'

    def _baseline_problem(self) -> str | None:
        """One equal token is +∞ there: its prompt has no mean that could be compared."""
        is_finite = self.metric in DERIVED or math.isfinite(METRICS[self.metric].best_value)
        if self.kind != "baseline" or is_finite:
            return None
        known = [s for s in METRICS.values() if s.direction != "neutral"]
        usable = [spec.slug for spec in known if math.isfinite(spec.best_value)]
        return f'kind = "baseline" needs one of {", ".join([*usable, *DERIVED])}'
