"""What a run is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from quantwatch.capture.plan import CapturePlan
from quantwatch.config.schema import CacheConfig, CheckConfig, SuiteConfig
from quantwatch.domain import Block, RunResult


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One evaluation of a check. Relative paths in the check are relative to `base_dir`."""

    name: str
    check: CheckConfig
    base_dir: Path
    cache_dir: Path
    baseline: RunResult | None = None
    """Compare with this run instead of the pinned one (a CI runner has no database)."""
    baseline_sums: tuple[Block, ...] = ()
    """Its prompt sums, for paired tests; looked for in the database when there are none."""
    reference_bytes: int = CacheConfig().reference_bytes
    """What recorded references may take of the disk under `cache_dir`."""

    @property
    def suite(self) -> SuiteConfig:
        """The suite as a table; a shipped suite's name has become one on validation."""
        suite = self.check.suite
        return SuiteConfig(name=suite) if isinstance(suite, str) else suite

    @property
    def plan(self) -> CapturePlan:
        """What capture is to measure, on any suite; `over` one, a chunk nobody needs is gone."""
        return CapturePlan(
            lens_positions=self.check.lens_positions,
            lens=self.check.lens,
            lens_products=self.check.lens_products,
            isolated_fraction=self.check.isolated_fraction,
            batch_tokens=self.check.batch_tokens,
            prefill_chunk=self.check.prefill_chunk,
        )
