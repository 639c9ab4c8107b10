"""What a run is compared with: which run, and what every prompt gave in it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantwatch.alerts.overrides import rules_for
from quantwatch.baselines.comparable import mismatches
from quantwatch.baselines.paired import Matrix
from quantwatch.baselines.rolling import averaged
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import Block, Json, RunResult, Scope
from quantwatch.pipeline.request import RunRequest
from quantwatch.store import baselines, runs
from quantwatch.store.blocks import get_block

if TYPE_CHECKING:
    from quantwatch.store.session import Database

Found = tuple[tuple[Scope, ...], Sequence[Matrix]]
Blocks = Callable[[str, str], Found | None]
"""Candidate and metric → scopes and `per_prompt` blocks; None where there are none."""


@dataclass(frozen=True, slots=True)
class Against:
    """A baseline of one run, or of several that are averaged."""

    kind: str
    run: RunResult
    run_ids: tuple[str, ...]
    blocks: Blocks
    chosen_from: int = 1
    """Of so many runs it is the best by what they measured."""

    def to_json(self) -> Json:
        """Return what is kept of it with a run."""
        return {"kind": self.kind, "runs": list(self.run_ids)}


def find_baseline(
    request: RunRequest, database: "Database | None", run: RunResult
) -> Against | None:
    """Return what a measured run is compared with; None when there is nothing to compare with."""
    given = request.baseline
    if given is not None:
        sums = request.baseline_sums
        blocks = in_file(sums) if sums else stored(database, (given.run_id,))
        return Against("file", given, (given.run_id,), blocks)
    if database is None:
        return None
    return choose_baseline(database, run, request.check)


def choose_baseline(database: "Database", run: RunResult, check: CheckConfig) -> Against | None:
    """Return a check's baseline for a measured run. Only a pinned one can be incomparable."""
    ids, chosen_from = _run_ids(database, run, check)
    if not ids:
        return None
    found = [runs.get_result(database, run_id) for run_id in ids]
    result = found[0] if len(found) == 1 else averaged(found)
    return Against(check.baseline.kind, result, tuple(ids), stored(database, ids), chosen_from)


def confirmed(database: "Database | None", run: RunResult) -> tuple[RunResult, Blocks] | None:
    """Return the run that a confirmation run confirms, None when it can't be pooled with it."""
    run_id = None if database is None else baselines.confirmed_run(database, run.run_id)
    if database is None or run_id is None:
        return None
    result = runs.get_result(database, run_id)
    return None if mismatches(run, result) else (result, stored(database, (run_id,)))


def stored(database: "Database | None", run_ids: Sequence[str]) -> Blocks:
    """Return how the blocks of some runs are found; those with other scopes than the first don't
    count.
    """

    def found(candidate: str, metric: str) -> Found | None:
        if database is None:
            return None
        blocks = [get_block(database, each, candidate, "per_prompt", metric) for each in run_ids]
        known = [block for block in blocks if block is not None]
        return together(known) if known else None

    return found


def in_file(sums: Sequence[Block]) -> Blocks:
    """Return how the prompt sums of an exported run are found."""
    known = {(block.candidate, block.metric): together([block]) for block in sums}
    return lambda candidate, metric: known.get((candidate, metric))


def judged_sums(database: "Database", run: RunResult) -> Iterator[Block]:
    """Yield the stored prompt sums of a run that rules on a baseline read: what an export needs."""
    check = CheckConfig.model_validate(run.config)
    for config in check.candidates:
        rules = [rule for rule in rules_for(check, config) if rule.kind == "baseline"]
        for metric in sorted({rule.source for rule in rules}):
            block = get_block(database, run.run_id, config.name, "per_prompt", metric)
            if block is not None:
                yield block


def together(blocks: Sequence[Block]) -> Found:
    """Return the scopes of the first block and the values of all that have just these."""
    scopes = blocks[0].scopes
    return scopes, [block.values for block in blocks if block.scopes == scopes]


def _run_ids(database: "Database", run: RunResult, check: CheckConfig) -> tuple[list[str], int]:
    """Return the baseline's runs, and of how many it is the best."""
    config = check.baseline
    if config.kind == "rolling":
        standing = tuple(_of_no_baseline(check))
        return baselines.recent_good(database, run, config.window, apart_from=standing), 1
    if config.kind == "best-ever":
        names = [candidate.name for candidate in check.candidates]
        best, num_runs = baselines.best_run(database, run, names)
    else:
        best, num_runs = baselines.get_pinned(database, run.check), 1
    return [] if best is None else [best], num_runs


def _of_no_baseline(check: CheckConfig) -> Iterator[tuple[str, str]]:
    """Yield candidate and name of the rules that compare no numbers with a baseline.

    What they find may have been there from the first run on, and keeps no run from being one.
    """
    for config in check.candidates:
        for rule in rules_for(check, config):
            if rule.kind != "baseline":
                yield config.name, rule.name
