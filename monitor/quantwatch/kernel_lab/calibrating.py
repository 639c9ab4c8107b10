"""What a recipe file says it was calibrated on, and those texts: never those that are measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantwatch.config.files import local_path
from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.config.suites import SuiteConfig
from quantwatch.errors import PromptError
from quantwatch.kernel_lab.texts import WINDOW, Text, calibration_text, measured_text
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
    PromptError for a file that can't be read or is too short, and for one that repeats what is
    measured: a copy of the file, say.
    """
    if source == CORE:
        section = CalibrationConfig(suite=SuiteConfig(name=CORE), limit=1_000)
        if measured is None:
            note = (
                "the three quarters of core-v1 that weren't measured; the section names all of it"
            )
            return Calibration(calibration_text(tokenizer), section, note)
        return Calibration(_read(section, tokenizer), section, "core-v1")
    path = local_path(source, Path.cwd())
    same = measured is not None and _same_file(local_path(str(measured), Path.cwd()), path)
    section = CalibrationConfig(
        suite=SuiteConfig(files=(str(path),), window=WINDOW),
        skip=skip if same else 0,
        limit=windows,
    )
    note = f"{len(inputs := _read(section, tokenizer))} windows of {path.name}"
    if len(inputs) < windows or any(ids.shape[1] < WINDOW for ids in inputs):
        raise PromptError(f"{path}: fewer than {section.skip + windows} windows of {WINDOW} tokens")
    _refuse_measured(inputs, measured_text(tokenizer, measured, windows=skip), path)
    return Calibration(inputs, section, f"{note} after its first {skip}" if same else note)


def _same_file(one: Path, other: Path) -> bool:
    """Say whether two names, through links perhaps, are of one file."""
    return one.exists() and other.exists() and one.samefile(other)


def _refuse_measured(inputs: Sequence[Tensor], measured: Text, path: Path) -> None:
    """Compare token ids: a copy is another file with the same windows."""
    taken = {tuple(window.flatten().tolist()) for window in measured.windows}
    again = [at for at, ids in enumerate(inputs) if tuple(ids.flatten().tolist()) in taken]
    if again:
        raise PromptError(
            f"{path}: {len(again)} of {len(inputs)} windows to calibrate on are windows of "
            f"{measured.name} that are measured, the first of them number {again[0]}"
        )


def of_section(section: CalibrationConfig, tokenizer: Any, measured: Text) -> Calibration:
    """Return what a recipe's own section names, without what is measured.

    Relative paths start at the working directory. Raises PromptError when nothing is left, and for
    a section that chooses with the model: that needs a check.
    """
    if section.selection != "first":
        raise PromptError(
            f"calibration: selection = {section.selection!r} is done by checks; a table takes "
            "'first'"
        )
    taken = {tuple(window.flatten().tolist()) for window in measured.windows}
    named = _read(section, tokenizer)
    kept = [ids for ids in named if tuple(ids.flatten().tolist()) not in taken]
    name = section.suite.name or ", ".join(Path(file).name for file in section.suite.files)
    if not kept:
        raise PromptError(f"calibration: all {len(named)} prompts of {name} are measured")
    note = f"{name}: {len(kept)} prompts"
    less = f" of {len(named)}, the others are measured" if len(kept) < len(named) else ""
    return Calibration(kept, section, note + less)


def some_of(texts: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return evenly spaced ones with about that many tokens in all, at least one."""
    total = sum(text.numel() for text in texts)
    step = max(1, total // max(tokens, 1))
    return list(texts[::step])


def _read(section: CalibrationConfig, tokenizer: Any) -> list[Tensor]:
    wanted = section.skip + section.limit
    limit = min(wanted, section.suite.limit or wanted)
    suite = section.suite.model_copy(update={"limit": limit})
    prompts = load_suite(suite, tokenizer, base_dir=Path(), max_positions=None).prompts
    return [torch.tensor([prompt.token_ids]) for prompt in prompts[section.skip :]]
