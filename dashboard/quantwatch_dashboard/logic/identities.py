"""What tells two candidates apart beside their numbers: settings, digests, versions. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantwatch.domain import Variant
from quantwatch_dashboard import text
from quantwatch_dashboard.logic.contrast import Side
from quantwatch_dashboard.logic.figures import bits
from quantwatch_dashboard.logic.leaves import leaves


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that both sides say of themselves. `group` is what it is about."""

    group: str
    name: str
    a: str
    b: str

    @property
    def differs(self) -> bool:
        """Whether the sides say something else."""
        return self.a != self.b


def facts(a: Side, b: Side) -> tuple[Fact, ...]:
    """Return everything that tells the sides apart, or might: settings, digests, versions."""
    ours, theirs = dict(_identity(a)), dict(_identity(b))
    names = dict.fromkeys((*ours, *theirs))
    return tuple(Fact(*key, ours.get(key, text.NONE), theirs.get(key, text.NONE)) for key in names)


def _identity(side: Side) -> Iterator[tuple[tuple[str, str], str]]:
    result, variant = side.result, side.candidate.variant
    yield ("measured", "check"), result.check
    yield ("measured", "suite"), result.suite_name
    for name in ("suite_hash", "capture_sha", "metrics_version", "num_prompts", "num_tokens"):
        yield ("measured", name), _shown(getattr(result, name))
    yield from _variant("candidate", variant)
    yield from _settings("candidate", _own_settings(result.config, side.candidate.name))
    yield from _variant("reference", result.reference)
    yield from _settings("reference", result.config.get("reference"))
    for name, value in leaves(result.environment, lists=False):
        yield ("environment", name), _shown(value)


def _variant(group: str, variant: Variant | None) -> Iterator[tuple[tuple[str, str], str]]:
    if variant is None:
        yield (group, "loaded"), "no"
        return
    for name, value in leaves(variant.source, lists=False):
        yield (group, f"source {name}"), _shown(value)
    for name in variant.fingerprint.__slots__:
        yield (group, name), _shown(getattr(variant.fingerprint, name))
    yield (group, "execution"), variant.execution
    yield (group, "bits per weight"), bits(variant)
    yield (group, "size"), text.size(variant.size_bytes)


def _own_settings(config: Mapping[str, Any], name: str) -> Any:
    found = config.get("candidates") or ()
    return next((each for each in found if each.get("name") == name), None)


def _settings(group: str, settings: Any) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield what was written in the check; what is at its default is written as nothing."""
    for name, value in leaves(settings or {}, lists=False):
        if value not in (None, "", [], {}):
            yield (group, f"setting {name}"), _shown(value)


def _shown(value: Any) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.digest(shown) or text.NONE
