"""Train a quantized model to say what its teacher says (quantization-aware training).

The loss is the mean KL(teacher ‖ student) of the values that will be exported (`lesson`). The
trained modules hold these at every step; their gradients go on, through `fake_quant`, to what is
learned (`latent`). Per step: a few inputs (a fresh seeded order in each pass over them), the mean
of their gradients, rows scaled if asked, then everything clipped together by its global norm, then
SGD or AdamW. The model is in evaluation mode throughout. Nothing is random but the order: the same
start, inputs, options and threads give the same bits.

A gradient's variance is that of one input's gradient, summed over all learned numbers, estimated
from the inputs of the step: before clipping, as the optimizer would get it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.decoder_layers import find_decoder_layers
from quantwatch_kernels.quantize.latent import Latent, Learn, Start
from quantwatch_kernels.quantize.lesson import Lesson, Suffix

__all__ = ["QatOptions", "QatRecord", "QatStep", "train_quantized"]


@dataclass(frozen=True, slots=True)
class QatOptions:
    """How to train. Raises ValueError for what makes no sense."""

    learn: Learn = "both"
    steps: int = 32
    inputs_per_step: int = 2
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    """Of weights, in their own unit."""
    range_lr: float = 1e-3
    """Of scales and float zeros, as a share of the scale and of the range."""
    schedule: Literal["cosine", "constant"] = "cosine"
    clip_norm: float = 1.0
    """The largest norm of all gradients together; inf: never clipped."""
    row_scaling: bool = False
    """Scale the gradient of each output channel by its mean squared scale (matters for SGD)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learn not in ("weights", "scales", "both"):
            raise ValueError(f"learn is weights, scales or both; it is {self.learn!r}.")
        if self.optimizer not in ("adamw", "sgd") or self.schedule not in ("cosine", "constant"):
            raise ValueError(
                "the optimizer is adamw or sgd, the schedule cosine or constant; "
                f"they are {self.optimizer!r} and {self.schedule!r}."
            )
        for name in ("steps", "inputs_per_step", "lr", "range_lr", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; it is {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class QatStep:
    """One step, before its update: loss in nats, norm and variance of the gradient."""

    loss: float
    gradient_norm: float
    gradient_variance: float
    """NaN with one input per step."""
    lr: float


@dataclass(frozen=True, slots=True)
class QatRecord:
    """What training did. `weights` are the exported ones by the layers' keys."""

    steps: tuple[QatStep, ...]
    final_loss: float
    """Mean over all inputs of the exported model."""
    weights: Mapping[str, QuantizedWeight]


def train_quantized(
    student: nn.Module,
    starts: Sequence[Start],
    lesson: Lesson,
    options: QatOptions,
    *,
    shared_prefix: bool = False,
) -> QatRecord:
    """Train the layers of `starts` in place; everything else of the student stays as it is.

    `shared_prefix` says that the student is the teacher up to the first trained decoder layer, so
    that what the lesson holds is not computed again. Raises ValueError for a layer outside the
    decoder, for fewer inputs than a step takes, and when loss or gradient aren't finite.
    """
    if not 0 < options.inputs_per_step <= len(lesson.inputs):
        raise ValueError(
            f"a step takes {options.inputs_per_step} inputs; the lesson has {len(lesson.inputs)}."
        )
    first = _first_layer(student, starts)
    suffix = Suffix(student, lesson, first, shared_prefix=shared_prefix)
    latents = [Latent(start, options.learn) for start in starts]
    with _only_these_learn(student, latents):
        trainer = _Trainer(suffix, latents, options)
        steps = tuple(trainer.step(numbers) for numbers in _orders(len(lesson.inputs), options))
        trainer.install()
        final = suffix.mean_loss()
    weights = {latent.layer.key: latent.export() for latent in latents}
    return QatRecord(steps, final, weights)


def _first_layer(student: nn.Module, starts: Sequence[Start]) -> int:
    """Return the number of the first decoder layer with something to learn."""
    layers, found = find_decoder_layers(student), []
    for start in starts:
        path = start.layer.path
        numbers = [n for n, (place, _) in enumerate(layers) if path.startswith(f"{place}.")]
        if not numbers:
            raise ValueError(f"{start.layer.name} is in no decoder layer: it can't be trained.")
        found += numbers
    if not found:
        raise ValueError("there is no layer to train.")
    return min(found)


def _orders(count: int, options: QatOptions) -> Iterator[list[int]]:
    """Yield the inputs of each step: all in a random order, then all in another."""
    generator = torch.Generator().manual_seed(options.seed)
    waiting: list[int] = []
    for _ in range(options.steps):
        while len(waiting) < options.inputs_per_step:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[: options.inputs_per_step]
        del waiting[: options.inputs_per_step]


@contextmanager
def _only_these_learn(student: nn.Module, latents: Sequence[Latent]) -> Iterator[None]:
    before = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
    try:
        student.requires_grad_(False)
        for latent in latents:
            latent.layer.module.get_parameter(latent.layer.parameter).requires_grad_(True)
        yield
    finally:
        for parameter, wanted in before:
            parameter.grad = None
            parameter.requires_grad_(wanted)


class _Trainer:
    """One student at one lesson; `step` is the whole of training."""

    def __init__(self, suffix: Suffix, latents: Sequence[Latent], options: QatOptions) -> None:
        self._suffix, self._latents, self._options = suffix, latents, options
        self._learned = [p for latent in latents for p in latent.parameters()]
        self._optimizer = _make_optimizer(latents, options)
        self._taken = 0

    def install(self) -> list[Tensor]:
        """Write the values of now into the student; returns them, differentiable."""
        values = [latent.values() for latent in self._latents]
        with torch.no_grad():
            for latent, value in zip(self._latents, values, strict=True):
                latent.layer.weight.copy_(value)
        return values

    def step(self, numbers: Sequence[int]) -> QatStep:
        """Learn from some inputs together."""
        share = self._taken / self._options.steps
        decay = 0.5 * (1 + math.cos(math.pi * share)) if self._options.schedule == "cosine" else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * decay
        loss, squares = 0.0, 0.0
        for parameter in self._learned:
            parameter.grad = torch.zeros_like(parameter)
        values = self.install()
        for number in numbers:
            loss += self._suffix.loss(number, learning=True) / len(numbers)
            for parameter, gradient in zip(self._learned, self._backward(values), strict=True):
                squares += gradient.square().sum(dtype=torch.float64).item()
                assert parameter.grad is not None
                parameter.grad.add_(gradient, alpha=1 / len(numbers))
        norm = nn.utils.clip_grad_norm_(self._learned, self._options.clip_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ValueError(f"step {self._taken}: loss {loss}, norm of the gradient {norm}.")
        self._optimizer.step()
        self._taken += 1
        spare = len(numbers) - 1
        variance = (squares - len(numbers) * norm**2) / spare if spare else math.nan
        return QatStep(loss, norm, variance, self._options.lr * decay)

    def _backward(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Take the gradients off the student's weights and return those of what is learned."""
        upstream, holders = [], []
        for latent, value in zip(self._latents, values, strict=True):
            layer = latent.layer
            holder = layer.module.get_parameter(layer.parameter)
            holders.append(holder)
            found = torch.zeros_like(holder) if holder.grad is None else holder.grad
            if layer.expert is not None:
                found = found[layer.expert]
            upstream.append((found.T if layer.transposed else found).to(value.dtype))
        gradients = torch.autograd.grad(values, self._learned, upstream, retain_graph=True)
        for holder in holders:
            holder.grad = None
        if not self._options.row_scaling:
            return list(gradients)
        factors = {id(la.weight): la.row_factors() for la in self._latents if la.weight is not None}
        pairs = zip(self._learned, gradients, strict=True)
        return [g * factors[id(p)] if id(p) in factors else g for p, g in pairs]


def _make_optimizer(latents: Sequence[Latent], options: QatOptions) -> torch.optim.Optimizer:
    weights = [la.weight for la in latents if la.weight is not None]
    ranges = [p for la in latents for p in (la.growth, la.shift) if p is not None]
    groups = [
        {"params": params, "lr": lr, "initial_lr": lr}
        for params, lr in ((weights, options.lr), (ranges, options.range_lr))
        if params
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups)
    # Without decay: towards 0 is not where a scale's growth or a weight's cell wants to go.
    return torch.optim.AdamW(groups, weight_decay=0.0)
