"""What a model's attention gets: queries, keys and values of every layer on one text."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantwatch_kernels.serve.attend_through import attend_through_, register, restored
from quantwatch_kernels.serve.kv_attention import Score

_NAME = "quantwatch_recorded"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One layer's, after rotary embeddings: queries [1, Hq, T, D], keys, values [1, Hkv, T, D]."""

    layer: int
    text: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    """Bool or added, [1, 1, T, T]; None: causal."""
    score: Score

    def exact(self) -> Tensor:
        """Return the attention's output in float64, [1, Hq, T, D]."""
        groups = self.text[0].shape[1] // self.text[1].shape[1]
        q, k, v = (x.double() for x in self.text)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.score.of(q @ k.mT, q.shape[-1])
        mask = self.mask
        if mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if mask.dtype != torch.bool:
            scores = scores + mask.double()
            mask = mask > torch.finfo(mask.dtype).min
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@dataclass(slots=True)
class _Record:
    layers: frozenset[int]
    found: list[AttentionInputs] = field(default_factory=list)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    record: _Record = getattr(module, f"_{_NAME}")
    score = Score(kwargs.get("scaling"), kwargs.get("softcap"))
    inputs = AttentionInputs(module.layer_idx, (query, key, value), mask, score)
    if module.layer_idx in record.layers:
        record.found.append(inputs)
    return inputs.exact().to(query.dtype).transpose(1, 2).contiguous(), None


register(_NAME, _attention)


def attention_inputs(
    model: nn.Module, ids: Tensor, layers: frozenset[int]
) -> list[AttentionInputs]:
    """Run the model on one text [1, T] and return what those layers' attention got.

    Raises ValueError for a model whose attention can't be replaced, or a layer it doesn't have.
    """
    record = _Record(layers)
    with restored(model, _NAME), torch.inference_mode():
        attend_through_(model, _NAME, record)
        model(ids, use_cache=False)
    missing = layers - {each.layer for each in record.found}
    if missing:
        raise ValueError(f"the model has no attention in layers {sorted(missing)}.")
    return record.found
