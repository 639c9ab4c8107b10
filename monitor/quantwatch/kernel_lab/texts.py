"""What recipes are measured and calibrated on: windows of a text, and which positions count.

A plain text is cut into windows of 512 tokens, of which the second half is scored (the protocol of
the peers' figures: 255 tokens a window, the last position has no next token). Without a text it is
core-v1: every fourth prompt is measured, its second half scored, and the other three quarters are
free for calibration, so that nothing is ever calibrated on what it is measured on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quantwatch.config.schema import SuiteConfig
from quantwatch.errors import PromptError
from quantwatch.prompts.loading import load_suite

WINDOW = 512
_EVERY = 4


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of token ids, int64 [1, T] each, in order; every window is one cluster."""

    name: str
    windows: tuple[Tensor, ...]
    last: int | None = None
    """At most so many tokens of a window are scored; None: the second half, which is most."""

    def scored(self, window: Tensor) -> Tensor:
        """Return the positions whose next token is predicted and counted: the last ones."""
        length = window.shape[1]
        first = length // 2
        if self.last is not None:
            first = max(first, length - 1 - self.last)
        return torch.arange(first, length - 1)

    @property
    def num_scored(self) -> int:
        """Number of scored tokens."""
        return sum(len(self.scored(window)) for window in self.windows)


def measured_text(tokenizer: Any, file: Path | None = None, *, windows: int | None = 8) -> Text:
    """Return what is measured: the first `windows` of a file (None: all), or a quarter of core-v1.

    Raises PromptError when the file can't be read or is shorter than that many windows.
    """
    if file is None:
        return Text("core-v1 (every fourth prompt)", _core(tokenizer, "measured"))
    return Text(file.name, _cut(tokenizer, file, windows))


def calibration_text(
    tokenizer: Any, file: Path | None = None, *, skip: int = 8, windows: int = 16
) -> list[Tensor]:
    """Return what recipes are calibrated on: windows of a file after its first `skip`, or core-v1.

    Of core-v1 it is the three quarters that `measured_text` leaves.
    """
    if file is None:
        return list(_core(tokenizer, "calibration"))
    return list(_cut(tokenizer, file, skip + windows)[skip:])


def _core(tokenizer: Any, part: Literal["measured", "calibration"]) -> tuple[Tensor, ...]:
    suite = load_suite(SuiteConfig(name="core-v1"), tokenizer, base_dir=Path(), max_positions=None)
    wanted = part == "measured"
    return tuple(
        torch.tensor([prompt.token_ids])
        for prompt in suite.prompts
        if (prompt.index % _EVERY == 0) == wanted
    )


def _cut(tokenizer: Any, file: Path, windows: int | None) -> tuple[Tensor, ...]:
    config = SuiteConfig(files=(str(file.absolute()),), window=WINDOW, limit=windows)
    suite = load_suite(config, tokenizer, base_dir=Path(), max_positions=None)
    kept = [prompt for prompt in suite.prompts if len(prompt.token_ids) == WINDOW]
    if not kept or (windows is not None and len(kept) < windows):
        raise PromptError(
            f"{file}: {len(kept)} whole windows of {WINDOW} tokens; {windows or 1} are needed"
        )
    return tuple(torch.tensor([prompt.token_ids]) for prompt in kept)
