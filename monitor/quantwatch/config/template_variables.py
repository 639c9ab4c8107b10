"""What a template of one's own may name: the variables of version 1, with what each one means.

Names follow docs/webhooks.md. A name never goes or changes its meaning unless `version` rises; new
ones may come at any time. A test compares that page, this table and what is filled in.
"""

WHOLE = {
    "alerts": "the rules, critical ones first: `data.alerts`",
    "scopes": "the worst places: `data.scopes`",
    "changed": "what else differs from the baseline: `data.changed`",
    "messages": "what a digest carries: `data.messages`",
    "document": "our own message, whole",
    "text": "all that is known as lines of text; of a digest one line per message",
}
"""Lists, tables and long texts: each at most once in a template, so that a body stays small."""

_EVENT = {
    "version": "1",
    "event.id": "the `webhook-id`: the same for every attempt and replay",
    "event.type": "`alert.firing`, `alert.resolved`, `digest`, `test`, …",
    "event.subject": "the group that it is about; messages of one group come in order",
    "event.time": "when it happened (UTC)",
    "state": "`firing`, `resolved` (all of it), `test`",
    "severity": "`critical`, `warning`, `info`",
    "reason": "`data.reason`",
    "title": "one sentence",
    "check": "name of the check",
    "candidate": "name of the candidate",
    "endpoint": "the endpoint that an `endpoint.…` message is about",
    "run": "the run that says so",
    "num_alerts": "alerts that it is about, named or not",
    "more_alerts": "those that aren't in `alerts`",
    "open_alerts": "alerts of the group that fire after it",
    "num_messages": "messages in a digest; 0 otherwise",
    "since": "when the first of the alerts began",
    "duration_s": "seconds since then, once all is resolved",
    "culprit": "where the error enters, in words",
    "baseline": "the run it was compared with",
    "drift": "what changed since the baseline, in one line",
    "link": "the page on it",
    "command": "shell command that repeats the measurement",
}
_ALERT = {
    "id": "number, for `quantwatch alerts ack`",
    "episode": "this time that it was true",
    "rule": "name of the rule",
    "severity": "`critical` or `warning`",
    "change": "`fired`, `escalated`, `silence_expired`, `reminder`, `resolved`",
    "resolve_reason": "why it ended",
    "metric": "what was measured",
    "statistic": "mean, p99, …",
    "scope": "worst place",
    "value": "value there; missing when it isn't finite",
    "value_kind": "`finite`, or why `value` is missing: `nan`, `posinf`, …",
    "threshold": "the limit that was used",
    "interval": "95 % interval of a mean: a list of low and high",
    "words": "the rule's own sentence",
    "confirmation": "which run confirmed it, or why none did",
    "peak": "worst value since it began",
    "peak_kind": "`finite`, or why `peak` is missing",
    "resolved_value": "value when it ended",
    "resolved_value_kind": "`finite`, or why `resolved_value` is missing",
    "since": "when it began",
    "first_run": "first bad run",
    "num_runs": "runs it has lasted",
    "duration_s": "when resolved: seconds since it began",
    "flapping": "whether it comes and goes",
}
"""Of the first alert."""
_WORST = {
    "scope": "its name, e.g. `layers.17.mlp.down_proj`",
    "metric": "what was measured",
    "statistic": "mean, p99, …",
    "value": "value; missing when it isn't finite",
    "value_kind": "`finite`, or why `value` is missing",
    "threshold": "the limit",
    "prompt": "prompt with the worst token there",
    "position": "position of that token",
    "rule": "the rule that it breaches",
}
"""Of the first place."""

VARIABLES: dict[str, str] = {
    **_EVENT,
    **{f"alert.{name}": words for name, words in _ALERT.items()},
    **{f"worst.{name}": words for name, words in _WORST.items()},
    **WHOLE,
}
"""Every name with its meaning."""
