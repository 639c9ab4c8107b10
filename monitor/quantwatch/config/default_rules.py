"""The rules that hold without a word in quantwatch.toml, and how what is written changes them.

Thresholds: 0.15 nats per layer is the source articles' limit. A tenth of the tokens with another
first choice, or a perplexity 5 % higher, is what users notice. The worst layer of SmolLM2-135M has
1.6 × the median isolated error in bfloat16, 1.4 × under INT8 and 1.3 × under INT4 with groups
of 64; one down_proj × 1.25 over INT8 reaches 12 ×.
"""

from collections.abc import Iterable

from pydantic import ValidationError

from quantwatch.config.problems import sentences
from quantwatch.config.rules import (
    COUNTED,
    NONFINITE,
    NUMBER_OF_KIND,
    OWN_RULES,
    RuleConfig,
    RuleOverride,
)
from quantwatch.config.served import ServedConfig
from quantwatch.domain import Severity
from quantwatch.errors import ConfigError
from quantwatch.metrics.registry import OF_SERVED_ALONE

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(name="nonfinite", metric=NONFINITE, scope="*"),
    RuleConfig(name="layer-kl", metric="lens_kl", scope="layers.*", threshold=0.15),
    RuleConfig(
        name="isolated-error-outlier",
        metric="isolated_error",
        scope=("layers.*", "embedding", "final_norm", "head"),
        kind="median_ratio",
        factor=3,
    ),
    RuleConfig(name="top1-agreement", metric="top1_agreement", threshold=0.9),
    RuleConfig(
        name="perplexity-ratio", metric="ppl_ratio", threshold=1.05, severity=Severity.WARNING
    ),
    RuleConfig(name="baseline-kl", metric="logit_kl", kind="baseline", min_effect=5e-4),
    RuleConfig(name="baseline-served-kl", metric="served_kl", kind="baseline", min_effect=5e-4),
    RuleConfig(
        name="baseline-top1-agreement",
        metric="top1_agreement",
        kind="baseline",
        min_effect=0.01,
        severity=Severity.WARNING,
    ),
    RuleConfig(
        name="baseline-isolated-error",
        metric="isolated_error",
        scope=("layers.*", "embedding", "final_norm", "head"),
        kind="baseline",
        min_effect=1e-3,
        severity=Severity.WARNING,
    ),
)

_OF_SERVED = OF_SERVED_ALONE | {"top1_agreement", "topk_overlap_k5"}
"""Metrics that rules find in a served candidate."""
_OF_TARGETS = frozenset({"nll_candidate", "nll_difference", "delta_p"})


def applies(rule: RuleConfig, served: ServedConfig | None) -> bool:
    """Say whether a rule is about something that can be measured of a candidate, served or not.

    A server that tells only the likeliest tokens (llama.cpp's) leaves out the unlikely targets: a
    mean over the others is shown, and judges nothing.
    """
    if rule.metric in COUNTED:
        return True
    if served is None:
        return rule.source not in OF_SERVED_ALONE
    return rule.source in (_OF_SERVED if served.api == "llamacpp" else _OF_SERVED | _OF_TARGETS)


_COUNTS = ("enter_runs", "m_of_n")
"""Two ways to count breaches, of which a rule has one: what is written replaces the other."""


def merge_rules(*levels: Iterable[RuleOverride]) -> tuple[RuleConfig, ...]:
    """Return the rules of all levels, later ones changing earlier ones of the same name.

    Raises ConfigError on a rule that is new but incomplete, or that doesn't fit together.
    """
    rules: dict[str, RuleConfig] = {}
    for level in levels:
        for written in level:
            rules[written.name] = merge_rule(rules, written)
    return tuple(rules.values())


def merge_rule(rules: dict[str, RuleConfig], written: RuleOverride) -> RuleConfig:
    """Return the rule that is meant: the known one of that name with some fields changed, or new.

    Raises ConfigError.
    """
    known = rules.get(written.name)
    _refuse_nonfinite(known, written)
    if written.name in OWN_RULES:
        raise ConfigError(f"the rule {written.name} is the service's own; choose another name")
    if known is None and written.metric is None:
        raise ConfigError(
            f"rule {written.name!r} is unknown, and a new rule needs at least metric and a number "
            f"(threshold, factor or min_effect); known rules: {', '.join(rules) or 'none'}"
        )
    given = written.model_dump(exclude_unset=True, exclude_none=True)
    try:
        return RuleConfig.model_validate(_base(known, given) | given)
    except ValidationError as error:
        raise ConfigError(f"rule {written.name!r}: {'; '.join(sentences(error))}") from None


def _base(known: RuleConfig | None, given: dict[str, object]) -> dict[str, object]:
    """Return the fields that stay; another kind takes another number, and so does counting."""
    if known is None:
        return {}
    fields = known.model_dump(exclude_none=True)
    if given.get("kind", known.kind) != known.kind:
        fields = {k: v for k, v in fields.items() if k not in NUMBER_OF_KIND.values()}
    if not given.keys().isdisjoint(_COUNTS):
        fields = {k: v for k, v in fields.items() if k not in _COUNTS}
    return fields


def _refuse_nonfinite(known: RuleConfig | None, written: RuleOverride) -> None:
    """The one rule that nobody can change or repeat."""
    changed = known is not None and known.metric == NONFINITE
    repeated = known is None and written.metric == NONFINITE and written not in DEFAULT_RULES
    if changed or repeated:
        raise ConfigError("the rule nonfinite can't be changed: a non-finite value never passes")
