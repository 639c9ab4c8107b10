"""What a capture says about itself: coverage proof, observer effect, timings, findings."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter

from quantwatch.config.lens import Products
from quantwatch.domain import Json, NonFinite, Scope
from quantwatch.telemetry import canonical_json

MAX_HEAD_ROWS = 16


@dataclass(slots=True)
class CaptureReport:
    """The record of one capture; measured values travel through the sink instead."""

    taps: dict[Scope, dict[str, str]] = field(default_factory=dict)
    """Scope → model name → module path, of the taps that all models have."""
    missing: dict[Scope, dict[str, str]] = field(default_factory=dict)
    """Scope → model name → why it isn't measured."""
    routers: dict[Scope, dict[str, str]] = field(default_factory=dict)
    """Layer → model name → module path of its router."""
    unrouted: dict[Scope, dict[str, str]] = field(default_factory=dict)
    """Layer → model name → why its choice of experts isn't compared."""
    firings: dict[Scope, dict[str, int]] = field(default_factory=dict)
    """The coverage proof: scope → model name → how often the tap fired, once per forward."""
    num_forwards: dict[str, int] = field(default_factory=dict)
    """Forward passes under observation, by model name."""
    observer_effect: dict[str, float] = field(default_factory=dict)
    """Model name → max |Δlogit| between unhooked and hooked."""
    prefill_effect: dict[str, float] = field(default_factory=dict)
    """Model name → largest relative error of its logits when a few tokens come in chunks."""
    chunked_prompts: int = 0
    """Prompts that went through in chunks; isolated errors are of their first chunks."""
    has_estimates: bool = False
    """Whether layers are estimated where they aren't read; in chunks they never are."""
    lens_products: Products = "float32"
    """What the lens multiplied in."""
    noise_floor_sources: dict[str, str] = field(default_factory=dict)
    """Condition of the noise floor → `measured`, or why it isn't."""
    num_padding_tokens: int = 0
    timings_s: dict[str, float] = field(default_factory=dict)
    head_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Candidate → ids whose logit differs on the reference's own input; none when more than 16."""
    first_nonfinite: dict[str, NonFinite] = field(default_factory=dict)
    """Model name → its first non-finite value; what the reference has itself is the reference's."""
    bit_equal: dict[str, bool] = field(default_factory=dict)
    events: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model name → what its kernels did unasked: slow calls, fallbacks, overflows, in words."""
    reference_cache: Json = field(default_factory=dict)
    """Whether the reference was live, recorded or read back, and what its audit found."""

    sharding: Json = field(default_factory=dict)
    """How many workers measured the suite's batches, and what became of them; empty: none did."""

    failed: dict[str, str] = field(default_factory=dict)
    """Served candidate → why it could not be measured to the end."""
    served: dict[str, dict[str, object]] = field(default_factory=dict)
    """Served candidate → requests, retries, positions read, missing by reason; and by how much the
    log-probability of a likeliest token differs when the same prompt is asked again, in nats."""

    def note_nonfinite(self, name: str, found: NonFinite | None) -> None:
        """Keep the finding of the first prompt."""
        known = self.first_nonfinite.get(name)
        if found is not None and (known is None or found.prompt < known.prompt):
            self.first_nonfinite[name] = found

    def facts(self, name: str) -> Json:
        """Return what is reported of one model, whatever it is compared with."""
        fired = {scope: counts[name] for scope, counts in self.firings.items() if name in counts}
        return {
            "observer_effect": self.observer_effect[name],
            "num_forwards": self.num_forwards[name],
            "events": list(self.events[name]),
            "routers": {s: paths[name] for s, paths in self.routers.items() if name in paths},
            "firings": fired,
        }

    def add_facts(self, name: str, facts: Json) -> None:
        """Report of a model what `facts` returned on the night it was run."""
        self.observer_effect[name] = facts["observer_effect"]
        self.num_forwards[name] = facts["num_forwards"]
        self.events[name] = tuple(facts["events"])
        for scope, path in facts["routers"].items():
            self.routers.setdefault(Scope(scope), {})[name] = path
        for scope, count in facts["firings"].items():
            self.firings.setdefault(Scope(scope), {})[name] = count

    def add(self, part: "CaptureReport") -> None:
        """Add what was found on a piece of the suite; pieces come in the order of the batches."""
        for name, equal in part.bit_equal.items():
            self.bit_equal[name] &= equal
        for name, found in part.first_nonfinite.items():
            self.note_nonfinite(name, found)
        for scope, reasons in part.missing.items():
            self.missing.setdefault(scope, {}).update(reasons)
        for scope, reasons in part.unrouted.items():
            for name, reason in reasons.items():
                self.unrouted.setdefault(scope, {}).setdefault(name, reason)
        for stage, spent in part.timings_s.items():
            self.timings_s[stage] = self.timings_s.get(stage, 0.0) + spent

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = perf_counter()
        try:
            yield
        finally:
            self.timings_s[stage] = self.timings_s.get(stage, 0.0) + perf_counter() - start

    def shift(self, source: str, target: str, seconds: float) -> None:
        """Count time that was spent inside one stage for another."""
        for stage, part in ((source, -seconds), (target, seconds)):
            self.timings_s[stage] = self.timings_s.get(stage, 0.0) + part

    def to_json(self) -> Json:
        """Return the report as plain JSON values."""
        plain: Json = json.loads(canonical_json(asdict(self)))
        return plain
