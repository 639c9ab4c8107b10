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
from quantwatch.models.shapes import context_length
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.calibration.selection import select_samples


def calibration_reader(base_dir: Path) -> Calibrate:
    """Return a function that reads, tokenizes and chooses what a recipe is calibrated on."""

    def read(config: CalibrationConfig, module: nn.Module, tokenizer: Any) -> CalibrationInputs:
        prompts = _prompts(config, tokenizer, base_dir)
        _require_context(prompts, context_length(module))
        if config.selection == "first":
            return CalibrationInputs([_ids(prompt) for prompt in prompts], _fewer(config, prompts))
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


def _require_context(prompts: Sequence[Prompt], most: int | None) -> None:
    """Refuse what the model was not made for: scales found there are those of no real input."""
    long = [prompt for prompt in prompts if most is not None and len(prompt.token_ids) > most]
    if long:
        more = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
        raise PromptError(
            f"calibration: {long[0].source}, prompt {long[0].index}{more}, has "
            f"{len(long[0].token_ids)} tokens, the model's context is {most}: shorten it or take "
            "a smaller window"
        )


def _fewer(config: CalibrationConfig, prompts: Sequence[Prompt]) -> tuple[str, ...]:
    found, limit = len(prompts), config.limit
    return (f"calibration: {found} of {limit} prompts: there are no more",) * (found < limit)


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
