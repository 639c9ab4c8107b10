"""`quantwatch.compare`: two modules in memory, no configuration, no database."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from quantwatch.alerts.overrides import rules_for
from quantwatch.config.problems import config_error, sentences
from quantwatch.config.schema import CandidateConfig, CheckConfig, SuiteConfig, VariantConfig
from quantwatch.domain import RunResult, Suite
from quantwatch.errors import ConfigError, PromptError
from quantwatch.models.compatibility import check_compatible
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import from_module
from quantwatch.models.undisturbed import undisturbed
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import REFERENCE, Models, measure_models
from quantwatch.pipeline.request import RunRequest
from quantwatch.prompts.loading import suite_from_token_ids
from quantwatch.telemetry import new_run_id

CANDIDATE = "candidate"
ORIGIN = "quantwatch.compare"


class _Silent:
    """A progress that shows nothing."""

    def start(self, stage: str, total_tokens: int) -> None:
        """Ignore a stage."""

    def advance(self, tokens: int) -> None:
        """Ignore tokens."""


def compare(
    reference: nn.Module,
    candidate: nn.Module,
    token_ids: Any,
    *,
    tokenizer: Any | None = None,
    **settings: Any,
) -> RunResult:
    """Measure where and how much a module departs from another on the same tokens.

    Args:
        reference: the model that is right: a causal LM of transformers, or one's own module that
            maps token ids [B, T] to logits [B, T, V] (or to an object with `.logits`).
        candidate: the model under test, of the same shape.
        token_ids: one prompt as a 1-D sequence or tensor, or several: a sequence of sequences, or a
            2-D tensor without padding.
        tokenizer: names tokens in the result, if given.
        settings: keys of a check: lens_positions, isolated_fraction, batch_tokens, threads, rules,
        …

    Returns:
        the run, judged by the default rules. Nothing is stored; both modules are left as they were.

    Raises:
        UserError: the modules or the tokens don't fit together.
        CaptureError: a module could not be observed without changing it.
    """
    started = datetime.now(UTC)
    request = RunRequest("compare", _check(settings), Path.cwd(), _spool_folder())
    rows = rows_of(token_ids)
    modules = [each for each in (reference, candidate) if isinstance(each, nn.Module)]
    with undisturbed(*modules):
        first = from_module(REFERENCE, reference, tokenizer)
        models = _pair(first, from_module(CANDIDATE, candidate))
        suite = _suite(request, first, rows)
        with measure_models(request, models, suite, _Silent()) as measured:
            return judge(request, measured, new_run_id(), started, None)


def _pair(reference: LoadedModel, candidate: LoadedModel) -> Models:
    notes = {CANDIDATE: check_compatible(reference, candidate)}
    return Models(reference, {CANDIDATE: candidate}, {}, notes)


def _suite(request: RunRequest, reference: LoadedModel, rows: Sequence[Any]) -> Suite:
    allowed = request.check.allow_beyond_context
    return suite_from_token_ids(
        rows,
        reference.tokenizer,
        max_positions=None if allowed else reference.max_positions,
        num_tokens=reference.num_tokens,
    )


def _check(settings: dict[str, Any]) -> CheckConfig:
    """Build the check around the settings; what is loaded already has a factory's form."""
    if given := sorted({"reference", "candidates", "suite"} & settings.keys()):
        raise ConfigError(f"{ORIGIN}: {given[0]} is no setting: it is given by the modules and ids")
    if settings.get("memory", "resident") != "resident":
        raise ConfigError(
            f"{ORIGIN}: memory = {settings['memory']!r} is no setting: the modules are in memory"
        )
    if settings.get("reference_cache"):
        raise ConfigError(f"{ORIGIN}: reference_cache is no setting: a module's code isn't known")
    if settings.get("executor", "inline") != "inline":
        raise ConfigError(
            f"{ORIGIN}: executor = {settings['executor']!r} is no setting: the modules are in the "
            "memory of this process"
        )
    loaded: dict[str, Any] = {"factory": "in.memory:module", "allow_code": True}
    try:
        check = CheckConfig(
            reference=VariantConfig(**loaded),
            candidates=(CandidateConfig(name=CANDIDATE, **loaded),),
            suite=SuiteConfig(files=("token_ids",)),
            **settings,
        )
    except ValidationError as error:
        raise config_error(ORIGIN, sentences(error, CheckConfig)) from None
    rules_for(check, check.candidates[0])
    return check


def _spool_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("quantwatch"))


def rows_of(token_ids: Any) -> list[Any]:
    """Return prompts as rows of ids, from a tensor, one sequence, or several.

    Raises PromptError when they are no token ids at all; each row is checked later.
    """
    if isinstance(token_ids, Mapping):
        raise PromptError("token_ids: got a mapping; give the ids themselves (its input_ids)")
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise PromptError(
            f"token_ids: expected one or more sequences of ids, got {token_ids!r:.80}"
        )
    try:
        plain = [_listed(value) for value in _listed(token_ids)]
    # What a tensor without values, or without a place for them, raises.
    except (RuntimeError, TypeError) as error:
        raise PromptError(f"token_ids: can't be read: {error}") from error
    rows = bool(plain) and isinstance(plain[0], Iterable) and not isinstance(plain[0], str | bytes)
    return plain if rows else [plain]


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
