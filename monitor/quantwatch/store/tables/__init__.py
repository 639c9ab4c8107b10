"""Every table. Importing this package fills `Base.metadata`."""

from quantwatch.store.tables.alerts import AlertRow, AlertScopeRow, BaselinePinRow
from quantwatch.store.tables.base import Base
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
from quantwatch.store.tables.results import BlockRow, MeasurementRow, NoiseFloorRow
from quantwatch.store.tables.runs import LatestRunRow, RunCandidateRow, RunRow

__all__ = [
    "AlertRow",
    "AlertScopeRow",
    "Base",
    "BaselinePinRow",
    "BlockRow",
    "CheckRow",
    "EnvironmentRow",
    "LatestRunRow",
    "MeasurementRow",
    "MetricRow",
    "NoiseFloorRow",
    "RunCandidateRow",
    "RunRow",
    "ScopeListRow",
    "ScopeRow",
    "SuitePromptRow",
    "SuiteRow",
    "VariantRow",
    "VocabularyRow",
]
