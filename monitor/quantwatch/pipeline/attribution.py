"""Shares of a candidate's KL: which parts there are, on which prompts, and what they cost.

The kernels know modules and tensors; here they get their scopes, and a choice of prompts: whole
ones, drawn from the run's suite by a seed until the budget of tokens is used up.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import torch

from quantwatch.domain import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    AttributedPart,
    Attribution,
    Prompt,
    Scope,
    Suite,
    is_layer,
    layer_index,
)
from quantwatch.errors import UserError
from quantwatch.models.loaded import LoadedModel
from quantwatch.pipeline.loading import pinned_threads
from quantwatch.pipeline.reloading import Reloaded
from quantwatch.store.kinds import finite_or_none
from quantwatch_kernels.quantize.attribution import (
    Attributed,
    Part,
    Place,
    Share,
    Terms,
    attribute,
)
from quantwatch_kernels.quantize.basis import why_other_input, why_other_output
from quantwatch_kernels.quantize.suffix import SuffixRun

Detail = Literal["layer", "part", "linear"]
_CARRIED_BYTES = 1 << 30
"""Of hidden states that streamed layers are run on together, so that each is read less often."""
_VISIBLE, _ROUNDING = 1e-3, 1e-9
"""What two KLs may differ by before a note says so: one decimal of a share, nats of rounding."""
_OUTSIDE: dict[str, Place] = {EMBEDDING: "embedding", FINAL_NORM: "behind", HEAD: "behind"}


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. Raises UserError for numbers that can't be."""

    tokens: int = 1024
    """At most so many tokens of the suite."""
    detail: Detail = "layer"
    """Layers; their attention and MLP too; their linear layers too."""
    seed: int = 0
    """Of the choice of prompts and of the noise."""
    tell: Callable[[str], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.tokens < 1 or self.seed < 0:
            raise UserError(
                f"--tokens is at least 1 and --seed at least 0; they are {self.tokens}, {self.seed}"
            )


def attribute_shares(models: Reloaded, wish: Wish) -> Attribution:
    """Measure what every part of the candidate costs alone; both models end as they were.

    Raises UserError for models on two devices, a candidate in another basis, no prompt within the
    budget, and what the kernels refuse; ModelError for weights that were written to meanwhile.
    """
    _require_one_device(models)
    parts, notes = _parts(models, wish.detail)
    prompts = chosen_prompts(models.suite, wish.tokens, wish.seed)
    found = _attribute(models, parts, prompts, wish)
    _require_unwritten(models)
    notes += [
        f"{name} left out: its weights are read, it is never called" for name in found.never_called
    ]
    if not math.isclose(found.together_kl, found.kl, rel_tol=_VISIBLE, abs_tol=_ROUNDING):
        notes.append(_outside(found.kl, found.together_kl))
    return Attribution(
        candidate=models.config.name,
        made_at=datetime.now(UTC),
        detail=wish.detail,
        seed=wish.seed,
        num_prompts=len(prompts),
        num_tokens=sum(len(p.token_ids) for p in prompts),
        num_scored=found.num_tokens,
        kl=found.kl,
        together_kl=found.together_kl,
        num_boundaries=found.num_boundaries,
        parts=tuple(map(_attributed, found.shares)),
        notes=tuple(notes),
    )


def _attribute(
    models: Reloaded, parts: Sequence[Part], prompts: Sequence[Prompt], wish: Wish
) -> Attributed:
    device = models.reference.device
    inputs = [torch.tensor([p.token_ids], device=device) for p in prompts]
    carried = _CARRIED_BYTES if models.request.check.memory == "streamed" else 0
    scored = [torch.arange(p.score_start, len(p.token_ids), device=device) for p in prompts]
    with pinned_threads(models.request.check.threads):
        try:
            return attribute(
                SuffixRun(models.reference.module, inputs, scored),
                models.candidate.module,
                parts,
                Terms((models.reference.dtype, models.candidate.dtype), wish.seed, carried),
                _telling(wish),
            )
        except ValueError as error:
            _require_unwritten(models)  # a model that changes doesn't compute the same twice
            raise UserError(f"{models.config.name}: {error}") from error


def _require_unwritten(models: Reloaded) -> None:
    for model in (models.reference, models.candidate):
        model.files.require_unwritten()


def chosen_prompts(suite: Suite, tokens: int, seed: int) -> list[Prompt]:
    """Return whole prompts of at most so many tokens together, drawn by the seed, in suite order.

    Raises UserError when not even the shortest fits: a prompt is never cut.
    """
    order = list(suite.prompts)
    random.Random(seed).shuffle(order)
    chosen: list[Prompt] = []
    for prompt in order:
        if len(prompt.token_ids) <= tokens:
            chosen.append(prompt)
            tokens -= len(prompt.token_ids)
    if not chosen:
        short = min(len(prompt.token_ids) for prompt in suite.prompts)
        raise UserError(f"--tokens {tokens}: the shortest prompt of the suite has {short} tokens")
    return sorted(chosen, key=lambda prompt: prompt.index)


def _require_one_device(models: Reloaded) -> None:
    ours, theirs = models.reference.device, models.candidate.device
    if ours != theirs:
        raise UserError(
            f"{models.config.name} is on {theirs}, the reference on {ours}: its parts can stand in "
            "the reference's on the same device alone; load both on one"
        )


def _parts(models: Reloaded, detail: Detail) -> tuple[list[Part], list[str]]:
    """Return the parts that both models have, and what is to be said of those left out."""
    parts, notes = [], []
    for scope, path in _places(models.reference, detail):
        theirs = {**models.candidate.anatomy.linears, **models.candidate.anatomy.taps}.get(scope)
        if theirs is None:
            notes.append(f"{scope}: the candidate has no such part")
            continue
        other = models.candidate.module.get_submodule(theirs)
        # Of the head nobody takes the output any further.
        reason = why_other_input(other) or (scope != HEAD and why_other_output(other))
        if reason and _is_whole(scope):
            raise UserError(
                f"{models.config.name}: {scope} can't be put into the reference: {reason}"
            )
        if reason:
            notes.append(f"{scope} left out: {reason}")
            continue
        module = models.reference.module.get_submodule(path)
        place, layer = _OUTSIDE.get(scope, "layers"), layer_index(scope)
        rests = scope in models.reference.anatomy.routed
        parts.append(Part(scope, module, other, place, layer, _is_whole(scope), rests))
    return parts, notes


def _places(model: LoadedModel, detail: Detail) -> Iterator[tuple[Scope, str]]:
    for scope, path in model.anatomy.taps.items():
        if _is_whole(scope) or detail != "layer":
            yield scope, path
    if detail == "linear":
        yield from model.anatomy.linears.items()


def _is_whole(scope: Scope) -> bool:
    return is_layer(scope) or scope in _OUTSIDE


def _kind(scope: str) -> str:
    if scope in _OUTSIDE:
        return scope.replace("_", " ")
    last = scope.rpartition(".")[2]
    return "layer" if is_layer(scope) else last if last in ("attention", "mlp") else "linear"


def _attributed(share: Share) -> AttributedPart:
    part, scope = share.part, Scope(share.part.name)
    error = finite_or_none(share.relative_error)
    return AttributedPart(scope, _kind(scope), part.whole, share.kl, share.noise_kl, error)


def _telling(wish: Wish) -> Callable[[Share], None]:
    def tell(share: Share) -> None:
        wish.tell(f"{share.part.name}: alone {share.kl:.3g} nats, its noise {share.noise_kl:.3g}")

    return tell


def _outside(kl: float, together: float) -> str:
    return (
        f"the candidate's KL is {kl:.6g}, that of all its parts in the reference {together:.6g}: "
        "what lies between belongs to no part"
    )


def restorable(models: Reloaded, found: Attribution) -> Sequence[Scope]:
    """Return the parts that cost anything, the costliest first, as a recipe can leave them out.

    With a tied head the embedding stands for both: they are one matrix.
    """
    module = models.reference.module
    ends = module.get_input_embeddings(), module.get_output_embeddings()  # type: ignore[operator]
    tied = ends[1] is not None and ends[0].weight is ends[1].weight
    costs: dict[Scope, float] = {}
    for part in found.parts:
        if part.is_whole and part.kl > 0 and part.scope != FINAL_NORM:
            scope = EMBEDDING if tied and part.scope == HEAD else part.scope
            costs[scope] = costs.get(scope, 0.0) + part.kl
    return sorted(costs, key=lambda scope: -costs[scope])
