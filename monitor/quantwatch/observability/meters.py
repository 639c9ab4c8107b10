"""Prometheus meters of the service, one registry per process. Names: service_anchors §6.11.

Labels are bounded: checks, candidates, endpoints of the configuration, states. Never a run id, a
URL, a prompt, a layer (layers are exported on request, worst few only). `labels` sees to it.
"""

from quantwatch.observability.labels import REFUSED, REGISTRY, Counter, Gauge, Histogram

__all__ = ["REFUSED", "REGISTRY"]

BUILD_INFO = Gauge(
    "quantwatch_build_info",
    "Always 1; the version is in the label.",
    ["version"],
    registry=REGISTRY,
)
IS_LEADER = Gauge(
    "quantwatch_scheduler_is_leader", "1 when this process schedules.", registry=REGISTRY
)
LAST_TICK = Gauge(
    "quantwatch_scheduler_last_tick_timestamp_seconds",
    "When the scheduler last looked, Unix time.",
    registry=REGISTRY,
)
SLOTS_MISSED = Counter(
    "quantwatch_slots_missed", "Slots that were not run in time.", ["check"], registry=REGISTRY
)
SLOTS_DUPLICATE = Counter(
    "quantwatch_slots_duplicate_prevented",
    "Slots that somebody else had queued.",
    registry=REGISTRY,
)
RUNS = Counter("quantwatch_runs", "Runs that ended.", ["check", "status"], registry=REGISTRY)
VERDICTS = Counter(
    "quantwatch_run_verdicts",
    "Verdicts of candidates.",
    ["check", "variant", "verdict"],
    registry=REGISTRY,
)
RUN_DURATION = Histogram(
    "quantwatch_run_duration_seconds",
    "From claim to end.",
    ["check"],
    buckets=(10, 30, 60, 120, 300, 600, 1800, 3600, 7200),
    registry=REGISTRY,
)
LAST_SUCCESS = Gauge(
    "quantwatch_last_success_timestamp_seconds",
    "End of the newest succeeded run, Unix time.",
    ["check"],
    registry=REGISTRY,
)
KL = Gauge(
    "quantwatch_kl_nats",
    "Output KL of the newest succeeded run.",
    ["check", "variant", "stat"],
    registry=REGISTRY,
)
NON_FINITE = Counter(
    "quantwatch_non_finite",
    "Values that were NaN or infinite.",
    ["check", "variant"],
    registry=REGISTRY,
)
ALERTS = Gauge(
    "quantwatch_alerts", "Open alert episodes.", ["severity", "state"], registry=REGISTRY
)
DELIVERIES = Counter(
    "quantwatch_deliveries", "Attempts to deliver.", ["channel", "outcome"], registry=REGISTRY
)
OLDEST_PENDING = Gauge(
    "quantwatch_delivery_oldest_pending_seconds",
    "Age of the oldest message that waits.",
    registry=REGISTRY,
)
RETRIES = Counter(
    "quantwatch_retry", "Second and later attempts, by operation.", ["operation"], registry=REGISTRY
)
RETRY_LATENCY = Histogram(
    "quantwatch_retry_latency_seconds",
    "How long an attempt after the first took.",
    ["operation"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2, 3, 5, 10, 20, 60, 300),
    registry=REGISTRY,
)
DB_SIZE = Gauge("quantwatch_db_size_bytes", "Size of the database.", registry=REGISTRY)
DB_LOCK_WAIT = Histogram(
    "quantwatch_db_lock_wait_seconds", "Waiting to begin writing.", registry=REGISTRY
)
STORAGE_FREE = Gauge(
    "quantwatch_storage_free_ratio", "Free share of the database's disk.", registry=REGISTRY
)
STORAGE_FREE_BYTES = Gauge(
    "quantwatch_storage_free_bytes", "Free space on the database's disk.", registry=REGISTRY
)
LAYER_KL = Gauge(
    "quantwatch_layer_kl_nats",
    "Lens KL of the worst layers of the newest succeeded run; on request (service.layer_metrics).",
    ["check", "variant", "layer"],
    registry=REGISTRY,
)
CONFIG_APPLIED = Gauge(
    "quantwatch_config_last_applied_timestamp_seconds",
    "When this process took over a configuration, Unix time.",
    registry=REGISTRY,
)
CONFIG_BROKEN = Gauge(
    "quantwatch_config_last_reload_failed",
    "1 while the file can't be used and the configuration before it is kept.",
    registry=REGISTRY,
)
PART_ALIVE = Gauge(
    "quantwatch_part_alive", "1 while a part of this process works.", ["part"], registry=REGISTRY
)
DATABASE_UP = Gauge(
    "quantwatch_database_up",
    "1 when the database answered the newest scrape; 0: its figures are left out.",
    registry=REGISTRY,
)
