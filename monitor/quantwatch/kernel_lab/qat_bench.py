"""The last decoder blocks of a reference, quantized and trained again and again, and measured.

Everything before them stays the float32 reference: what enters them, of the training data and of
the held-out windows, is computed once. A student run from there on gives the logits of the whole
model, bit for bit.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.texts import Text
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.latent import Start, quantize_to_start
from quantwatch_kernels.quantize.lesson import Suffix, prepare_lesson
from quantwatch_kernels.quantize.qat import QatOptions, QatRecord, train_quantized
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.selection import scope_names, select
from quantwatch_kernels.quantize.walk import LayerWalk


@dataclass(frozen=True, slots=True)
class Run:
    """One training: what it did, what came of it, seconds per step."""

    record: QatRecord
    figures: Figures
    seconds: float


class QatBench:
    """A reference with its held-out windows, training data, and one student of it."""

    def __init__(self, measured: Yardstick, data: Sequence[Tensor], blocks: int) -> None:
        """Run the reference on the data [B, T]. Raises ValueError if it has fewer blocks."""
        self.measured, self.data = measured, tuple(data)
        self.student = copy.deepcopy(measured.module)
        layers = find_decoder_layers(self.student)
        self.first = len(layers) - blocks
        if self.first < 0:
            raise ValueError(f"{blocks} blocks are to be trained; the model has {len(layers)}.")
        self._lesson = prepare_lesson(measured.module, self.data, [self.first])
        walk = LayerWalk(measured.module, measured.text.windows)
        for index in range(self.first):
            walk.run(index)
        self._held_out = walk.hidden

    def quantize(self, recipe: Recipe) -> list[Start]:
        """Quantize the last blocks on the training data; the student is then as it was."""
        names = scope_names(self.student, self.measured.scopes)
        last = tuple(f"{path}." for path, _ in find_decoder_layers(self.student)[self.first :])
        chosen = select(self.student, recipe, names).layers
        layers = [layer for layer in chosen if layer.path.startswith(last)]
        kept = {layer.key: layer.weight.clone() for layer in layers}
        starts = quantize_to_start(self.student, layers, self.data)
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(kept[layer.key])
        return starts

    def untrained(self, starts: Sequence[Start]) -> tuple[Figures, float]:
        """Return what the starts measure, and their loss on the training data."""
        with torch.no_grad():
            for start in starts:
                start.layer.weight.copy_(start.quantized.values)
        loss = Suffix(self.student, self._lesson, self.first, shared_prefix=True).mean_loss()
        figures = self.measure()
        self._undo(starts)
        return figures, loss

    def train(self, starts: Sequence[Start], options: QatOptions) -> Run:
        """Train the student from these starts and measure it."""
        began = time.perf_counter()
        record = train_quantized(self.student, starts, self._lesson, options, shared_prefix=True)
        seconds = (time.perf_counter() - began) / options.steps
        figures = self.measure()
        self._undo(starts)
        return Run(record, figures, seconds)

    def measure(self) -> Figures:
        """Compare the student as it is with the reference."""
        candidate = _FromBlock(self.student, self.first, self._held_out, self.measured.text)
        return self.measured.measure(candidate.eval())

    def _undo(self, starts: Sequence[Start]) -> None:
        with torch.no_grad():
            for start in starts:
                start.layer.weight.copy_(start.unrounded)


class _FromBlock(nn.Module):
    """A student on the measured windows, run from its first trained block on."""

    def __init__(
        self, student: nn.Module, first: int, hidden: Sequence[Tensor], text: Text
    ) -> None:
        super().__init__()
        self.student = student
        self._walk = LayerWalk(student, text.windows)
        self._walk.hidden[:], self._walk.position = hidden, first
        self._numbers = {id(window): number for number, window in enumerate(text.windows)}

    def forward(self, ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Tensor:
        """Return the logits [1, kept, V] of one of the windows."""
        assert not use_cache
        walk, number = self._walk, self._numbers[id(ids)]
        hidden = walk.hidden[number]
        for index in range(walk.position, len(walk.layers)):
            hidden = walk.call(index, number, hidden)
        return walk.logits(number, hidden, logits_to_keep)
