"""What the reader of a run looks at: one candidate, prompt, metric, token and layer."""

from dataclasses import dataclass

from quantwatch.domain import CandidateResult, RunResult
from quantwatch_dashboard.logic import naming
from quantwatch_dashboard.logic.cells import Kind

HEADROOM = "headroom_bits"
TOPK = ("topk_logit_deviation_k5", "topk_logit_deviation_k3")
ROUTER = "router_weight_l1"
MATRICES = ("rel_error", "lens_kl", *TOPK, HEADROOM, ROUTER)
"""Metrics that are kept token by token, in the order in which they are offered."""
RANGES: dict[str, tuple[float, float]] = {
    "rel_error": (1e-4, 1.0),
    "lens_kl": (1e-5, 10.0),
    "topk_logit_deviation_k5": (1e-3, 10.0),
    "topk_logit_deviation_k3": (1e-3, 10.0),
    HEADROOM: (0.0, 16.0),
    ROUTER: (1e-4, 2.0),
}
"""Fixed, so that pictures of two prompts, candidates or runs can be compared."""
CHANGES: dict[Kind, tuple[float, float]] = {"ratio": (-4.0, 4.0), "bits change": (-4.0, 4.0)}


@dataclass(frozen=True, slots=True)
class Focus:
    """What is looked at. `before` is the run it is held against, None for the run alone."""

    url: str
    result: RunResult
    candidate: CandidateResult
    prompt: int
    metric: str
    position: int
    layer: str | None = None
    before: RunResult | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Name of the block: run, candidate, metric, prompt."""
        return self.result.run_id, self.candidate.name, self.metric, self.prompt

    @property
    def token(self) -> tuple[int, int]:
        """Prompt and position."""
        return self.prompt, self.position

    @property
    def kind(self) -> Kind:
        """What kind of value the heatmap shows."""
        if self.before is not None:
            return "bits change" if self.metric == HEADROOM else "ratio"
        return "bits" if self.metric == HEADROOM else "log"

    @property
    def title(self) -> str:
        """What the color bar says."""
        if self.before is None:
            return naming.axis(self.metric)
        lost = self.metric == HEADROOM
        return "Headroom lost, bits" if lost else f"{naming.title(self.metric)}: run ÷ baseline"

    @property
    def file_name(self) -> str:
        """Start of the names of files that are saved from here."""
        return f"{self.result.run_id}-{self.candidate.name}-{self.metric}"

    def range(self, *, fit: bool) -> tuple[float, float] | None:
        """Return the range of the colors, None to fit them to the picture."""
        if fit:
            return None
        return CHANGES.get(self.kind) or RANGES[self.metric]
