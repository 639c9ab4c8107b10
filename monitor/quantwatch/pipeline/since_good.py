"""What has changed since an alert that ended was last found good: looked up, put to its rule."""

from dataclasses import replace

from quantwatch.alerts.reopening import good_runs, weigh_reopening
from quantwatch.baselines.decision import since_good
from quantwatch.config.rules import RuleConfig
from quantwatch.domain import Alert, Comparison, RuleOutcome, RunResult, Scope
from quantwatch.pipeline.against import stored
from quantwatch.pipeline.paired import Rules, Sides, compared_with
from quantwatch.store import judged
from quantwatch.store.session import Database


def reopened(database: Database, run: RunResult, sides: Sides, rules: Rules) -> RunResult:
    """Return a judged run that says which of its breaches open no alert that has ended.

    Only of rules whose means were tested against the baseline; runs whose prompt sums are gone say
    nothing, and the rule decides alone.
    """
    sides = replace(sides, run=run)
    alerts, told = list(run.alerts), []
    for outcome in run.outcomes:
        rule = _tested(rules, outcome)
        places = [place for place, alert in enumerate(alerts) if _is_of(alert, outcome)]
        own = [alerts[place] for place in places]
        since = {} if rule is None else _since(database, sides, (rule, outcome), own)
        if rule is None or not since:
            told.append(outcome)
            continue
        weighed, said = weigh_reopening(rule, outcome, own, since)
        told.append(weighed)
        for place, alert in zip(places, said, strict=True):
            alerts[place] = alert
    return replace(run, alerts=tuple(alerts), outcomes=tuple(told))


def _tested(rules: Rules, outcome: RuleOutcome) -> RuleConfig | None:
    """Return the rule of a breach that rests on a paired test."""
    if outcome.outcome != "breach" or not outcome.may_be_chance:
        return None
    known = (rule for rule in rules[outcome.candidate] if rule.name == outcome.rule)
    return next((rule for rule in known if rule.statistic == "mean"), None)


def _is_of(alert: Alert, outcome: RuleOutcome) -> bool:
    return (alert.candidate, alert.rule) == (outcome.candidate, outcome.rule)


def _since(
    database: Database, sides: Sides, judged_by: tuple[RuleConfig, RuleOutcome], alerts: list[Alert]
) -> dict[Scope, Comparison]:
    """Return how the breaching scopes compare with the runs in which they were last found good."""
    rule, outcome = judged_by
    result = sides.run.find(outcome.candidate)
    assert result is not None
    scopes = {alert.scope for alert in alerts if alert.is_decided}
    good = {s: runs for s, runs in _good(database, sides, outcome).items() if s in scopes}
    found: dict[Scope, Comparison] = {}
    for runs in dict.fromkeys(good.values()):
        before = runs, stored(database, runs)
        tests, pooled = compared_with(sides, result, rule.metric, before)
        known = since_good(tests, pooled=pooled)
        found |= {scope: test for scope, test in known.items() if good.get(scope) == runs}
    return found


def _good(database: Database, sides: Sides, outcome: RuleOutcome) -> dict[Scope, tuple[str, ...]]:
    """Return by scope the runs in which it was last found good, of each that was told of before."""
    run, earlier = sides.run, None if sides.earlier is None else sides.earlier[0].run_id
    with database.reader() as session:
        alert = judged.alert_id(session, run.check, outcome.candidate, outcome.rule)
        if alert is None:
            return {}
        episodes = judged.ended_episodes(
            session,
            alert,
            baseline=sides.against.run.run_id,
            rule_sha=outcome.rule_sha,
            before=run.started_at,
        )
        if not episodes:
            return {}
        since, own = min(each.opened_at for each in episodes), (run.run_id, earlier)
        history = judged.judged_since(session, alert, since, apart_from=own)
    return good_runs(episodes, history, outcome.leave_runs)
