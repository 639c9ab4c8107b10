"""A stored run judged again: recorded always, moving alerts only by the newest verdict, once."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from quantwatch.alerts.outcomes import outcomes
from quantwatch.alerts.overrides import rules_for
from quantwatch.alerts.rules import evaluate
from quantwatch.alerts.verdicts import verdict_of
from quantwatch.cli import main
from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.domain import MODEL, CandidateResult, Measurement, RunStatus, Verdict
from quantwatch.errors import UserError
from quantwatch.pipeline.evaluating import Evaluation, evaluate_run
from quantwatch.store import evaluations, outbox, runs
from quantwatch.store.tables import AuditRow, EventRow, RuleEvaluationRow, RunRow

Service = Any
FIRST, RESOLVED = ("alert.firing", "first"), ("alert.resolved", "resolved_all")
OFF = [{"name": rule.name, "enabled": False} for rule in DEFAULT_RULES if rule.name != "nonfinite"]


def rule(threshold: float = 0.1, **fields: Any) -> list[dict[str, Any]]:
    return [*OFF, {"name": "kl", "metric": "logit_kl", "threshold": threshold, **fields}]


def measured(kl: float) -> CandidateResult:
    row = Measurement(
        metric="logit_kl", scope=MODEL, n=100, n_nan=0, n_posinf=0, n_neginf=0, n_missing=0,
        mean=kl, std=0.0, se=None, min=kl, p50=kl, p90=kl, p95=kl, p99=kl, p999=kl, max=kl,
        max_prompt=0, max_position=0, method="all positions",
    )  # fmt: skip
    return CandidateResult("int8", None, None, measurements=(row,))


@pytest.fixture
def kl(service: Service) -> Service:
    """A check with one candidate and one rule."""
    service.check = {
        "candidates": [{"name": "int8", "model": "smollm2-135m"}],
        "rules": rule(),
    }
    service.apply()
    return service


def night(service: Service, value: float, *, told: bool = True) -> str:
    """Finish a run that measured this KL and is judged by the rules of now."""
    rules = rules_for(service.settings, service.settings.candidates[0])
    found = measured(value)
    alerts = evaluate(found, rules, noise_floor={})
    verdict = verdict_of(alerts)
    said = outcomes(found, rules, noise_floor={})
    run_id: str = service.queue()
    result = service.result(run_id, *said)
    result = replace(
        result, alerts=alerts, verdict=verdict, candidates=(replace(found, verdict=verdict),)
    )
    if told:
        service.finish(result)
    else:
        runs.finish_run(service.db, result, None, ())
    return run_id


def again(service: Service, run_id: str, *, force: bool = True) -> Evaluation:
    return evaluate_run(service.db, run_id, service.config, "ann@host", force=force)


def versions(service: Service, run_id: str) -> list[tuple[int, str]]:
    query = (
        select(RuleEvaluationRow.eval_version, RuleEvaluationRow.outcome)
        .where(RuleEvaluationRow.run_id == run_id)
        .where(RuleEvaluationRow.alert_id == service.alert("kl").id)
        .order_by(RuleEvaluationRow.eval_version)
    )
    with service.db.reader() as session:
        return [(row[0], row[1]) for row in session.execute(query)]


def count(service: Service, table: Any) -> int:
    with service.db.reader() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_judged_before_is_left_alone(kl: Service) -> None:
    """Catches a second evaluation that counts, tells or is written without being asked for."""
    run_id = night(kl, 0.2)
    before = count(kl, RuleEvaluationRow), count(kl, EventRow)
    found = again(kl, run_id, force=False)
    assert (found.judged, found.version, found.moved) == (None, 1, False)
    assert (count(kl, RuleEvaluationRow), count(kl, EventRow)) == before
    assert count(kl, AuditRow) == 0


def test_forced_under_the_same_rule_a_night_counts_once(kl: Service) -> None:
    """Catches an alert that two evaluations of one night fire, and a recovery that they end."""
    kl.check["rules"] = rule(enter_runs=2)
    first = night(kl, 0.2)
    again(kl, first)
    assert (kl.state("kl"), kl.alert("kl").num_breaches, kl.heard()) == ("pending", 1, [])
    assert versions(kl, first) == [(1, "breach"), (2, "breach")]
    night(kl, 0.2)
    last = night(kl, 0.01)
    found = again(kl, last)
    assert (found.version, found.moved, kl.state("kl")) == (2, True, "recovering")
    assert kl.alert("kl").episode.num_runs == 3
    assert kl.heard() == [FIRST]


def test_a_lower_threshold_fires_on_what_was_measured(kl: Service) -> None:
    """Catches a changed rule that has to wait for the night; the run's own verdict stays."""
    kl.alerting = {"confirm": False}
    run_id = night(kl, 0.2)
    kl.check["rules"] = rule(0.5)
    found = again(kl, run_id)
    assert found.judged is not None
    assert (found.judged.verdict, kl.state("kl")) == (Verdict.PASS, "inactive")
    assert kl.bodies()[-1]["data"]["alerts"][0]["resolve_reason"] == "rule_changed"
    kl.check["rules"] = rule(0.15)
    assert (again(kl, run_id).version, kl.state("kl")) == (3, "firing")
    assert kl.heard() == [FIRST, RESOLVED, FIRST]
    assert runs.get_result(kl.db, run_id).verdict == Verdict.REGRESSION
    assert versions(kl, run_id) == [(1, "breach"), (2, "clear"), (3, "breach")]
    with kl.db.reader() as session:
        rows = session.execute(select(AuditRow.actor, AuditRow.action, AuditRow.after)).all()
    assert [(row[0], row[1]) for row in rows] == [("ann@host", "evaluate")] * 2
    assert rows[1][2] == {"eval_version": 3, "verdict": "regression", "moved": True}


