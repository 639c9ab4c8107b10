"""`quantwatch.compare`: two modules in memory, no configuration, no database."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from quantwatch.config.schema import CandidateConfig, CheckConfig, SuiteConfig, VariantConfig
from quantwatch.domain import RunResult
from quantwatch.models.compatibility import check_compatible
from quantwatch.models.loading import from_module
from quantwatch.pipeline.judge import judge
from quantwatch.pipeline.measure import REFERENCE, Models, measure_models
from quantwatch.pipeline.request import RunRequest
from quantwatch.prompts.loading import suite_from_token_ids
from quantwatch.telemetry import new_run_id

CANDIDATE = "candidate"


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
        the run, judged by the default rules. Nothing is stored.

    Raises:
        UserError: the modules or the tokens don't fit together.
        CaptureError: a module could not be observed without changing it.
    """
    started = datetime.now(UTC)
    check = _check(settings)
    request = RunRequest("compare", check, Path.cwd(), _spool_folder())
    first, second = from_module(REFERENCE, reference, tokenizer), from_module(CANDIDATE, candidate)
    notes = {CANDIDATE: check_compatible(first, second)}
    models = Models(first, {CANDIDATE: second}, {}, notes)
    suite = suite_from_token_ids(
        _rows(token_ids),
        tokenizer,
        max_positions=None if check.allow_beyond_context else first.max_positions,
        num_tokens=first.num_tokens,
    )
    with measure_models(request, models, suite, _Silent()) as measured:
        return judge(request, measured, new_run_id(), started, None)


def _check(settings: dict[str, Any]) -> CheckConfig:
    """Build the check around the settings; what is loaded already has a factory's form."""
    loaded: dict[str, Any] = {"factory": "in.memory:module", "allow_code": True}
    return CheckConfig(
        reference=VariantConfig(**loaded),
        candidates=(CandidateConfig(name=CANDIDATE, **loaded),),
        suite=SuiteConfig(files=("token_ids",)),
        **settings,
    )


def _spool_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("quantwatch"))


def _rows(token_ids: Any) -> Sequence[Sequence[int]]:
    """Return prompts as lists of ints, from a tensor, one sequence, or several."""
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    rows = plain if plain and isinstance(plain[0], Iterable) else [plain]
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
