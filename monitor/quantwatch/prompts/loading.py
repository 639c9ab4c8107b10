"""Suites: what a check names, or a user's files, as token ids that both models are fed."""

from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path, PurePath
from typing import Any

from quantwatch.config.schema import SuiteConfig
from quantwatch.domain import Prompt, Suite
from quantwatch.errors import PromptError
from quantwatch.prompts.files import is_plain_text, read_files
from quantwatch.prompts.pieces import TokenTexts
from quantwatch.prompts.records import RawPrompt, check_ids
from quantwatch.prompts.shipped import shipped_suite
from quantwatch.prompts.tokens import WINDOW, Encoded, encode
from quantwatch.telemetry import canonical_sha


def load_suite(
    config: SuiteConfig,
    tokenizer: Any | None,
    *,
    base_dir: Path,
    max_positions: int | None,
    allow_beyond_context: bool = False,
    num_tokens: int | None = None,
) -> Suite:
    """Read and tokenize a suite. Nothing is cut silently: `notes` says what was left out.

    `num_tokens` is the number of ids that the model knows (the tokenizer's when absent).
    Raises PromptError naming file, place and problem.
    """
    window = config.window or WINDOW
    encoded: list[Encoded] = []
    for raw in _raw_prompts(config, base_dir):
        encoded += encode(raw, tokenizer, window=window, score_start=config.score_start)
    kept = encoded[: config.limit]
    _check_scored(kept, config.score_start)
    if not allow_beyond_context:
        _check_context(kept, max_positions)
    _check_range(kept, num_tokens, tokenizer)
    name = config.name or ", ".join(PurePath(file).name for file in config.files)
    return _suite(name, kept, tokenizer, config.score_start, _notes(config, kept, len(encoded)))


def suite_from_token_ids(
    ids: Sequence[Sequence[int]],
    tokenizer: Any | None = None,
    name: str = "tokens",
    *,
    max_positions: int | None = None,
    num_tokens: int | None = None,
) -> Suite:
    """Make a suite of token ids: one sequence (lists, arrays or tensors of integers) per prompt.

    Raises PromptError naming the sequence and the problem.
    """
    raws = [_raw_ids(f"{name}[{number}]", name, row) for number, row in enumerate(ids)]
    if not raws:
        raise PromptError(f"{name}: no token ids were given")
    encoded = [encode(raw, tokenizer, window=WINDOW, score_start=0)[0] for raw in raws]
    _check_context(encoded, max_positions)
    _check_range(encoded, num_tokens, tokenizer)
    return _suite(name, encoded, tokenizer, 0, ())


def suite_hash(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 (hex) of the ordered token ids and score starts: a suite's identity."""
    return canonical_sha([[prompt.score_start, prompt.token_ids] for prompt in prompts])


def _raw_prompts(config: SuiteConfig, base_dir: Path) -> list[RawPrompt]:
    return shipped_suite(config.name) if config.name else read_files(config.files, base_dir)


def _raw_ids(where: str, category: str, row: Any) -> RawPrompt:
    values = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise PromptError(f"{where}: expected a sequence of token ids, got {values!r}")
    ids = [value if isinstance(value, bool) else _number(value) for value in values]
    return RawPrompt(where, where, category, token_ids=check_ids(ids, where))


def _number(value: Any) -> Any:
    """Return NumPy's and torch's integers as int, everything else as it is."""
    return index(value) if hasattr(value, "__index__") else value


def _check_scored(prompts: Sequence[Encoded], score_start: int) -> None:
    for prompt in prompts:
        if len(prompt.token_ids) <= score_start:
            length = f"{prompt.where} has {len(prompt.token_ids)} tokens"
            raise PromptError(f"{length}: score_start = {score_start} leaves nothing to score")


def _check_context(prompts: Sequence[Encoded], max_positions: int | None) -> None:
    limit = float("inf") if max_positions is None else max_positions
    long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if long:
        more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
        raise PromptError(
            f"{long[0].where}{more} has {len(long[0].token_ids)} tokens, the model's context is "
            f"{limit}: shorten it, take a smaller window, or set allow_beyond_context"
        )


def _check_range(prompts: Sequence[Encoded], num_tokens: int | None, tokenizer: Any | None) -> None:
    """Refuse ids that no embedding row stands for. Not checkable when nobody knows the number."""
    known = num_tokens or (None if tokenizer is None else len(tokenizer))
    for prompt in prompts:
        least, most = min(prompt.token_ids), max(prompt.token_ids)
        bad = least if least < 0 else most
        if bad < 0 or (known is not None and bad >= known):
            allowed = "0 or more" if known is None else f"0 to {known - 1}"
            place = f"{prompt.where}: token id {bad} at position {prompt.token_ids.index(bad)}"
            raise PromptError(f"{place} is out of range; allowed: {allowed}")


def _notes(config: SuiteConfig, kept: Sequence[Encoded], total: int) -> tuple[str, ...]:
    sources: dict[str, list[str]] = {}
    for prompt in kept:
        if prompt.note:
            sources.setdefault(prompt.note, []).append(prompt.source)
    notes = [f"{_few(names)}: {note}" for note, names in sources.items()]
    if len(kept) < total:
        notes.append(f"limit = {config.limit}: the first {len(kept)} of {total} prompts are used")
    if config.window not in (None, WINDOW) and not any(map(is_plain_text, config.files)):
        notes.append(f"window = {config.window} only applies to plain text; prompts stay whole")
    return tuple(notes)


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _suite(
    name: str,
    encoded: Sequence[Encoded],
    tokenizer: Any | None,
    score_start: int,
    notes: tuple[str, ...],
) -> Suite:
    texts = TokenTexts(tokenizer)
    prompts = tuple(
        _prompt(number, item, texts, score_start) for number, item in enumerate(encoded)
    )
    return Suite(name, suite_hash(prompts), prompts, notes, texts.vocabulary())


def _prompt(number: int, item: Encoded, texts: TokenTexts, score_start: int) -> Prompt:
    pieces = texts.pieces(item.token_ids)
    text = "".join(pieces) if item.text is None and texts.readable else item.text
    source = f"{item.source} ({item.note})" if item.note else item.source
    ids = tuple(item.token_ids)
    return Prompt(number, item.category, source, ids, pieces, text, score_start)
