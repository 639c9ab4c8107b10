"""Write a database as years of nights leave it, with the store's own functions. Prints JSON.

    python benchmarks/fill.py --url sqlite:////tmp/filled.db --checks 50 --nights 365
    python benchmarks/fill.py --url sqlite:////tmp/small.db --checks 6 --nights 12 --layers 8

Each check's first run, its newest nights, all that are worse and all that failed go through
`begin_run` and `finish_run` or `end_run`; the nights between are copies of the first one with other
statistics (`fill_history.py`). A night is one transaction, at the moment it would have happened.
Content is invented and seeded: some checks are worse since a night, some values are not finite,
drivers change, runs fail, one is paused, one is running. Matrices stay for the newest nights only,
as retention would leave them. No torch.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import fill_content as content
import fill_service as service
import numpy as np
from fill_content import Plan, Story
from fill_history import Copier, Copy, count
from sqlalchemy.orm import Session

from quantwatch.domain import Block, RunResult, RunStatus, Suite, Verdict
from quantwatch.store import attempts, baselines, latest, lookups, recent, runs
from quantwatch.store.applied import apply_checks
from quantwatch.store.schedules import apply as apply_schedules
from quantwatch.store.session import Database, open_database
from quantwatch.store.tables import MeasurementRow, RunRow
from quantwatch.store.upgrade import upgrade

FAILURES = (
    ("oom", "CUDA out of memory: 1.2 GiB wanted, 0.4 GiB free on cuda:0"),
    ("gpu_unavailable", "no NVIDIA driver on this host"),
    ("download_failed", "the model could not be read: connection reset"),
)


class Batch(Database):
    """A database whose transactions are parts of one that is open already."""

    def __init__(self, db: Database, session: Session) -> None:
        super().__init__(db.url, db.engine, db.name, read_only=False)
        self._session = session

    @contextmanager
    def writer(self) -> Iterator[Session]:
        yield self._session
        self._session.flush()

    reader = writer


def fill(url: str, plan: Plan) -> dict[str, Any]:
    """Write everything; return how much it was and how long it took."""
    upgrade(url)
    db, began = open_database(url), time.perf_counter()
    try:
        with db.kept_open():
            figures = _fill(db, plan)
            spent = time.perf_counter() - began
            with db.reader() as session:
                figures["runs"], rows = count(session, RunRow), count(session, MeasurementRow)
    finally:
        db.close()
    rate = round(rows / spent)
    return {**figures, "measurements": rows, "seconds": round(spent, 1), "rows_per_s": rate}


def _fill(db: Database, plan: Plan) -> dict[str, Any]:
    now, stories = content.present(), content.stories(plan)
    configs = {story.name: content.config_of(plan, story) for story in stories}
    db.clock_shift = -timedelta(days=plan.nights + 1)
    with db.writer() as session:
        documents = {name: content.details(check) for name, check in configs.items()}
        apply_checks(session, documents, "/srv/quantwatch")
        apply_schedules(session, configs)
        service.apply_endpoints(session)
    writer = Writer(db, plan, now, {name: dict(found) for name, found in documents.items()})
    for age in range(plan.nights - 1, -1, -1):
        writer.night(age, [story for story in stories if story.trouble != "never"])
    db.clock_shift = timedelta()
    service.fill(db, plan, stories, configs, now)
    return {"checks": plan.checks, "nights": plan.nights, "templates_s": round(writer.invented, 1)}


class Writer:
    """Writes night after night."""

    _NEWEST = 3
    """Nights that are written in full for every check."""

    def __init__(
        self, db: Database, plan: Plan, now: datetime, documents: dict[str, dict[str, Any]]
    ) -> None:
        self.db, self.plan, self.now, self.documents = db, plan, now, documents
        self.ids, self.rng = random.Random(plan.seed), np.random.default_rng(plan.seed)
        self.baseline: dict[str, str] = {}
        self.known: set[str] = set()
        self.invented = 0.0
        self.copier: Copier | None = None

    def night(self, age: int, stories: list[Story]) -> None:
        """Write the runs of all checks in the night so long ago."""
        self.db.clock_shift = -timedelta(days=age)
        with self.db.writer() as session:
            batch, copied = Batch(self.db, session), list[tuple[Story, Copy]]()
            for story in stories:
                at = content.night_at(story, age, self.now)
                run_id = content.run_id(at, self.ids)
                if self._fails(story, age):
                    self._fail(batch, story, run_id, at)
                elif self._is_copied(story, age):
                    copied.append((story, self._copy(session, story, age, (run_id, at))))
                else:
                    self._run(batch, story, age, (run_id, at))
                session.expunge_all()
            if copied:
                self._write_copies(session, age, copied)

    def _fails(self, story: Story, age: int) -> bool:
        if age == 0:
            return story.trouble == "failed"
        return self._NEWEST <= age < self.plan.nights - 1 and self.ids.random() < 0.01

    def _is_copied(self, story: Story, age: int) -> bool:
        first = story.name not in self.baseline
        return not first and age >= self._NEWEST and not story.is_worse(age)

    def _copy(self, session: Session, story: Story, age: int, own: tuple[str, datetime]) -> Copy:
        machine = content.environment_at(age, self.plan.nights, story.index)
        drift = 1 + 0.03 * float(np.sin(age / 9 + story.index))
        environment = lookups.environment_id(session, machine)
        return Copy(self.baseline[story.name], *own, environment, drift)

    def _write_copies(self, session: Session, age: int, copied: list[tuple[Story, Copy]]) -> None:
        if self.copier is None:
            self.copier = Copier(session, self.ids)
        self.copier.write(session, [copy for _, copy in copied])
        if age > recent.KEPT + 3:
            return
        for story, copy in copied:
            check_id = lookups.check_id(session, story.name)
            latest.note_ended(session, check_id, copy.run_id, RunStatus.SUCCEEDED)

    def _fail(self, batch: Batch, story: Story, run_id: str, at: datetime) -> None:
        document = self.documents[story.name]
        runs.begin_run(batch, run_id=run_id, check=story.name, config=document, started_at=at)
        code, words = FAILURES[(story.index + at.day) % len(FAILURES)]
        runs.end_run(batch, run_id, RunStatus.FAILED, words, code)

    def _run(self, batch: Batch, story: Story, age: int, own: tuple[str, datetime]) -> None:
        (run_id, at), document = own, self.documents[story.name]
        runs.begin_run(batch, run_id=run_id, check=story.name, config=document, started_at=at)
        runs.advance_run(batch, run_id, RunStatus.MEASURING)
        result, suite, blocks = self._result(story, age, run_id, at)
        runs.finish_run(batch, result, suite, blocks)
        with batch.writer() as session:
            attempts.note_usage(session, run_id, 1, *service.usage(self.ids, age))
        if story.name not in self.baseline:
            self.baseline[story.name] = run_id
            baselines.pin(batch, story.name, run_id, actor="dana")

    def _result(
        self, story: Story, age: int, run_id: str, at: datetime
    ) -> tuple[RunResult, Suite, list[Block]]:
        worse, began = story.trouble if story.is_worse(age) else None, time.perf_counter()
        found = content.template(self.plan, story.index, worse)
        self.invented += time.perf_counter() - began
        raw = age < self.plan.block_nights
        drift = 1 + 0.03 * np.sin(age / 9 + story.index)
        candidates = found.result.candidates
        if not raw:
            candidates = content.moved(found, self.rng, float(drift))
        suite, reference = found.suite, found.result.reference
        if reference is not None and reference.fingerprint.tokenizer_sha in self.known:
            suite = replace(suite, vocabulary=())
        elif reference is not None:
            self.known.add(reference.fingerprint.tokenizer_sha)
        verdicts = [c.verdict for c in candidates if c.verdict is not None]
        result = replace(
            found.result,
            run_id=run_id,
            check=story.name,
            verdict=Verdict.worst(verdicts),
            started_at=at,
            finished_at=at + timedelta(seconds=150 + 40 * self.ids.random()),
            environment=content.environment_at(age, self.plan.nights, story.index),
            config=self.documents[story.name],
            candidates=candidates,
            noise_floor=service.noise_floor(self.plan.layers),
            baseline_run_id=self.baseline.get(story.name),
        )
        return result, suite, list(found.blocks) if raw else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True, help="an empty database, SQLite or PostgreSQL")
    for name, default in (("checks", 50), ("nights", 365), ("candidates", 2), ("layers", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--block-nights", type=int, default=2, help="newest nights with matrices")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    plan = Plan(
        args.checks, args.nights, args.candidates, args.layers, args.block_nights, args.seed
    )
    print(json.dumps(fill(args.url, plan), indent=2))


if __name__ == "__main__":
    main()
