"""A recipe for a number of bits per weight: sensitivities, the knapsack, and what comes of it.

1. Every linear layer, expert and the embedding is quantized alone in every format (`sensitivity`),
   on a part of the calibration texts. One format, the probe, is run; the others are scaled from it
   by their output errors.
2. `allocate` finds the cheapest choice that fits what the target leaves beside all that isn't
   quantized. Bits per weight are the report's: everything counted.
3. The whole recipe is measured: on the texts of the sensitivities, where measured KL ÷ predicted KL
   says how far costs add up, and on the text that nothing was calibrated on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quantwatch.config.recipe_parts import CalibrationConfig, LayerConfig, WeightsConfig
from quantwatch.config.recipes import RecipeConfig
from quantwatch.errors import UserError
from quantwatch.kernel_lab.calibrating import some_of
from quantwatch.kernel_lab.measure import Figures, Yardstick
from quantwatch.kernel_lab.targets import budget, check_target
from quantwatch.kernel_lab.texts import Text
from quantwatch.models.recipes import kernel_recipe
from quantwatch_kernels.quantize.allocation import Allocation, Item, Option, allocate
from quantwatch_kernels.quantize.groups import Group, Kind, find_groups
from quantwatch_kernels.quantize.recipe import PerGroup, PerTensor, Recipe, WeightSpec
from quantwatch_kernels.quantize.sensitivity import Sensitivity, measure_sensitivity

ITEM_KINDS: dict[str, tuple[Kind, ...]] = {
    "linear": ("embedding", "linear", "expert"),
    "part": ("embedding", "attention", "mlp"),
}
"""What gets a format of its own. Parts are three to four times quicker, and coarser."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. Raises UserError for formats that don't exist or don't go together."""

    target_bpw: float
    formats: tuple[str, ...] = ("uint3-g64", "uint4-g64", "uint5-g64", "uint6-g64", "int8-channel")
    embedding: tuple[str, ...] = ("uint4-g64", "uint5-g64", "uint6-g64", "int8-channel")
    probe: str | None = None
    """The format that is run; None: the one in the middle, in a mixture of experts all."""
    method: Literal["nearest", "gptq"] = "gptq"
    """Of the linear layers; the embedding is rounded to nearest."""
    clip: Literal["none", "mse"] = "mse"
    scale_dtype: Literal["float32", "bfloat16", "float16"] = "float16"
    detail: Literal["linear", "part"] = "linear"
    """A format per linear layer (and expert), or per attention and MLP."""
    tell: Callable[[str], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if not (math.isfinite(self.target_bpw) and self.target_bpw > 0):
            raise UserError(f"--target-bpw must be above 0; it is {self.target_bpw:g}")
        for option, names in (("--formats", self.formats), ("--embedding", self.embedding)):
            if not names or len(set(names)) < len(names):
                raise UserError(f"{option} must name one format or more, each once; not {names}")
            for name in names:
                try:
                    self.weights(name, embedding=False)
                except ValueError as error:
                    raise UserError(f"{option}: {error}") from None
        if self.probe is not None and self.probe not in self.formats:
            raise UserError(
                f"--probe {self.probe} is none of the formats {', '.join(self.formats)}"
            )

    def weights(self, name: str, *, embedding: bool) -> WeightsConfig:
        """Return the weights that a format's name stands for here."""
        plain = Recipe.named(name).weights
        granularity = plain.granularity
        grouped = isinstance(granularity, PerGroup)
        whole: Literal["tensor", "channel"] = (
            "tensor" if isinstance(granularity, PerTensor) else "channel"
        )
        return WeightsConfig(
            weights=plain.format.name,  # type: ignore[arg-type]
            granularity="group" if grouped else whole,
            group_size=granularity.size if isinstance(granularity, PerGroup) else None,
            clip=self.clip,
            method="nearest" if embedding else self.method,
            scale_dtype=self.scale_dtype,
        )

    def spec(self, name: str, *, embedding: bool) -> WeightSpec:
        """Return the same as the kernels' value."""
        weights = self.weights(name, embedding=embedding)
        dtype = getattr(torch, weights.scale_dtype)
        plain = Recipe.named(name).weights
        return replace(plain, clip=weights.clip, method=weights.method, scale_dtype=dtype)


def _given(weights: WeightsConfig) -> dict[str, Any]:
    return weights.model_dump(exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class Allocated:
    """A recipe, what it was expected to cost, and what it costs."""

    recipe: RecipeConfig
    names: tuple[str, ...]
    """The items, as the allocation's options are ordered."""
    allocation: Allocation
    measured: Figures
    """On the text that nothing was calibrated on."""
    again: Figures
    """On the texts of the sensitivities."""

    @property
    def additivity(self) -> float:
        """Measured KL ÷ predicted KL on the same texts; 1 if costs add up."""
        return self.again.kl / self.allocation.cost if self.allocation.cost else math.nan


def groups_of(yardstick: Yardstick, wanted: Wanted) -> list[Group]:
    """Return what gets a format of its own, in the order of the model."""
    kinds = ITEM_KINDS[wanted.detail]
    return [g for g in find_groups(yardstick.module, yardstick.scopes) if g.kind in kinds]


def sensitivities(
    yardstick: Yardstick, wanted: Wanted, texts: Sequence[Tensor], calibration: Sequence[Tensor]
) -> list[Sensitivity]:
    """Return the rows of every item in every format it may get; `texts` are what is measured.

    In a mixture of experts every format is run, unless a probe is named: there a format that flips
    the choice of an expert costs a jump, which no ratio of errors foretells.
    """
    groups = groups_of(yardstick, wanted)
    rows: list[Sensitivity] = []
    for embedding, names in ((True, wanted.embedding), (False, wanted.formats)):
        mine = [group for group in groups if (group.kind == "embedding") == embedding]
        specs = {name: wanted.spec(name, embedding=embedding) for name in names}
        middle = sorted(names, key=lambda name: specs[name].format.bits)[len(names) // 2]
        probes = [wanted.probe] if wanted.probe in names else [middle]
        if wanted.probe is None and any(
            part.expert is not None for g in groups for part in g.parts
        ):
            probes = list(names)
        what = "embedding" if embedding else f"each of {len(mine)} places"
        wanted.tell(f"{what} alone in {', '.join(probes)}, then in the other formats' errors")
        for row in measure_sensitivity(
            yardstick.module, texts, mine, specs, probes=probes, calibration=calibration
        ):
            rows.append(row)
            if row.measured:
                wanted.tell(f"{row.group.name}: {row.format} alone costs {row.difference.kl:.2e}")
    return rows


def fewest_bytes(groups: Sequence[Group], wanted: Wanted) -> int:
    """Return the bytes of all groups, each in the smallest of its formats."""
    total = 0
    for group in groups:
        inside = group.kind == "embedding"
        names = wanted.embedding if inside else wanted.formats
        specs = [wanted.spec(name, embedding=inside) for name in names]
        shapes = [tuple(part.weight.shape) for part in group.parts]
        total += min(sum(spec.num_bytes(*shape) for shape in shapes) for spec in specs)
    return total


def items_of(rows: Sequence[Sensitivity]) -> list[Item]:
    """Return one item per group, an option per format; costs are mean KL in nats."""
    options: dict[str, list[Option]] = {}
    for row in rows:
        option = Option(row.format, row.num_bytes, max(row.difference.kl, 0.0))
        options.setdefault(row.group.name, []).append(option)
    return [Item(name, tuple(found)) for name, found in options.items()]


def chosen_recipe(
    wanted: Wanted,
    groups: Sequence[Group],
    allocation: Allocation,
    calibration: CalibrationConfig | None,
) -> RecipeConfig:
    """Return the recipe of an allocation: the commonest format, and a rule per other layer."""
    pairs = list(zip(groups, (option.name for option in allocation.options), strict=True))
    inside = [name for group, name in pairs if group.kind != "embedding"]
    # Of equally common ones the first in the order that was asked for.
    commonest = max(wanted.formats, key=inside.count)
    rules = [
        LayerConfig(match=_match(group), **_given(wanted.weights(name, embedding=False)))
        for group, name in pairs
        if group.kind != "embedding" and name != commonest
    ]
    table = [name for group, name in pairs if group.kind == "embedding"]
    return RecipeConfig(
        **_given(wanted.weights(commonest, embedding=False)),
        layers=tuple(rules),
        embedding=wanted.weights(table[0], embedding=True) if table else None,
        calibration=calibration if wanted.method == "gptq" else None,
    )


def _match(group: Group) -> str:
    """Return a glob that matches this group alone; brackets in a name stand for themselves."""
    escaped = group.name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")
    return escaped if group.kind == "linear" else f"{escaped}.*"


def make_recipe(
    yardstick: Yardstick,
    wanted: Wanted,
    calibration: Sequence[Tensor],
    section: CalibrationConfig,
    *,
    tokens: int = 1024,
) -> Allocated:
    """Measure, allocate and measure again.

    `section` is what the recipe says of `calibration`; sensitivities are measured on about `tokens`
    of them. Raises UserError when the target is too small, naming the smallest possible, and when
    the result would be larger than the target.
    """
    wished = groups_of(yardstick, wanted)
    room = budget(yardstick.module, wished, wanted.target_bpw)
    # Before the sensitivities, which take most of the time.
    check_target(yardstick.module, fewest_bytes(wished, wanted), room, wanted.target_bpw)
    texts = some_of(calibration, tokens)
    rows = sensitivities(yardstick, wanted, texts, calibration)
    groups = list({row.group.name: row.group for row in rows}.values())
    items = items_of(rows)
    allocation = allocate(items, room)
    recipe = chosen_recipe(wanted, groups, allocation, section)
    wanted.tell(f"predicted KL {allocation.cost:.4g}; quantizing and measuring the whole")
    candidate, report = yardstick.quantized(kernel_recipe(recipe), calibration=calibration)
    if report.bits_per_weight > wanted.target_bpw:
        raise UserError(
            f"the result takes {report.bits_per_weight:.4f} bits per weight, "
            f"more than {wanted.target_bpw:g}: some scales didn't fit {wanted.scale_dtype}"
        )
    there = Yardstick(yardstick.module, Text("sensitivities", tuple(texts)), yardstick.scopes)
    again = there.measure(candidate, report)
    measured = yardstick.measure(candidate, report)
    return Allocated(recipe, tuple(i.name for i in items), allocation, measured, again)
