"""What `quantwatch attribute` does: load again, attribute, restore, store, write."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quantwatch.cli.progress import reporting
from quantwatch.cli.session import Session, cache_dir
from quantwatch.cli.streams import whisper
from quantwatch.errors import UserError
from quantwatch.report.repeat import COMPARE
from quantwatch.telemetry import check_writable

if TYPE_CHECKING:
    from quantwatch.domain import Attribution, CandidateResult, RunResult
    from quantwatch.pipeline.reloading import Reloaded
    from quantwatch.store.session import Database


class Request(NamedTuple):
    """The options of the command."""

    candidate: str | None
    tokens: int
    detail: Any
    seed: int
    out: Path | None
    tries: int
    store: bool


def attributed(session: Session, named: str, request: Request) -> "tuple[RunResult, Attribution]":
    """Run the command; return the run and what was found, stored and written as it was asked."""
    from quantwatch.pipeline.attribution import Wish, attribute_shares
    from quantwatch.pipeline.reloading import choose_candidate, reload
    from quantwatch.store.attributions import save_attribution
    from quantwatch.store.runs import get_result, resolve_run_id

    wish = Wish(request.tokens, request.detail, request.seed, whisper)
    with session.writer() if request.store else session.reader() as database:
        run = get_result(database, resolve_run_id(database, named))
        chosen = choose_candidate(run, request.candidate)
        _check_out(request.out)
        models = reload(run, chosen, _base_dir(session, run), cache_dir())
        if request.out is not None:
            _require_recipe(models)
        found = attribute_shares(models, wish)
        keep = partial(save_attribution, database, run.run_id) if request.store else _forget
        keep(found)  # the tries take longer than the shares
        if request.out is not None:
            models = models.released()
            found = _restored(found, models, chosen, (request.out, request.tries), database)
            keep(found)
    return run, found


def _forget(_: "Attribution") -> None:
    """Keep nothing: --no-store."""


def _check_out(out: Path | None) -> None:
    """Refuse before anything is measured what can't be written."""
    if out is not None:
        if out.suffix != ".toml":
            raise UserError(f"--out {out}: a recipe is a .toml file")
        check_writable(out)


def _base_dir(session: Session, run: "RunResult") -> Path:
    """Return where a run's paths start: at the configuration, of `compare` here."""
    path = None if run.check == COMPARE else session.find_config()
    return Path.cwd() if path is None else path.resolve().parent


def _require_recipe(models: "Reloaded") -> None:
    from quantwatch.pipeline.restoring import own_recipe

    own_recipe(models)


def _restored(
    found: "Attribution",
    models: "Reloaded",
    chosen: "CandidateResult",
    asked: tuple[Path, int],
    database: "Database",
) -> "Attribution":
    from quantwatch.config.recipes import RecipeConfig
    from quantwatch.kernel_lab.recipe_files import write_recipe
    from quantwatch.pipeline.restoring import Bench, restore

    out, tries = asked
    with reporting() as progress:
        bench = Bench(models, progress, database, whisper)
        restored = restore(bench, found, chosen.verdict, tries)
    if restored.recipe is not None:
        recipe = RecipeConfig.model_validate_json(_json(restored.recipe))
        write_recipe(out, recipe, _comments(found, restored.words))
        whisper(f"wrote {out}")
    else:
        whisper(f"{out} is not written: {restored.words}")
    return replace(found, restoration=restored)


def _json(value: Any) -> str:
    from quantwatch.report.document import dumps

    return dumps(value)


def _comments(found: "Attribution", words: str) -> list[str]:
    return [
        f"Made by `quantwatch attribute --out` for {found.candidate}: {words}.",
        f"Its KL was {found.kl:.4g} nats per token on {found.num_scored} tokens; the parts left "
        "out are those that cost most of it alone.",
    ]
