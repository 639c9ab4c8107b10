"""What a teacher says to some texts, and how far a student is from it.

Loss: the mean over all positions of KL(teacher ‖ student) in nats, float32. Only the student's
decoder layers from a first one on are run: what enters that one, and the teacher's
log-probabilities, are computed once. The head runs on 128 positions at a time, forward and
backward, so that no more of the student's logits is ever kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from quantwatch_kernels.quantize.walk import LayerWalk

__all__ = ["Lesson", "Suffix", "prepare_lesson"]

_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a teacher says to token ids [B, T]: log-probabilities [B, T, V], float32.

    4 bytes × tokens × vocabulary: 0.4 GB for 8 × 256 tokens and 49k ids.
    """

    inputs: tuple[Tensor, ...]
    log_probs: tuple[Tensor, ...]
    entering: Mapping[int, tuple[Tensor, ...]]
    """What enters decoder layers in the teacher, for students that are the same up to there."""


def prepare_lesson(
    teacher: nn.Module, inputs: Sequence[Tensor], entering: Sequence[int] = ()
) -> Lesson:
    """Run the teacher once; keeps what enters the decoder layers `entering`.

    Raises ValueError for bad inputs and a model that can't be walked.
    """
    walk = LayerWalk(teacher, inputs)
    hidden: dict[int, tuple[Tensor, ...]] = {}
    for index in range(len(walk.layers)):
        if index in entering:
            hidden[index] = tuple(walk.hidden)
        walk.run(index)
    log_probs = []
    with torch.no_grad():
        # One at a time: a teacher's logits and log-probabilities are never all there twice.
        for number, last in enumerate(walk.hidden):
            log_probs.append(walk.logits(number, last).float().log_softmax(-1))
    return Lesson(tuple(inputs), tuple(log_probs), hidden)


class Suffix:
    """The decoder layers of a student from `first` on, its norm and its head, at a lesson."""

    def __init__(
        self, student: nn.Module, lesson: Lesson, first: int, *, shared_prefix: bool = False
    ) -> None:
        """Run the student up to `first`, or take what the lesson holds if that is `shared_prefix`.

        Raises ValueError if the lesson doesn't hold it, and for a model that can't be walked.
        """
        self._walk = LayerWalk(student, lesson.inputs)
        self.lesson = lesson
        if shared_prefix:
            if first not in lesson.entering:
                raise ValueError(f"the lesson doesn't hold what enters decoder layer {first}.")
            self._walk.hidden[:], self._walk.position = lesson.entering[first], first
        else:
            for index in range(first):
                self._walk.run(index)

    def loss(self, number: int, *, learning: bool) -> float:
        """Return the mean KL of one input; `learning` adds to the gradients of the weights."""
        walk, wanted = self._walk, self.lesson.log_probs[number]
        with torch.set_grad_enabled(learning):
            hidden = walk.hidden[number]
            for index in range(walk.position, len(walk.layers)):
                hidden = walk.call(index, number, hidden)
        leaf = hidden.detach().requires_grad_(learning)
        count = wanted.shape[0] * wanted.shape[1]
        total = 0.0
        for positions in torch.split(torch.arange(wanted.shape[1]), _POSITIONS):
            with torch.set_grad_enabled(learning):
                said = walk.logits(number, leaf, positions).float().log_softmax(-1)
                kl = kl_div(said, wanted[:, positions], log_target=True, reduction="sum") / count
            if learning:
                torch.autograd.backward([kl])
            total += kl.item()
        if learning:
            assert leaf.grad is not None
            torch.autograd.backward([hidden], [leaf.grad])
        return total

    def mean_loss(self) -> float:
        """Return the mean over all inputs."""
        count = len(self.lesson.inputs)
        return sum(self.loss(number, learning=False) for number in range(count)) / count
