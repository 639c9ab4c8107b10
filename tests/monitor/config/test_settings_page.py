"""docs/settings.md explains every key of quantwatch.toml, with its default, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.config.recipe_parts import (
    ActivationsConfig,
    CalibrationConfig,
    LayerConfig,
    ResidualConfig,
    RotationConfig,
    WeightsConfig,
)
from quantwatch.config.rules import RuleConfig
from quantwatch.config.schema import (
    AlertingConfig,
    BaselineConfig,
    CacheConfig,
    CanaryConfig,
    CandidateConfig,
    CheckConfig,
    Config,
    DashboardConfig,
    DatabaseConfig,
    EndpointConfig,
    FaultConfig,
    GrantsConfig,
    RecipeConfig,
    RetentionConfig,
    ScheduleConfig,
    ServiceConfig,
    SuiteConfig,
    VariantConfig,
)
from quantwatch.config.served import ServedConfig
from quantwatch.config.serving import ServeConfig
from quantwatch.config.watching import FlappingConfig, MaintenanceConfig

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "The file": Config,
    "[database]": DatabaseConfig,
    "[checks.NAME]": CheckConfig,
    "[checks.NAME.schedule]": ScheduleConfig,
    "[checks.NAME.baseline]": BaselineConfig,
    "[checks.NAME.alerting]": AlertingConfig,
    "[checks.NAME.alerting.flapping]": FlappingConfig,
    "[[checks.NAME.alerting.maintenance]]": MaintenanceConfig,
    "[checks.NAME.canary]": CanaryConfig,
    "[endpoints.NAME]": EndpointConfig,
    "[service]": ServiceConfig,
    "[retention]": RetentionConfig,
    "[cache]": CacheConfig,
    "[dashboard]": DashboardConfig,
    "[dashboard.roles] and [dashboard.groups]": GrantsConfig,
    "reference and candidates": VariantConfig,
    "[[checks.NAME.candidates]] in addition": CandidateConfig,
    "recipe": RecipeConfig,
    "recipe.embedding": WeightsConfig,
    "recipe.layers": LayerConfig,
    "recipe.residual_dtype": ResidualConfig,
    "recipe.activations": ActivationsConfig,
    "recipe.rotation": RotationConfig,
    "recipe.calibration": CalibrationConfig,
    "serve": ServeConfig,
    "served": ServedConfig,
    "faults": FaultConfig,
    "suite": SuiteConfig,
    "rules": RuleConfig,
}


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[{}]`".format(", ".join(f'"{item}"' for item in value))
    return "empty" if isinstance(value, dict | BaseModel) else f"`{value}`"


def rows(model: type[BaseModel]) -> list[str]:
    inherited = VariantConfig.model_fields if model is CandidateConfig else {}
    return [
        f"| `{name}` | {default(field)} | {field.description} |"
        for name, field in model.model_fields.items()
        if name not in inherited
    ]


def section(title: str) -> str:
    found = re.search(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S
    )
    assert found, f"docs/settings.md has no section {title!r}"
    return found.group(1)


@pytest.mark.parametrize("title", SECTIONS)
def test_every_key_is_explained_with_its_default(title: str) -> None:
    """Catches a setting that nobody can know of, and a default that the page got wrong."""
    table = [line for line in section(title).splitlines() if line.startswith("| `")]
    assert table == rows(SECTIONS[title])


def test_every_section_of_the_schema_has_a_table() -> None:
    """Catches a new section that this test forgets."""
    seen: set[type[BaseModel]] = set()
    waiting: list[Any] = [Config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, type) and issubclass(part, BaseModel):
            seen.add(part)
            waiting += [f.annotation for f in part.model_fields.values() if part not in waiting]
        else:
            waiting += getattr(part, "__args__", ())
    written = {model.__name__ for model in SECTIONS.values()} | {"RuleOverride"}
    assert {model.__name__ for model in seen} <= written


def test_every_default_rule_is_listed_with_its_limit() -> None:
    """Catches a default threshold that changes without the page."""
    lines = [line for line in section("Default rules").splitlines() if line.startswith("| `")]
    assert lines == [rule_row(rule) for rule in DEFAULT_RULES]


def rule_row(rule: RuleConfig) -> str:
    numbers = (rule.threshold, rule.factor, rule.min_effect)
    limit = next((f"{number:g}" for number in numbers if number is not None), "none")
    where = ", ".join(rule.globs)
    return f"| `{rule.name}` | {rule.metric} | {where} | {rule.kind} | {limit} | {rule.severity.value} |"
