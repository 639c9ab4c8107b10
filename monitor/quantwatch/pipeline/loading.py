"""Load one model of a check, in whichever process it is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.pipeline.calibration import calibration_reader
from quantwatch.pipeline.request import RunRequest


def load_one(request: RunRequest, name: str, config: VariantConfig) -> LoadedModel:
    """Load one model of a check, on its threads. Raises as `load_variant` does."""
    with pinned_threads(request.check.threads):  # what is calibrated depends on them
        return load_variant(
            name,
            config,
            base_dir=request.base_dir,
            cache_dir=request.cache_dir,
            calibrate=calibration_reader(request.base_dir),
            streamed=request.check.memory == "streamed",
        )


@contextmanager
def pinned_threads(count: int | None) -> Iterator[None]:
    """Pin torch's CPU threads for as long as the body lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
