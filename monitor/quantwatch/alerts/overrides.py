"""Which rules hold for a candidate."""

from quantwatch.config.default_rules import DEFAULT_RULES, applies, merge_rules
from quantwatch.config.rules import RuleConfig
from quantwatch.config.schema import CandidateConfig, CheckConfig

__all__ = ["merge_rules", "out_of_reach", "rules_for"]

_OF_TARGETS = {"delta_p", "nll_reference", "nll_candidate", "nll_difference"}
_LENS = {"lens_kl", "topk_logit_deviation_k5", "topk_logit_deviation_k3"}


def rules_for(
    check: CheckConfig, candidate: CandidateConfig, *, has_targets: bool = True
) -> tuple[RuleConfig, ...]:
    """Return the rules that judge a candidate: defaults, changed by the check, then by itself.

    Left out are rules that are switched off, and those on metrics that the check doesn't measure
    (lens_positions = 0, isolated_fraction = 0, estimates without lens = "estimated"), that its
    prompts have no next tokens for (`has_targets`), or that a server doesn't tell. Raises
    ConfigError on rules that don't fit.
    """
    merged = merge_rules(DEFAULT_RULES, check.rules, candidate.rules)
    fitting = (rule for rule in merged if applies(rule, candidate.served))
    measured = (rule for rule in fitting if rule.enabled and _is_measured(rule, check))
    return tuple(rule for rule in measured if has_targets or rule.source not in _OF_TARGETS)


def out_of_reach(check: CheckConfig, candidate: CandidateConfig) -> tuple[str, ...]:
    """Return the names of the check's rules on what a served candidate doesn't tell."""
    if candidate.served is None:
        return ()
    merged = merge_rules(DEFAULT_RULES, check.rules)
    return tuple(r.name for r in merged if r.enabled and not applies(r, candidate.served))


def _is_measured(rule: RuleConfig, check: CheckConfig) -> bool:
    if rule.metric == "isolated_error":
        return check.isolated_fraction > 0
    if rule.metric == "lens_kl_estimated":
        return check.lens == "estimated"
    through_lens = rule.metric in _LENS and "model" not in rule.globs
    return check.lens_positions > 0 or not through_lens
