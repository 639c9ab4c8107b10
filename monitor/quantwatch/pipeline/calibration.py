"""Prompts for the recipes of models: the one place where the two meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.errors import PromptError
from quantwatch.models.recipes import Calibrate
from quantwatch.prompts.loading import load_suite


def calibration_reader(base_dir: Path) -> Calibrate:
    """Return a function that reads and tokenizes what a recipe is calibrated on."""

    def read(config: CalibrationConfig, tokenizer: Any) -> Sequence[Tensor]:
        wanted = config.skip + config.limit
        suite = config.suite.model_copy(update={"limit": min(wanted, config.suite.limit or wanted)})
        prompts = load_suite(suite, tokenizer, base_dir=base_dir, max_positions=None).prompts
        chosen = prompts[config.skip :]
        if not chosen:
            raise PromptError(
                f"calibration: skip = {config.skip} leaves none of {len(prompts)} prompts"
            )
        return [torch.tensor([prompt.token_ids]) for prompt in chosen]

    return read
