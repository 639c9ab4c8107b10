"""A recipe for a model that is never in memory as a whole: quantized part by part.

Rounding to nearest, the MSE search and HQQ look at one matrix alone, so a layer that is read again
can be quantized again, to the same bits. What a recipe adds around the weights (rounded inputs, the
dtype of the residual stream) is structure and is made once. Given up: whatever needs the model's
activations or all of its layers at once, and packed layers.
"""

from collections.abc import Callable, Mapping

from torch import nn

from quantwatch_kernels.quantize.api import QuantReport, checked_selection, model_size
from quantwatch_kernels.quantize.calibrate import quantize_layers
from quantwatch_kernels.quantize.high_precision import keep_statistics_high_
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.stages import after_weights

__all__ = ["Layerwise", "why_not_layerwise"]


def why_not_layerwise(recipe: Recipe) -> str | None:
    """Say why a recipe needs the whole model, None when it doesn't."""
    if recipe.rotation is not None:
        return "a rotation changes all layers and the embedding together"
    if recipe.calibrated:
        return "it is calibrated on the activations of the whole model"
    return None


class Layerwise:
    """One recipe on one model, computed dequantized; parts have values when they are converted.

    Raises ValueError, naming the recipe, for one that needs the whole model or converts nothing.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, names: Mapping[str, str]) -> None:
        if reason := why_not_layerwise(recipe):
            raise ValueError(f"recipe {recipe.name} can't be applied layer by layer: {reason}.")
        self._model, self._recipe, self._names = model, recipe, names
        self._selection = checked_selection(model, recipe, names, "dequantized", None)
        self._notes = [(names.get(p, p), note) for p, note in keep_statistics_high_(model)]
        self._size, self._num_weights = model_size(model)
        self._done: set[str] = set()

    def convert(self, belongs: Callable[[str], bool]) -> None:
        """Quantize the matrices of the modules whose path `belongs`; they have values now.

        Raises ValueError for weights that aren't finite.
        """
        layers = [layer for layer in self._selection.layers if belongs(layer.path)]
        for layer, quantized, notes in quantize_layers(self._model, layers, None):
            if layer.key in self._done:
                continue
            self._done.add(layer.key)
            weight = layer.weight
            self._size += quantized.num_bytes - weight.numel() * weight.element_size()
            self._notes += [(layer.name, note) for note in notes]

    def finish(self, notes: list[tuple[str, str]]) -> QuantReport:
        """Add what goes around the weights and report.

        Raises ValueError when a part was never converted.
        """
        layers = self._selection.layers
        if left := [layer.name for layer in layers if layer.key not in self._done]:
            raise ValueError(f"{', '.join(left)}: never converted, so the model isn't quantized.")
        more = after_weights(self._model, self._recipe, layers, None, self._names)
        return QuantReport(
            converted=tuple(layer.name for layer in layers),
            skipped=self._selection.skipped,
            fallbacks=(),
            size_bytes=self._size,
            bits_per_weight=8 * self._size / self._num_weights,
            notes=(*self._notes, *notes, *more),
        )
