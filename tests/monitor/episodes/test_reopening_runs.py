"""An alert that has ended and its baseline, on both databases: what opens it again, and what not."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete

from quantwatch.config.rules import RuleConfig
from quantwatch.domain import MODEL, Block, RuleOutcome, RunResult, Verdict
from quantwatch.pipeline.against import Against, stored, together
from quantwatch.pipeline.alerting import close_alert, settler
from quantwatch.pipeline.paired import Sides
from quantwatch.pipeline.since_good import reopened
from quantwatch.store import runs
from quantwatch.store.tables import BlockRow

Say = Callable[..., RuleOutcome]
Service = Any
NAME = "baseline-kl"
RULE = RuleConfig(name=NAME, metric="logit_kl", kind="baseline", min_effect=1e-6)
PROMPTS = 32
MINUTE = timedelta(minutes=1)
GOOD, BAD, WORSE = 0.010, 0.020, 0.030


@dataclass
class Nights:
    """Nightly runs whose output KL is given; above the limit they breach."""

    service: Service
    say: Say
    rule_sha: str = "v1"
    baseline: list[str] = field(default_factory=list)
    newest: str = ""
    num_nights: int = 0
    """Seeds the noise: run ids differ from time to time, and one test in twenty would with them."""

    def run(self, level: float, *, limit: float = 0.015) -> RuleOutcome:
        """Finish a run against the newest baseline; return what its rule said."""
        self.service.db.clock_shift += MINUTE
        what = "breach" if level > limit else "clear"
        outcome = self.say(
            what, NAME, value=level, rule_sha=self.rule_sha, may_be_chance=True, threshold=limit
        )
        run_id = self.service.queue()
        block = self.block(level)
        result: RunResult = self.service.result(run_id, outcome, num_prompts=PROMPTS)
        if self.baseline:
            result = replace(result, baseline_run_id=self.baseline[-1])
            result = self._reopened(result, block)
        db, service = self.service.db, self.service
        then = settler(service.settings, service.config)
        runs.finish_run(db, result, None, [block], then=then)
        self.newest = run_id
        (told,) = result.outcomes
        return told

    def pin(self) -> None:
        self.run(GOOD)
        self.baseline.append(self.newest)

    def close(self) -> None:
        service = self.service
        service.db.clock_shift += MINUTE
        close_alert(service.db, service.alert(NAME).id, "ada", "noise", service.config)

    def block(self, level: float) -> Block:
        self.num_nights += 1
        noise = np.random.default_rng(self.num_nights)
        values = np.zeros((PROMPTS, 1, 4))
        values[..., 0] = 20
        values[..., 1] = 20 * (level + 1e-4 * noise.standard_normal((PROMPTS, 1)))
        return Block("int8", "per_prompt", "logit_kl", None, (MODEL,), values)

    def _reopened(self, result: RunResult, block: Block) -> RunResult:
        db, pinned = self.service.db, self.baseline[-1]
        before = runs.get_result(db, pinned)
        against = Against("pinned", before, (pinned,), stored(db, (pinned,)))
        sides = Sides(result, lambda *_: together([block]), against)
        return reopened(db, result, sides, {"int8": (RULE,), "int4": (RULE,)})


@pytest.fixture
def nights(service: Service, say: Say) -> Nights:
    """A pinned baseline, an alert that fired, and was closed while it was true."""
    service.alerting = {"confirm": False}
    made = Nights(service, say)
    made.pin()
    assert made.run(BAD).opens
    assert service.state(NAME) == "firing"
    return made


def test_what_was_closed_by_hand_stays_closed_while_it_is_as_it_was(
    nights: Nights, service: Service
) -> None:
    """Catches an alert that is told again every night; the run is told as what it is."""
    nights.close()
    outcome = nights.run(BAD)
    assert (outcome.outcome, outcome.opens) == ("breach", False)
    assert "an alert on it has ended, and it is not clearly worse since" in outcome.words
    assert service.state(NAME) == "inactive"
    assert [kind for kind, _ in service.heard()] == ["alert.firing", "alert.resolved"]
    (alert,) = runs.get_result(service.db, nights.newest).alerts
    assert alert.words == outcome.words
    assert runs.get_result(service.db, nights.newest).verdict == Verdict.REGRESSION


def test_what_became_worse_is_told_again_and_says_so(nights: Nights, service: Service) -> None:
    """Catches a fault that hides behind one that somebody accepted."""
    nights.close()
    assert not nights.run(BAD).opens
    assert nights.run(WORSE).opens
    assert service.state(NAME) == "firing"
    words = service.bodies()[-1]["data"]["alerts"][0]["words"]
    found = re.search(r"([\d.]+) above what was last found good", words)
    assert found, words
    assert float(found[1]) == pytest.approx(0.01, abs=2e-4)  # the nights' noise is 3e-5


def test_an_open_alert_is_not_asked(nights: Nights, service: Service) -> None:
    """Catches an alert that recovers because it has not become worse."""
    nights.close()
    nights.run(WORSE)
    nights.run(BAD)
    assert service.state(NAME) == "firing"


REPAIRED: dict[str, tuple[bool, list[float], bool]] = {
    "closed by hand, repaired for two nights": (True, [GOOD, GOOD], True),
    "closed by hand, good for one night only": (True, [GOOD], False),
    "closed by hand, later good for two nights": (True, [BAD, GOOD, BAD, GOOD, GOOD], True),
    "resolved by itself": (False, [GOOD, GOOD], True),
    "resolved by itself long ago": (False, [GOOD] * 9, True),
}


@pytest.mark.parametrize(("by_hand", "between", "opens"), REPAIRED.values(), ids=REPAIRED.keys())
def test_what_was_repaired_and_is_back_is_told(
    nights: Nights, service: Service, by_hand: bool, between: list[float], opens: bool
) -> None:
    """Catches a regression that is lost because there was one before."""
    if by_hand:
        nights.close()
    for level in between:
        nights.run(level)
    assert service.state(NAME) == "inactive"
    assert nights.run(BAD).opens is opens
    assert service.state(NAME) == ("firing" if opens else "inactive")


def test_drift_since_an_alert_resolved_is_found(nights: Nights, service: Service) -> None:
    """Catches a comparison with the night before: each step is too small to be told of."""
    nights.run(GOOD)
    nights.run(GOOD)
    assert service.state(NAME) == "inactive"
    for step in range(1, 6):
        nights.run(GOOD + step * 5e-5)
    assert nights.run(GOOD + 3e-4, limit=GOOD + 2e-4).opens


def test_another_baseline_is_another_question(nights: Nights, service: Service) -> None:
    """Catches a level that was accepted for ever, whatever is pinned."""
    nights.close()
    nights.pin()
    assert nights.run(BAD).opens


def test_an_edited_rule_is_another_question(nights: Nights) -> None:
    """Catches a stricter limit that tells nobody."""
    nights.close()
    nights.rule_sha = "v2"
    assert nights.run(BAD).opens


def test_without_prompt_sums_the_rule_decides_alone(nights: Nights, service: Service) -> None:
    """Catches retention that keeps an alert closed."""
    nights.close()
    with service.db.writer() as session:
        session.execute(delete(BlockRow))
    assert nights.run(BAD).opens
    assert service.state(NAME) == "firing"


def test_an_alert_that_a_new_baseline_closed_is_no_judgement(nights: Nights) -> None:
    """Catches an episode that nobody called good: it ended because another run was pinned."""
    nights.pin()
    nights.run(BAD)
    nights.close()
    nights.baseline.pop()
    assert nights.run(BAD).opens


def test_equal_numbers_have_not_changed(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches deterministic models, whose differences have no spread: bit-equal is no change."""
    same = nights.block(BAD)
    monkeypatch.setattr(nights, "block", lambda *_: same)
    nights.close()
    nights.run(BAD, limit=1.0)
    nights.run(BAD, limit=1.0)
    outcome = nights.run(BAD)
    assert not outcome.opens
    assert outcome.words.endswith("since: the same as what was last found good")
