"""An alert that was closed while it was true, from models to its state, and what opens it again."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from quantwatch.config.schema import CheckConfig, Config
from quantwatch.domain import RuleOutcome, Verdict
from quantwatch.pipeline import RunRequest, run_check
from quantwatch.pipeline.alerting import close_alert, settler
from quantwatch.store import baselines, episodes, runs
from quantwatch.store.session import Database
from quantwatch.store.tables import RunRow

RULES = [
    {"name": "kl", "metric": "logit_kl", "kind": "baseline", "min_effect": 1e-6},
    {"name": "isolated-error-outlier", "enabled": False},
]
GOOD, BAD, WORSE = 1.01, 1.05, 1.1


class Nights:
    """Runs of a check whose candidate has one matrix scaled, and the alert of its rule."""

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder, self._database = folder, database
        self.newest = ""
        self._parent: str | None = None

    def start(self, stage: str, total_tokens: int) -> None:
        """Mark a confirmation run as soon as it begins, as the worker's queue does."""
        if self._parent is None:
            return
        with self._database.writer() as session:
            session.execute(
                update(RunRow)
                .where(RunRow.status.in_(["preparing", "measuring"]))
                .values(trigger="confirm", parent_run_id=self._parent)
            )

    def advance(self, tokens: int) -> None:
        """Say nothing."""

    def run(self, scale: float, *, confirms: str | None = None) -> RuleOutcome:
        self._parent = confirms
        fault = {"scope": "layers.1.mlp.down_proj", "scale": scale}
        check = CheckConfig.model_validate(
            {
                "reference": {"model": "tiny"},
                "candidates": [{"name": "c", "model": "tiny", "faults": [fault]}],
                "suite": {"files": ["prompts.json"]},
                "threads": 1,
                "rules": RULES,
            }
        )
        request = RunRequest("nightly", check, self._folder, self._folder / "cache")
        config = Config.model_validate({"schema_version": 1})
        then = settler(check, config)
        result = run_check(request, database=self._database, progress=self, then=then)
        self.newest = result.run_id
        return next(each for each in result.outcomes if each.rule == "kl")

    def alert(self) -> Any:
        with self._database.reader() as session:
            return next(each for each in episodes.all_alerts(session) if each.rule == "kl")

    def close(self) -> None:
        config = Config.model_validate({"schema_version": 1})
        close_alert(self._database, self.alert().id, "ada", "accepted", config)


@pytest.mark.slow
def test_from_models_to_an_alert_that_stays_closed(folder: Path, database: Database) -> None:
    """Catches a question that the pipeline never asks, alone or of a confirmation run."""
    nights = Nights(folder, database)
    nights.run(GOOD)
    baselines.pin(database, "nightly", nights.newest, actor="ada")
    assert nights.run(BAD).opens
    assert nights.alert().state == "firing"
    nights.close()
    same = nights.run(BAD)
    assert (same.outcome, same.opens) == ("breach", False)
    assert same.words.endswith("since: the same as what was last found good")
    assert runs.get_result(database, nights.newest).verdict == Verdict.REGRESSION
    pooled = nights.run(BAD, confirms=nights.newest)
    assert (pooled.outcome, pooled.opens) == ("breach", False)
    assert nights.alert().state == "inactive"
    worse = nights.run(WORSE)
    assert worse.opens
    assert "above what was last found good" in worse.words
    assert nights.alert().state == "firing"
