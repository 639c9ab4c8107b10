"""Every table. Importing this package fills `Base.metadata`."""

from quantwatch.store.tables.alerts import AlertRow, AlertScopeRow, BaselinePinRow
from quantwatch.store.tables.attributions import AttributionPartRow, AttributionRow
from quantwatch.store.tables.base import Base
from quantwatch.store.tables.deliveries import (
    DeliveryAttemptRow,
    DeliveryRow,
    EndpointRow,
    EventRow,
)
from quantwatch.store.tables.detection import CanaryRow, DetectableRow
from quantwatch.store.tables.episodes import EpisodeRow, RuleEvaluationRow, SilenceRow
from quantwatch.store.tables.identity import (
    CheckRow,
    EnvironmentRow,
    MetricRow,
    ScopeListRow,
    ScopeRow,
    SuitePromptRow,
    SuiteRow,
    VariantRow,
    VocabularyRow,
)
from quantwatch.store.tables.kernels import KernelBatchRow, KernelCaseRow, KernelSpeedRow
from quantwatch.store.tables.results import BlockRow, MeasurementRow, NoiseFloorRow
from quantwatch.store.tables.runs import (
    LatestRunRow,
    RecentPointRow,
    RunAttemptRow,
    RunCandidateRow,
    RunRow,
)
from quantwatch.store.tables.schedules import (
    AppliedSettingsRow,
    AuditRow,
    ComponentRow,
    DeviceSlotRow,
    FailedTaskRow,
    LeaderRow,
    ScheduleRow,
    TriggerRow,
)

__all__ = [
    "AlertRow",
    "AlertScopeRow",
    "AppliedSettingsRow",
    "AttributionPartRow",
    "AttributionRow",
    "AuditRow",
    "Base",
    "BaselinePinRow",
    "BlockRow",
    "CanaryRow",
    "CheckRow",
    "ComponentRow",
    "DeliveryAttemptRow",
    "DeliveryRow",
    "DetectableRow",
    "DeviceSlotRow",
    "EndpointRow",
    "EnvironmentRow",
    "EpisodeRow",
    "EventRow",
    "FailedTaskRow",
    "KernelBatchRow",
    "KernelCaseRow",
    "KernelSpeedRow",
    "LatestRunRow",
    "LeaderRow",
    "MeasurementRow",
    "MetricRow",
    "NoiseFloorRow",
    "RecentPointRow",
    "RuleEvaluationRow",
    "RunAttemptRow",
    "RunCandidateRow",
    "RunRow",
    "ScheduleRow",
    "ScopeListRow",
    "ScopeRow",
    "SilenceRow",
    "SuitePromptRow",
    "SuiteRow",
    "TriggerRow",
    "VariantRow",
    "VocabularyRow",
]
