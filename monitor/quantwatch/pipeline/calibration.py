"""Prompts for the recipes of models: the one place where the two meet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.domain import Prompt
from quantwatch.errors import PromptError
from quantwatch.models.recipes import Calibrate, CalibrationInputs
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.calibration.selection import select_samples


def calibration_reader(base_dir: Path) -> Calibrate:
    """Return a function that reads, tokenizes and chooses what a recipe is calibrated on."""

    def read(config: CalibrationConfig, module: nn.Module, tokenizer: Any) -> CalibrationInputs:
        prompts = _prompts(config, tokenizer, base_dir)
        if config.selection == "first":
            return CalibrationInputs([_ids(prompt) for prompt in prompts])
        return _chosen(config, module, prompts)

    return read


def _prompts(config: CalibrationConfig, tokenizer: Any, base_dir: Path) -> Sequence[Prompt]:
    """Return the prompts after `skip`: as many as are used, or all that can be chosen from."""
    limit = config.suite.limit
    if config.selection == "first":
        wanted = config.skip + config.limit
        limit = min(wanted, limit or wanted)
    suite = config.suite.model_copy(update={"limit": limit})
    prompts = load_suite(suite, tokenizer, base_dir=base_dir, max_positions=None).prompts
    rest = prompts[config.skip :]
    if not rest:
        raise PromptError(
            f"calibration: skip = {config.skip} leaves none of {len(prompts)} prompts"
        )
    return rest


def _chosen(
    config: CalibrationConfig, module: nn.Module, prompts: Sequence[Prompt]
) -> CalibrationInputs:
    if config.limit > len(prompts):
        raise PromptError(
            f"calibration: limit = {config.limit} can't be chosen by {config.selection} "
            f"out of {len(prompts)} prompts"
        )
    pool = [_ids(prompt) for prompt in prompts]
    categories = [prompt.category for prompt in prompts]
    assert config.selection != "first"
    chosen = select_samples(
        module, pool, config.limit, config.selection, seed=config.seed, labels=categories
    )
    notes = tuple(f"calibration: {note}" for note in chosen.notes)
    return CalibrationInputs([pool[number] for number in chosen.indices], notes)


def _ids(prompt: Prompt) -> torch.Tensor:
    return torch.tensor([prompt.token_ids])
