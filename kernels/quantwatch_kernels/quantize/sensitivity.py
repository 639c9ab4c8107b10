"""What quantizing one part of a model alone costs: its sensitivity, by re-running the suffix.

The unquantized model is walked layer by layer (`LayerWalk`). At layer l, the hidden states that
enter it are those of the reference; for each group of matrices (`groups`) the quantized values are
put into the weights, layers l … L−1 and the head are run again, and the weights are put back. So
half of the model is run per candidate on average, nothing but one layer's inputs is kept, and where
nothing is swapped the logits are the reference's bit for bit: KL exactly 0.

    kl               mean KL(reference ‖ candidate) over the scored tokens, nats
    agreement_lost   share of them whose likeliest next token changes
    accuracy_lost    next-token accuracy on the text, reference − candidate
    entropy          of the group's output in the reference: Shannon entropy, nats, of a histogram
                     of 256 equal bins from smallest to largest value (flat: ln 256 = 5.55)

Scored is the second half of every input [B, T] but its last position. Candidates aren't stacked
into one batch: products over another number of rows are rounded otherwise, and the 0 would be lost.

Specs that aren't in `probes` aren't run: their KL is the nearest probe's times the ratio of output
errors tr(E H Eᵀ), H of the inputs (KL is quadratic in a small error). `measured` says which.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from quantwatch_kernels.quantize.activation_entropy import group_entropies
from quantwatch_kernels.quantize.affine import QuantizedWeight
from quantwatch_kernels.quantize.gptq import output_error
from quantwatch_kernels.quantize.group_stats import layer_stats, outer_stats
from quantwatch_kernels.quantize.groups import Group
from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.recipe import WeightSpec
from quantwatch_kernels.quantize.selection import Layer
from quantwatch_kernels.quantize.suffix import Difference, SuffixRun, swapped
from quantwatch_kernels.quantize.walk import LayerWalk
from quantwatch_kernels.quantize.weights import quantize_layer

__all__ = ["Sensitivity", "measure_sensitivity"]

Quantized = dict[str, QuantizedWeight]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One group in one format; see the module."""

    group: Group
    format: str
    """The name its spec was given."""
    num_bytes: int
    """Of the group as it is stored in this format."""
    difference: Difference
    entropy: float | None
    """None where the group has no output of its own: an expert that no token reached."""
    measured: bool
    """False: KL by the ratio of output errors; the other two differences are NaN then."""


def measure_sensitivity(
    model: nn.Module,
    inputs: Sequence[Tensor],
    groups: Sequence[Group],
    specs: Mapping[str, WeightSpec],
    *,
    probes: Collection[str] | None = None,
    calibration: Sequence[Tensor] | None = None,
) -> Iterator[Sensitivity]:
    """Yield one row per group and spec, layer by layer; the model ends as it was.

    `inputs` and `calibration` are token ids [B, T]; calibration (the inputs where absent) is for
    specs that need it and for those that aren't probes. `probes` None runs every spec. Raises
    ValueError for probes that are no specs, and, naming the group, where a KL isn't finite.
    """
    wanted = set(specs if probes is None else probes)
    if not wanted or not wanted <= set(specs):
        raise ValueError(f"probes must be some of {', '.join(specs)}; they are {sorted(wanted)}.")
    run = SuffixRun(model, inputs)
    other = run.walk if calibration is None else LayerWalk(model, calibration)
    needed = wanted != set(specs) or any(spec.calibrated for spec in specs.values())
    candidates = _Candidates(run, other if needed else None, specs, wanted)
    yield from candidates.rows([group for group in groups if group.kind == "embedding"])
    for index in range(len(run.walk.layers)):
        yield from candidates.rows([group for group in groups if group.layer == index])
        run.walk.run(index)
        if other is not run.walk:
            other.run(index)
    yield from candidates.rows([group for group in groups if group.kind == "head"])


class _Candidates(NamedTuple):
    """Everything that is the same for all groups."""

    run: SuffixRun
    calibration: LayerWalk | None
    specs: Mapping[str, WeightSpec]
    probes: set[str]

    def rows(self, groups: Sequence[Group]) -> Iterator[Sensitivity]:
        """Yield the rows of groups that are met at the walk's position."""
        if not groups:
            return
        parts = {part.key: part for group in groups for part in group.parts}
        stats = self._stats(groups[0], list(parts.values()))
        entropies = group_entropies(self.run.walk, groups)
        made: dict[str, Quantized] = {
            name: {key: quantize_layer(replace(part, spec=spec), stats.get(key))[0]
                   for key, part in parts.items()}
            for name, spec in self.specs.items()
        }  # fmt: skip
        for group in groups:
            entropy = entropies.get(group.name)
            probed = {name: self._probe(group, made[name]) for name in made if name in self.probes}
            for name, quantized in made.items():
                found = probed.get(name)
                difference = found or self._scaled(group, name, made, probed, stats)
                size = sum(quantized[part.key].num_bytes for part in group.parts)
                yield Sensitivity(group, name, size, difference, entropy, found is not None)

    def _probe(self, group: Group, quantized: Quantized) -> Difference:
        values = [quantized[part.key].values for part in group.parts]
        with swapped(group.parts, values):
            found = self.run.difference(from_start=group.kind == "embedding")
        if not math.isfinite(found.kl):
            raise ValueError(f"{group.name}: its KL is {found.kl} when it is quantized alone.")
        return found

    def _scaled(
        self,
        group: Group,
        name: str,
        made: Mapping[str, Quantized],
        probed: Mapping[str, Difference],
        stats: Mapping[str, InputStats],
    ) -> Difference:
        bits = self.specs[name].format.bits
        nearest = min(probed, key=lambda probe: abs(self.specs[probe].format.bits - bits))
        errors = [_error(group, made[which], stats) for which in (name, nearest)]
        if not errors[1] > 0:
            return self._probe(group, made[name])  # nothing to scale by
        kl = probed[nearest].kl * errors[0] / errors[1]
        return Difference(kl, math.nan, math.nan)

    def _stats(self, group: Group, parts: Sequence[Layer]) -> dict[str, InputStats]:
        """Return statistics of the inputs of parts that are met at the walk's position."""
        walk = self.calibration
        if walk is None:
            return {}
        if group.layer is None:
            return outer_stats(self.run.model, parts[0], walk.inputs)
        return layer_stats(walk, group.layer, parts)


def _error(group: Group, quantized: Quantized, stats: Mapping[str, InputStats]) -> float:
    """Return Σ tr(E H Eᵀ) over the parts, each weighed by its tokens."""
    total = 0.0
    for part in group.parts:
        found = stats[part.key]
        error = output_error(part.weight, quantized[part.key].values, found.hessian)
        total += found.tokens * error
    return total