def test_an_older_run_is_recorded_and_moves_nothing(kl: Service) -> None:
    """Catches last week's regression that pages tonight."""
    older = night(kl, 0.2)
    newer = night(kl, 0.01)
    before = kl.alert("kl"), kl.heard()
    kl.check["rules"] = rule(0.15)
    found = again(kl, older)
    assert found.why_not == (
        f"run {newer} of this check is newer, and only the newest verdict moves alerts"
    )
    assert (kl.alert("kl"), kl.heard()) == before
    assert versions(kl, older) == [(1, "breach"), (2, "breach")]
    assert again(kl, newer).moved


def test_a_deleted_rule_ends_with_the_evaluation(kl: Service) -> None:
    """Catches an alert that nothing stands behind and that the newest verdict leaves open."""
    run_id = night(kl, 0.2)
    kl.check["rules"] = OFF
    again(kl, run_id)
    assert (kl.state("kl"), kl.heard()) == ("inactive", [FIRST, RESOLVED])


def test_a_run_that_was_never_judged_is_judged_first(kl: Service) -> None:
    """Catches a run of `check run` that can't be given to the alerts, or that wants --force."""
    run_id = night(kl, 0.2, told=False)
    assert count(kl, RuleEvaluationRow) == 0
    found = again(kl, run_id, force=False)
    assert (found.version, found.moved, kl.state("kl"), kl.heard()) == (1, True, "firing", [FIRST])
    assert again(kl, run_id, force=False).judged is None


def test_what_a_new_rule_finds_is_confirmed_by_that_rule(kl: Service) -> None:
    """Catches a confirmation that is judged by the rules that found nothing."""
    kl.alerting = {"confirm": True}
    run_id = night(kl, 0.2 / 4)
    kl.check["rules"] = rule(0.02)
    again(kl, run_id)
    assert (kl.state("kl"), kl.heard()) == ("pending", [])
    with kl.db.reader() as session:
        config = session.scalar(select(RunRow.config).where(RunRow.parent_run_id == run_id))
    assert config is not None
    assert [one["threshold"] for one in config["rules"] if one["name"] == "kl"] == [0.02]
    again(kl, run_id)
    assert (kl.state("kl"), kl.alert("kl").awaits_run_id) == ("pending", run_id)
    kl.check["rules"] = rule(0.03)
    again(kl, run_id)
    # There is one confirmation of a run at most, and it is judged by the rule before.
    assert (kl.state("kl"), kl.alert("kl").awaits_run_id) == ("firing", None)


def test_the_confirmed_run_is_still_the_newest_verdict(kl: Service) -> None:
    """Catches a confirmation that takes the last word from the night that it confirmed."""
    kl.alerting = {"confirm": True}
    run_id = night(kl, 0.2)
    kl.confirm(run_id, *outcomes(measured(0.2), rules_for(kl.settings, kl.settings.candidates[0]),
                                 noise_floor={}))  # fmt: skip
    assert kl.state("kl") == "firing"
    kl.check["rules"] = rule(0.5)
    assert again(kl, run_id).moved
    assert kl.state("kl") == "inactive"


def test_a_run_without_a_verdict_is_refused(kl: Service) -> None:
    """Catches a failed run that looks like one without breaches."""
    run_id: str = kl.queue()
    kl.end(run_id, "failed")
    with pytest.raises(UserError, match="is failed; only a succeeded run is judged"):
        again(kl, run_id)


