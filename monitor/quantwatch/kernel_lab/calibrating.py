"""What a recipe file says it was calibrated on, and those texts: never those that are measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.config.suites import SuiteConfig
from quantwatch.errors import PromptError
from quantwatch.kernel_lab.texts import WINDOW, calibration_text
from quantwatch.prompts.loading import load_suite

CORE = "core-v1"


class Calibration(NamedTuple):
    """Token ids int64 [1, T] each, and the section of a recipe that stands for them."""

    inputs: list[Tensor]
    section: CalibrationConfig
    note: str


def choose_calibration(
    tokenizer: Any, source: str, measured: Path | None, *, windows: int, skip: int
) -> Calibration:
    """Return the texts of `source`, core-v1 or a file, when `measured` is what is measured.

    Of the measured file itself the `windows` windows after its first `skip` are taken, of another
    file its first ones. Where core-v1 is measured it is the three quarters that aren't. Raises
    PromptError for a file that can't be read or is too short.
    """
    if source == CORE:
        section = CalibrationConfig(suite=SuiteConfig(name=CORE), limit=1_000)
        if measured is None:
            note = (
                "the three quarters of core-v1 that weren't measured; the section names all of it"
            )
            return Calibration(calibration_text(tokenizer), section, note)
        return Calibration(_read(section, tokenizer), section, "core-v1")
    path = Path(source).expanduser().absolute()
    same = measured is not None and measured.absolute() == path
    section = CalibrationConfig(
        suite=SuiteConfig(files=(str(path),), window=WINDOW),
        skip=skip if same else 0,
        limit=windows,
    )
    note = f"{len(inputs := _read(section, tokenizer))} windows of {path.name}"
    if len(inputs) < windows or any(ids.shape[1] < WINDOW for ids in inputs):
        raise PromptError(f"{path}: fewer than {section.skip + windows} windows of {WINDOW} tokens")
    return Calibration(inputs, section, f"{note} after its first {skip}" if same else note)


def some_of(texts: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return evenly spaced ones with about that many tokens in all, at least one."""
    total = sum(text.numel() for text in texts)
    step = max(1, total // max(tokens, 1))
    return list(texts[::step])


def _read(section: CalibrationConfig, tokenizer: Any) -> list[Tensor]:
    suite = section.suite.model_copy(update={"limit": section.skip + section.limit})
    prompts = load_suite(suite, tokenizer, base_dir=Path(), max_positions=None).prompts
    return [torch.tensor([prompt.token_ids]) for prompt in prompts[section.skip :]]
