"""What a configuration does to a streamed model: layer by layer, each time one was read."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from quantwatch.config.schema import FaultConfig, RecipeConfig
from quantwatch.errors import ModelError
from quantwatch.models.anatomy import Anatomy
from quantwatch.models.changing import Changes, Figures, as_stored
from quantwatch.models.faults import plant
from quantwatch.models.opening import Opened
from quantwatch.models.quiet import explained
from quantwatch.models.recipes import kernel_recipe, scoped_report, stage_notes
from quantwatch.models.streaming.settling import high_statistics, settle_streamed
from quantwatch.models.streaming.stream import LayerStream
from quantwatch_kernels.quantize.layerwise import Layerwise, why_not_layerwise
from quantwatch_kernels.quantize.selection import scope_names

_NOTE = "streamed: one decoder layer in memory at a time"


def refuse_whole_model(config: RecipeConfig, execution: str) -> None:
    """Raise ModelError naming a recipe that can't be applied layer by layer, and why."""
    with explained("the recipe can't be applied"):
        recipe = kernel_recipe(config)
    reason = why_not_layerwise(recipe)
    if reason is None and execution != "dequantized":
        reason = f'execution = "{execution}" packs the layers of a whole model'
    if reason is not None:
        raise ModelError(
            f"recipe {recipe.name} can't be streamed: {reason}; save the quantized model and "
            "stream that"
        )


def change_streamed(
    opened: Opened, changes: Changes, anatomy: Anatomy, dtype: torch.dtype
) -> Figures:
    """Quantize, then plant faults: outside the layers now, inside whenever a layer was read.

    Raises ModelError as for a resident model. Every layer that is changed is read once for that.
    """
    stream = opened.stream
    assert stream is not None
    planted = _Faults(opened.module, anatomy, stream, changes.faults)
    if changes.recipe is None:
        figures = as_stored(opened, dtype, partial(settle_streamed, stream))
        if changes.faults:
            stream.changes.append(planted.inside)
            stream.visit()
    else:
        figures = _quantized(opened, changes.recipe, anatomy, stream, planted.inside)
    notes = (*figures.notes, *planted.outside(), *planted.notes, _NOTE)
    return replace(figures, notes=notes)


def _quantized(
    opened: Opened,
    config: RecipeConfig,
    anatomy: Anatomy,
    stream: LayerStream,
    then: Callable[[int], None],
) -> Figures:
    module = opened.module
    scopes = {path: str(scope) for path, scope in anatomy.scopes_by_path.items()}
    notes: list[tuple[str, str]] = []
    with explained("the recipe can't be applied"):
        recipe = kernel_recipe(config, anatomy)
        layerwise = Layerwise(module, recipe, scope_names(module, scopes))

        def convert(index: int) -> None:
            notes.extend(high_statistics(stream, index))
            layerwise.convert(lambda path: stream.index_of(path) == index)

        layerwise.convert(lambda path: stream.index_of(path) is None)
        stream.changes += [convert, then]
        stream.visit()
        report = scoped_report(layerwise.finish(notes), scopes)
    return Figures(
        "dequantized",
        report.size_bytes,
        report.bits_per_weight,
        report.skipped,
        stage_notes(report),
    )


class _Faults:
    """The faults of a streamed model."""

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        stream: LayerStream,
        faults: tuple[FaultConfig, ...],
    ) -> None:
        self.notes: dict[str, None] = {}
        """What was planted in layers, in words."""
        self._module, self._anatomy = module, anatomy
        self._outside: list[FaultConfig] = []
        self._inside: dict[int, list[FaultConfig]] = {}
        places = {**anatomy.linears, **anatomy.taps}
        for fault in faults:
            path = {str(scope): path for scope, path in places.items()}.get(fault.scope, "")
            index = stream.index_of(path)
            (self._outside if index is None else self._inside.setdefault(index, [])).append(fault)

    def outside(self) -> tuple[str, ...]:
        """Plant those that are in no layer; return what was done, in words."""
        return plant(self._module, self._anatomy, self._outside)

    def _planted(self, index: int) -> tuple[str, ...]:
        return plant(self._module, self._anatomy, self._inside.get(index, []))

    def inside(self, index: int) -> None:
        """Plant a layer's faults; it has values now."""
        self.notes |= dict.fromkeys(self._planted(index))