def test_a_check_that_is_gone_has_no_rules(kl: Service) -> None:
    """Catches a judgement by the default rules alone."""
    run_id = night(kl, 0.2)
    kl.change_check(config=None, config_sha=None)
    config = kl.config.model_copy(update={"checks": {}})
    with pytest.raises(UserError, match="is not in the configuration any more"):
        evaluate_run(kl.db, run_id, config, "ann@host", force=True)
    assert versions(kl, run_id) == [(1, "breach")]


def test_candidates_and_statistics_that_are_gone_are_named(kl: Service) -> None:
    """Catches an evaluation whose every rule is missing, and that ends alerts as such."""
    run_id = night(kl, 0.2)
    bare = replace(measured(0.2), measurements=(), verdict=Verdict.PASS)
    other: str = kl.queue()
    kl.finish(replace(kl.result(other), candidates=(bare,), status=RunStatus.SUCCEEDED))
    with pytest.raises(UserError, match=r"no statistics of int8 any more .retention.statistics."):
        again(kl, other)
    kl.check["candidates"] = [{"name": "int4", "model": "smollm2-135m"}]
    with pytest.raises(UserError, match="measured int8; check nightly has none of these"):
        again(kl, run_id)


def test_a_crash_leaves_neither_version_nor_message(
    kl: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a judgement that is recorded and whose message is lost."""
    run_id = night(kl, 0.05)
    kl.check["rules"] = rule(0.02)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "publish", crash)
        with pytest.raises(KeyboardInterrupt):
            again(kl, run_id)
    assert (kl.state("kl"), versions(kl, run_id), count(kl, AuditRow)) == (
        "inactive", [(1, "clear")], 0,
    )  # fmt: skip
    again(kl, run_id)
    assert (kl.state("kl"), kl.heard()) == ("firing", [FIRST])


def test_four_at_once_are_four_versions_and_one_message(kl: Service) -> None:
    """Catches two people whose judgements overwrite each other, or both tell."""
    run_id = night(kl, 0.05)
    kl.check["rules"] = rule(0.02)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: again(kl, run_id).version, range(4)))
    assert sorted(found) == [2, 3, 4, 5]
    assert [version for version, _ in versions(kl, run_id)] == [1, 2, 3, 4, 5]
    assert (kl.state("kl"), kl.heard()) == ("firing", [FIRST])


def test_versions_are_listed_newest_first(kl: Service) -> None:
    """Catches a history in which nobody can tell which judgement came when."""
    run_id = night(kl, 0.2)
    again(kl, run_id)
    with kl.db.reader() as session:
        found = evaluations.list_evaluations(session, kl.alert("kl").id)
    assert [one.eval_version for one in found] == [2, 1]


FILE = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
reference = {{ model = "smollm2-135m" }}
candidates = [{{ name = "int8", model = "smollm2-135m" }}]
rules = [{{ name = "kl", metric = "logit_kl", threshold = {threshold} }}]
"""


def typed(service: Service, folder: Path, threshold: float, *words: str) -> int:
    file = folder / "quantwatch.toml"
    file.write_text(FILE.format(threshold=threshold))
    arguments = ["--config", str(file), "--database", service.db.url, "alerts", "evaluate", *words]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_the_command_says_what_it_did(
    kl: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a command that leaves people to guess whether anything was judged, or moved."""
    older, newest = night(kl, 0.2), night(kl, 0.05)
    assert typed(kl, tmp_path, 0.02, newest) == 0
    assert capsys.readouterr().out == (
        f"run {newest} was judged before (version 1): nothing is done\n"
        "--force judges it again, under today's rules\n"
    )
    assert typed(kl, tmp_path, 0.02, "nightly", "--force") == 0
    out = capsys.readouterr().out
    assert re.search(r"int8 +│? *kl +│? *breach +│? *0\.05 +│? *0\.02", out)
    assert f"run {newest}, version 2: regression; the run's own verdict stays pass" in out
    assert "compared with: no baseline; alerts are moved by it" in out
    assert typed(kl, tmp_path, 0.02, older, "--force") == 0
    assert f"no alert moves: run {newest} of this check is newer" in capsys.readouterr().out


def test_the_command_as_json(
    kl: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a script that can't tell a judgement from none."""
    run_id = night(kl, 0.05)
    assert typed(kl, tmp_path, 0.02, run_id, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["judged"], found["eval_version"], found["rules"]) == (False, 1, [])
    assert typed(kl, tmp_path, 0.02, run_id, "--force", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["judged"], found["eval_version"], found["moved"]) == (True, 2, True)
    [mine] = [one for one in found["rules"] if one["rule"] == "kl"]
    assert (mine["outcome"], mine["value"], mine["threshold"]) == ("breach", 0.05, 0.02)
    assert typed(kl, tmp_path, 0.02, "no-such-run") == 2
