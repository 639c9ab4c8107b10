"""Every metric: slug, unit, direction, best value, formula. Imports no torch.

docs/metrics.md is checked against this table by a test.

Notation: p, q next-token distributions of reference and candidate; z, z' their logits; h, h' hidden
states; f, f' the module's output on the *reference's* input; ‖·‖ Euclidean norm over the hidden
axis; E, E' the experts a router chose for a token, w, w' the weights of their outputs.
"""

from dataclasses import dataclass
from typing import Literal

VERSION = 1
"""Raised whenever a stored number would change. Runs with other versions are not compared."""

Where = Literal["model", "layer", "tap", "isolated", "router"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `direction` says which way is better; `log_scale` how the dashboard draws it."""

    slug: str
    title: str
    unit: str
    direction: Literal["lower", "higher", "neutral"]
    best_value: float
    formula: str
    where: Where
    log_scale: bool = False
    token_block: bool = False
    """Whether a per-token block is stored."""
    estimated: bool = False
    """Whether it stands for another metric that was measured on a sample."""


_SPECS = (
    MetricSpec("logit_kl", "Output KL", "nats", "lower", 0.0, "KL(p‖q) = Σ p·ln(p/q), full vocabulary", "model", True, True),
    MetricSpec("reverse_kl", "Reverse KL", "nats", "lower", 0.0, "KL(q‖p) = Σ q·ln(q/p)", "model", True),
    MetricSpec("js", "Jensen–Shannon", "nats", "lower", 0.0, "½KL(p‖m) + ½KL(q‖m), m = (p+q)/2; at most ln 2", "model", True),
    MetricSpec("tv", "Total variation", "1", "lower", 0.0, "½Σ|p − q|", "model", True),
    MetricSpec("top1_agreement", "Top-1 agreement", "1", "higher", 1.0, "1 if argmax z = argmax z' or the two are a tie (within one spacing of the head's output dtype) in either model", "model"),
    MetricSpec("topk_overlap_k5", "Top-5 overlap", "1", "higher", 1.0, "|top5(z) ∩ top5(z')| ÷ 5", "model"),
    MetricSpec("topk_logit_deviation_k5", "Top-5 logit deviation", "logits", "lower", 0.0, "mean |z − z'| over the reference's 5 largest logits; in a layer, of the lens logits", "layer", True, True),
    MetricSpec("topk_logit_deviation_k3", "Top-3 logit deviation", "logits", "lower", 0.0, "mean |z − z'| over the reference's 3 largest logits; in a layer, of the lens logits", "layer", True, True),
    MetricSpec("delta_p", "Δp of the target token", "1", "neutral", 0.0, "q(target) − p(target)", "model"),
    MetricSpec("nll_reference", "NLL, reference", "nats", "neutral", 0.0, "−ln p(target)", "model"),
    MetricSpec("nll_candidate", "NLL, candidate", "nats", "lower", 0.0, "−ln q(target)", "model"),
    MetricSpec("nll_difference", "NLL difference", "nats", "lower", 0.0, "ln p(target) − ln q(target); exp of its mean is the perplexity ratio", "model"),
    MetricSpec("leaked_mass", "Leaked mass", "1", "lower", 0.0, "candidate's probability outside the shared vocabulary", "model", True),
    MetricSpec("served_kl", "Output KL, at least", "nats", "lower", 0.0, "Σ p·ln(p/q) over the ids that a server told and the rest as one: a lower bound of KL(p‖q)", "model", True),
    MetricSpec("served_tv", "Total variation, at least", "1", "lower", 0.0, "½Σ|p − q| over the ids that a server told and the rest as one: a lower bound", "model", True),
    MetricSpec("served_tv_most", "Total variation, at most", "1", "lower", 0.0, "½(Σ|p − q| over the ids that a server told + p(rest) + q(rest)): an upper bound", "model", True),
    MetricSpec("served_unseen", "Unseen mass", "1", "neutral", 0.0, "p(rest): the reference's probability at ids that a server told nothing of", "model", True),
    MetricSpec("lens_kl", "Per-layer KL", "nats", "lower", 0.0, "KL between the next-token distributions read off at the layer through the reference's final norm and head", "layer", True, True),
    MetricSpec("lens_kl_estimated", "Per-layer KL, estimated", "nats", "lower", 0.0, "−Σ_T p·Δ − ρ·mean(Δ_j) + ln(Σ_T p·e^Δ + ρ·mean(e^Δ_j)), Δ = z' − z of the lens: T the reference's K likeliest ids, ρ the mass of the rest, j M draws from it", "layer", True, estimated=True),
    MetricSpec("lens_kl_error", "Estimate's error", "1", "neutral", 0.0, "|estimate − exact| ÷ the larger of both per-layer KLs, where both were taken; 0 when both are 0", "layer", True, True),
    MetricSpec("lens_kl_difference", "Estimate − exact", "nats", "neutral", 0.0, "estimated − exact per-layer KL, where both were taken", "layer"),
    MetricSpec("rel_error", "Relative error", "1", "lower", 0.0, "‖h − h'‖ ÷ ‖h‖; 0 when both are zero", "tap", True, True),
    MetricSpec("sqnr_db", "SQNR", "dB", "higher", float("inf"), "20·log10(‖h‖ ÷ ‖h − h'‖); +∞ means equal and passes", "tap"),
    MetricSpec("cosine", "Cosine", "1", "higher", 1.0, "h·h' ÷ (‖h‖·‖h'‖)", "tap"),
    MetricSpec("max_abs", "Largest magnitude", "1", "neutral", 0.0, "max |h'|", "tap", True),
    MetricSpec("headroom_bits", "Headroom", "bits", "higher", float("inf"), "log2(largest finite value of the candidate's dtype ÷ max |h'|)", "tap", token_block=True),
    MetricSpec("feature_kl", "Feature KL", "nats", "lower", 0.0, "KL(softmax(h) ‖ softmax(h')) over the hidden axis; kept for parity with the articles, saturates on huge channels", "tap", True),
    MetricSpec("isolated_error", "Isolated error", "1", "lower", 0.0, "‖f − f'‖ ÷ ‖update‖ with the reference's input; update = f − input for a layer, f for everything else", "isolated", True),
    MetricSpec("router_overlap", "Router overlap", "1", "higher", 1.0, "|E ∩ E'| ÷ |E|: share of the reference's chosen experts that the candidate chose", "router"),
    MetricSpec("router_weight_l1", "Router weight L1", "1", "lower", 0.0, "Σ|w − w'| over all experts; 0 for one that isn't chosen", "router", True, True),
    MetricSpec("router_flips", "Router flips", "1", "lower", 0.0, "1 if E ≠ E' although rounding could not have chosen other experts than E, else 0", "router"),
    MetricSpec("router_load_tv", "Load shift", "1", "lower", 0.0, "½Σ|a − a'| over all experts, a: an expert's share of the slots of all tokens", "router", True),
    MetricSpec("router_load_max", "Peak load", "1", "lower", 1.0, "largest a' ÷ mean a', of the candidate", "router"),
)  # fmt: skip

METRICS: dict[str, MetricSpec] = {spec.slug: spec for spec in _SPECS}
ROUTER_METRICS: tuple[str, ...] = tuple(s.slug for s in _SPECS if s.where == "router")
"""Measured in layers with experts only."""
OF_SERVED_ALONE = frozenset(slug for slug in METRICS if slug.startswith("served_"))
"""What is measured of candidates that are served, and of no other."""
