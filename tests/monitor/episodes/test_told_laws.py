"""Whatever runs, silences, edits and people do: what a receiver reads makes sense to it."""

import itertools
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantwatch.domain import RuleOutcome, Severity
from quantwatch.pipeline.alerting import close_alert
from quantwatch.store import episodes, silences
from quantwatch.store.session import Database, open_database

Say = Callable[..., RuleOutcome]
RULES = ("layer-kl", "top1-agreement", "perplexity-ratio")
words = st.sampled_from(["breach", "breach", "between", "clear", "clear", "undecided", "missing"])
one_rule = st.tuples(words, st.sampled_from(list(Severity)), st.sampled_from(["v1"] * 6 + ["v2"]))
steps = st.one_of(
    st.tuples(st.just("run"), st.tuples(one_rule, one_rule, one_rule)),
    st.tuples(st.just("run"), st.tuples(one_rule, one_rule, one_rule)),
    st.tuples(st.just("confirm"), one_rule),
    st.tuples(st.just("silence"), st.sampled_from([*RULES, "*"])),
    st.tuples(st.just("watch"), st.sampled_from([0, 2, 13])),
    st.tuples(st.just("ack"), st.just(None)),
    st.tuples(st.just("close"), st.just(None)),
)


class Play:
    """Plays steps on a service and remembers the last run, for its confirmation."""

    def __init__(self, service: Any, say: Say) -> None:
        self.service, self.say, self.last = service, say, ""

    def take(self, what: str, given_: Any) -> None:
        getattr(self, what)(given_)

    def run(self, said: Any) -> None:
        outcomes = [
            self.say(word, rule, severity=severity, rule_sha=sha)
            for rule, (word, severity, sha) in zip(RULES, said, strict=True)
        ]
        self.last = self.service.run(*outcomes)

    def confirm(self, said: Any) -> None:
        queued = self.service.confirmation(self.last) if self.last else None
        if queued is not None:
            outcomes = [self.say(said[0], rule, rule_sha=said[2]) for rule in RULES]
            self.service.finish(self.service.result(queued, *outcomes))
            self.last = ""

    def silence(self, rule: str) -> None:
        with self.service.db.writer() as session:
            silences.add_silence(session, {"rule": rule}, timedelta(hours=1), "me", "x")

    def watch(self, hours: int) -> None:
        self.service.watch(timedelta(hours=hours))

    def ack(self, _: None) -> None:
        with self.service.db.writer() as session:
            for alert in episodes.open_alerts(session):
                if alert.episode is not None and alert.episode.fired_at is not None:
                    episodes.acknowledge(session, alert.id, "me", "x")

    def close(self, _: None) -> None:
        with self.service.db.reader() as session:
            found = episodes.open_alerts(session)
        for alert in found[:1]:
            close_alert(self.service.db, alert.id, "me", "x", self.service.config)


def check_what_was_read(bodies: list[dict[str, Any]]) -> set[str]:
    """Read messages as a receiver does; return the episodes that it believes to be open."""
    known: set[str] = set()
    ended: set[str] = set()
    fired: set[str] = set()
    for body in bodies:
        data = body["data"]
        if data["reason"] == "first":
            assert not known
        for alert in data["alerts"]:
            episode = alert["episode"]
            assert episode not in ended
            if alert["change"] == "resolved":
                assert episode in known
                known.discard(episode)
                ended.add(episode)
                continue
            if alert["change"] == "fired":
                assert episode not in fired
                fired.add(episode)
            known.add(episode)
        assert data["open_alerts"] == len(known)
        assert (body["type"] == "alert.resolved") == (not known)
    return known


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, min_size=4, max_size=14))
def test_a_receiver_is_told_a_story_that_adds_up(
    script: list[tuple[str, Any]], migrated_file: Path, say: Say, make_service: Any
) -> None:
    """Catches a resolve before its firing, two of either, a resolve of what was never told, an
    incident that stays open at the receiver, a count that is wrong (X17, B22, B33)."""
    file = migrated_file.with_name(f"play-{next(_NUMBERS)}.db")
    shutil.copy(migrated_file, file)
    database: Database = open_database(f"sqlite:///{file}")
    service = make_service(database, {"reminder": "12h"})
    play = Play(service, say)
    for what, given_ in script:
        play.take(what, given_)
        for endpoint in ("ops", "pager"):
            check_what_was_read(service.bodies(endpoint))
    for _ in range(5):
        service.run(*(say("clear", rule, leave_runs=1) for rule in RULES))
    for endpoint in ("ops", "pager"):
        assert not check_what_was_read(service.bodies(endpoint))
    database.close()
    file.unlink()


_NUMBERS = itertools.count()
