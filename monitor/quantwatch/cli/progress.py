"""Progress on stderr: bars on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quantwatch.cli.streams import whisper

if TYPE_CHECKING:
    from quantwatch.domain import Progress

_EVERY_S = 5.0


@contextmanager
def reporting() -> "Iterator[Progress]":
    """Yield where a run reports; the last stage is closed at the end, also after an error."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        bars = _bars(console)
        with bars:
            yield Bars(bars)
    else:
        lines = Lines(whisper)
        yield lines
        lines.finish()


class Bars:
    """One `rich` bar per stage."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def start(self, stage: str, total_tokens: int) -> None:
        """Close the stage before and begin a bar; without tokens it only pulses."""
        self._finish()
        self._task = self._bars.add_task(stage, total=total_tokens or None)

    def advance(self, tokens: int) -> None:
        """Move the bar."""
        self._bars.advance(self._task, tokens)

    def _finish(self) -> None:
        if self._task is not None:
            task = self._bars.tasks[self._task]
            self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)


class Lines:
    """Plain lines for logs: one when a stage starts, every few seconds, and when it ends."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._stage: str | None = None
        self._total = self._done = 0
        self._started = self._written = 0.0

    def start(self, stage: str, total_tokens: int) -> None:
        """Close the stage before and announce the next."""
        self.finish()
        self._stage, self._total, self._done = stage, total_tokens, 0
        self._started = self._written = self._clock()
        self._write(f"{stage}: {total_tokens} tokens" if total_tokens else f"{stage} …")

    def advance(self, tokens: int) -> None:
        """Count tokens; write a line when the last one is old."""
        self._done += tokens
        now = self._clock()
        if now - self._written >= _EVERY_S:
            self._written = now
            self._write(f"{self._stage}: {self._done} of {self._total} tokens{self._pace(now)}")

    def finish(self) -> None:
        """Close the current stage, if any."""
        if self._stage is not None:
            seconds = self._clock() - self._started
            self._write(f"{self._stage}: done in {seconds:.1f} s")
            self._stage = None

    def _pace(self, now: float) -> str:
        if not self._done:  # workers load, or measure their first batches
            return ""
        rate = self._done / max(now - self._started, 1e-9)
        left = max(self._total - self._done, 0) / rate
        return f", {rate:.0f} tokens/s, {left:.0f} s left"


def _bars(console: Any) -> Any:
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class TokensPerSecond(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.0f} tokens/s" if speed and task.total != 1 else "")

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    ]
    times = [TokensPerSecond(), TimeRemainingColumn(), TimeElapsedColumn()]
    return RichProgress(*columns, *times, console=console)
