"""What an engine is made of."""

from dataclasses import dataclass, field
from pathlib import Path

from quantwatch_kernels.serve.block_hash import ExtraKeys
from quantwatch_kernels.serve.engine.adaptive import AdaptiveRule
from quantwatch_kernels.serve.engine.batch import Limits
from quantwatch_kernels.serve.preemption import PreemptionCosts

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and choices by name. Raises ValueError for what can't be."""

    num_blocks: int
    """Pages of the pool, the null block among them."""
    page_size: int = 16
    limits: Limits = field(default_factory=Limits)
    eviction: str = "lru"
    """A name of `eviction.POLICIES`."""
    prefix_caching: bool = True
    host_pages: int = 0
    """Pages in host memory for preempted requests; 0: they are computed again."""
    host_folder: Path | None = None
    """Keep them in a file under this folder instead, allocated whole when the engine is made."""
    preemption_costs: PreemptionCosts | None = None
    """Measured costs, to choose between the two; None: the host as long as it has room."""
    kv_scheme: str | None = None
    """A name of `kv_scheme.SCHEMES` that stores token by token; None: as the model computes."""
    adaptive: AdaptiveRule | None = None
    """Let latency and free pages decide how many run, up to `limits.max_running`."""
    graphs: bool = True
    """Capture CUDA graphs where the model is on CUDA and pages hold numbers."""
    extra: ExtraKeys = ()
    """What all pages depend on besides tokens: a fingerprint of the weights, say."""

    def __post_init__(self) -> None:
        if self.page_size < 2:
            # Slot 0 of the null block is read as padding and its last slot written as such.
            raise ValueError(f"page_size must be at least 2 tokens; it is {self.page_size}.")
        if self.host_pages < 0:
            raise ValueError(f"host_pages must be at least 0; it is {self.host_pages}.")
        if self.adaptive is not None and self.adaptive.most > self.limits.max_running:
            raise ValueError(
                f"adaptive.most is {self.adaptive.most}; "
                f"limits.max_running allows {self.limits.max_running}."
            )
