"""What exactly was measured: digests, environment, timings, and the command that repeats it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantwatch.domain import RunResult, Variant
from quantwatch.observability import redaction
from quantwatch.report.words import cache_words, worker_words
from quantwatch_dashboard import text
from quantwatch_dashboard.components import markup
from quantwatch_dashboard.components.markup import Html, tag
from quantwatch_dashboard.logic.figures import bits

_DIGESTS = ("weights_sha", "config_sha", "tokenizer_sha", "recipe_sha", "serve_sha", "fault_sha")


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Return names and values in two columns."""
    return markup.pairs(pairs, "qw-facts")


def identity(result: RunResult) -> Html:
    """Return the digests that decide whether two runs can be compared."""
    return facts(
        [
            (
                "suite",
                f"{result.suite_name}, {text.plural(result.num_prompts, 'prompt')}, "
                f"{text.plural(result.num_tokens, 'token')}",
            ),
            ("suite hash", _code(result.suite_hash)),
            ("capture", _code(result.capture_sha)),
            ("metrics version", str(result.metrics_version)),
            ("baseline", result.baseline_run_id or "none"),
            *own_code(result.config),
            *_recorded(result),
            *(("not comparable", reason) for reason in result.baseline_mismatch),
        ]
    )


def _recorded(result: RunResult) -> Iterator[tuple[str, str]]:
    """Yield where the reference's numbers came from and who measured, if a check asked for it."""
    said = cache_words(result)
    if said is not None:
        yield "reference's hidden states", said
    if (workers := worker_words(result)) is not None:
        yield "measured by", workers


def own_code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the mark of a check whose models may run code of their own (`allow_code`)."""
    variants = [{"name": "reference"} | dict(config.get("reference") or {})]
    variants += [dict(candidate) for candidate in config.get("candidates") or ()]
    names = [str(one.get("name")) for one in variants if one.get("allow_code")]
    if names:
        yield "runs its own code", ", ".join(names)


def variant(shown: Variant) -> Html:
    """Return a variant's source, digests and notes."""
    digests = [
        (name.removesuffix("_sha"), _code(getattr(shown.fingerprint, name) or text.NONE))
        for name in _DIGESTS
    ]
    return facts(
        [
            ("execution", shown.execution),
            ("size", f"{text.size(shown.size_bytes)}, {bits(shown)} bits per weight"),
            ("source", _code(json.dumps(dict(shown.source), ensure_ascii=False, default=str))),
            *digests,
            *(("note", note) for note in shown.notes),
            *(("left alone", f"{scope}: {reason}") for scope, reason in shown.skipped),
        ]
    )


def flat(record: Mapping[str, object]) -> Html:
    """Return a JSON record, one line per key."""
    return facts((key, _value(value)) for key, value in record.items())


def timings(stages: Mapping[str, float]) -> Html:
    """Return how long each stage took."""
    return facts((stage, text.duration(seconds)) for stage, seconds in stages.items())


def other_metrics(found: int, known: int) -> Html:
    """Say that a run was measured by other definitions than this program explains."""
    words = (
        f"This run was measured with version {found} of the metrics, this program knows version "
        f"{known}. Its numbers are shown as they were stored; what is said of a metric here may "
        "differ from what it was then, and runs of different versions are not compared."
    )
    return tag("p", words, class_="qw-note", role="note")


def document(found: Mapping[str, object]) -> Html:
    """Return a section of the configuration as it is stored, without what is left at nothing."""
    found = _without_nothing(found)
    # Nothing secret is stored; should a wrong key hold one all the same, it is not shown.
    shown = redaction.scrub(json.dumps(found, indent=2, ensure_ascii=False, default=str))
    return tag("pre", text.readable(shown), class_="qw-code qw-mono qw-tall")


def command(line: str) -> Html:
    """Return a command line to copy."""
    return tag("pre", line, class_="qw-code qw-mono")


def _value(value: object) -> object:
    return (
        value
        if isinstance(value, str)
        else _code(json.dumps(value, ensure_ascii=False, default=str))
    )


def _code(value: str) -> Html:
    return tag("span", value, class_="qw-mono qw-small")


def _without_nothing(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_nothing(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, [], {})}
    return [_without_nothing(each) for each in value] if isinstance(value, list) else value
