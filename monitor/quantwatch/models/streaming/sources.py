"""From the names and tensors of a checkpoint to those of one decoder layer.

transformers renames what it loads, and for some families converts it (it stacks the experts of
Mixtral, splits fused projections). Its own renamings, conversions and dtypes are used, so that a
layer read alone has the bits it has when the whole model is loaded.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantwatch.models.streaming.mapped import LazyTensor, Room
from quantwatch.models.streaming.slabs import ALIGNMENT


@dataclass(slots=True)
class _Target:
    """One call of a conversion, or a plain copy."""

    converter: Any | None
    sources: list[tuple[str, str, LazyTensor, torch.dtype | None]] = field(default_factory=list)
    """(name in the checkpoint, pattern it matched, tensor, dtype to cast to)."""


class Names:
    """What every tensor of a checkpoint is called in the model."""

    def __init__(self, model: Any, load_config: Any) -> None:
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = load_config.weight_mapping or []
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.state: Mapping[str, Tensor] = model.state_dict()

    def of(self, key: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the converter that is to be used."""
        from transformers.core_model_loading import rename_source_key

        found = rename_source_key(key, self._renamings, self._converters, self._prefix, self.state)
        if found[0] not in self.state and key in self.state:
            found = rename_source_key(key, [], [], self._prefix, self.state)
        return found  # type: ignore[no-any-return]

    def converter(self, pattern: str | None) -> Any | None:
        """Return the converter of a pattern."""
        by_pattern = {p: entry for entry in self._converters for p in entry.source_patterns}
        return None if pattern is None else by_pattern[pattern]


class LayerSource:
    """The tensors of each decoder layer, read again whenever they are asked for."""

    def __init__(self, model: Any, load_config: Any, layers: Sequence[Mapping[str, LazyTensor]]):
        """`layers` are the checkpoint's tensors of each layer, by their names there."""
        self._model = model
        self._quantizer = load_config.hf_quantizer
        names = Names(model, load_config)
        self._layers = [_targets(names, load_config, tensors) for tensors in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def num_bytes(self, index: int) -> int:
        """Return the room that a layer's tensors take, each beginning at a multiple of 64."""
        sources = [s for target in self._layers[index].values() for s in target.sources]
        return sum(tensor.bytes_as(dtype) + 2 * ALIGNMENT for _, _, tensor, dtype in sources)

    def tensors(self, index: int, room: Room) -> dict[str, Tensor]:
        """Read a layer into `room`: name in the model → values.

        Raises ModelError naming a file that changed, ValueError for a conversion that fails.
        """
        found: dict[str, Tensor] = {}
        for name, target in self._layers[index].items():
            if target.converter is None:
                _, _, tensor, dtype = target.sources[0]
                found[name] = tensor.read(room, dtype)
            else:
                found |= self._converted(name, target)
        return found

    def _converted(self, name: str, target: _Target) -> dict[str, Tensor]:
        converter = copy.deepcopy(target.converter)
        assert converter is not None
        for key, pattern, tensor, dtype in target.sources:
            converter.add_tensor(name, key, pattern, _reader(tensor, dtype))
        made = converter.convert(
            name, model=self._model, config=self._model.config, hf_quantizer=self._quantizer
        )
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}


def _reader(tensor: LazyTensor, dtype: torch.dtype | None) -> Any:
    return lambda: tensor[...].to(dtype)


def _targets(
    names: Names, load_config: Any, tensors: Mapping[str, LazyTensor]
) -> dict[str, _Target]:
    from transformers.core_model_loading import dot_natural_key

    targets: dict[str, _Target] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = names.of(key)
        if name not in names.state:  # a weight that the model doesn't use
            continue
        converter = names.converter(pattern)
        target = targets.setdefault(name, _Target(converter))
        dtype = _dtype(load_config, names.state[name], tensors[key], (name, converter))
        target.sources.append((key, pattern or key, tensors[key], dtype))
    return targets


def _dtype(
    load_config: Any, empty: Tensor, tensor: LazyTensor, place: tuple[str, Any]
) -> torch.dtype | None:
    """Return the dtype that transformers casts a stored tensor to, None for none."""
    from transformers.core_model_loading import build_glob_alternation

    name, converter = place
    plan, dtype = load_config.dtype_plan or {}, load_config.dtype
    found = None
    if plan:
        pattern, by_group, _ = build_glob_alternation(list(plan))
        found = pattern.search(name)
    if found is not None:
        dtype = plan[by_group[found.lastgroup]]
    elif empty.dtype != dtype:
        dtype = empty.dtype
    quantizer = load_config.hf_quantizer
    if quantizer is not None:
        dtype = quantizer.get_new_dtype(converter, tensor, dtype)
    return dtype  # type: ignore[no-any-return]
