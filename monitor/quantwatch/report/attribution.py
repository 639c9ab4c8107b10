"""An attribution as a table, as lines of text, and as a JSON document."""

from typing import Any

from quantwatch.domain import AttributedPart, Attribution, Restoration, RunResult

COLUMNS = ("part", "share", "KL alone", "KL of noise", "direction", "relative error")
_NONE = "–"


def rows(found: Attribution) -> list[list[str]]:
    """Return the parts as texts, the costliest first."""
    return [_row(found, part) for part in found.ranked]


def lines(found: Attribution, run: RunResult) -> list[str]:
    """Return what is to be said around the table."""
    measured = run.find(found.candidate)
    whole = None if measured is None else measured.find("logit_kl")
    said = [
        f"{found.candidate} of run {run.run_id}: KL {found.kl:.4g} nats per token on "
        f"{found.num_scored} tokens ({found.num_prompts} of {run.num_prompts} prompts, seed "
        f"{found.seed})" + ("" if whole is None else f"; the run's is {_number(whole.mean)}"),
        f"controls: nothing swapped, run again at {found.num_boundaries} boundaries: exactly 0 at "
        f"each; all parts together {found.together_kl:.4g}",
        f"additivity (sum of the parts ÷ the whole): {_number(found.additivity, '.3f')}",
        *(f"note: {note}" for note in found.notes),
    ]
    return said if found.restoration is None else [*said, *_restored(found.restoration)]


def document(found: Attribution, run: RunResult) -> dict[str, Any]:
    """Return it as JSON data; what a division by 0 would give is null."""
    restored = found.restoration
    return {
        "run": run.run_id,
        "check": run.check,
        "candidate": found.candidate,
        "made_at": found.made_at.isoformat(),
        "detail": found.detail,
        "seed": found.seed,
        "num_prompts": found.num_prompts,
        "num_tokens": found.num_tokens,
        "num_scored": found.num_scored,
        "kl": found.kl,
        "together_kl": found.together_kl,
        "num_boundaries": found.num_boundaries,
        "additivity": found.additivity,
        "notes": list(found.notes),
        "parts": [_part(found, part) for part in found.parts],
        "restoration": None if restored is None else _restoration(restored),
    }


def _row(found: Attribution, part: AttributedPart) -> list[str]:
    return [
        part.scope,
        _number(found.share(part), ".1%"),
        _number(part.kl),
        _number(part.noise_kl),
        _number(part.direction, ".2f"),
        _number(part.relative_error, ".2%"),
    ]


def _number(value: float | None, form: str = ".4g") -> str:
    return _NONE if value is None else format(value, form)


def _restored(restored: Restoration) -> list[str]:
    if restored.named is None:
        return [f"to restore: {restored.words}"]
    said = [f"to restore: {restored.named} ({restored.words})"]
    if restored.kl is not None:
        said.append(f"KL with these restored, whole suite: {restored.kl:.4g}")
    return said


def _part(found: Attribution, part: AttributedPart) -> dict[str, Any]:
    return {
        "scope": part.scope,
        "kind": part.kind,
        "is_whole": part.is_whole,
        "share": found.share(part),
        "kl": part.kl,
        "noise_kl": part.noise_kl,
        "direction": part.direction,
        "relative_error": part.relative_error,
    }


def _restoration(restored: Restoration) -> dict[str, Any]:
    return {
        "scopes": list(restored.scopes),
        "verdict": restored.verdict,
        "kl": restored.kl,
        "num_tries": restored.num_tries,
        "is_smallest": restored.is_smallest,
        "words": restored.words,
        "recipe": restored.recipe,
    }
