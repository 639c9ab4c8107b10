"""Mixtures of experts for tests: their routing by hand in float64, and a byte tokenizer."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast


def gates(model: Any) -> dict[str, Any]:
    """Layer → router module."""
    layers = enumerate(model.model.layers)
    return {
        f"layers.{n}": gate for n, layer in layers if (gate := getattr(layer.mlp, "gate", None))
    }


def by_hand(gate: Any, x: Tensor) -> Any:
    """Return the weights of all experts [T, E] in float64, 0 where not chosen.

    By the papers' rules: DeepSeek-V3's with 2 groups of the best, or a softmax.
    """
    z, k = x.double() @ gate.weight.double().T, gate.top_k
    if hasattr(gate, "e_score_correction_bias"):
        scores = 1 / (1 + torch.exp(-z))
        choice = scores + gate.e_score_correction_bias.double()
        worth = choice.view(len(z), gate.num_group, -1).sort(-1).values[..., -2:].sum(-1)
        far = worth < worth.sort(-1).values[:, -gate.topk_group, None]
        size = z.shape[1] // gate.num_group
        choice[far.repeat_interleave(size, 1)] = -torch.inf
        weights = scores * (choice >= choice.sort(-1).values[:, -k, None])
        return gate.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
    weights = z.exp() / z.exp().sum(-1, keepdim=True)
    weights = weights * (z >= z.sort(-1).values[:, -k, None])
    norm = getattr(gate, "norm_topk_prob", True)
    return weights / weights.sum(-1, keepdim=True) if norm else weights


@torch.no_grad()
def routed(model: Any, sequences: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """Layer → weights [T, E] of every sequence, each run alone and without quantwatch."""
    seen: dict[str, list[Any]] = {name: [] for name in gates(model)}

    def note(name: str, gate: Any, args: tuple[Tensor, ...]) -> None:
        seen[name].append(by_hand(gate, args[0].reshape(-1, args[0].shape[-1])))

    hooks = [g.register_forward_pre_hook(partial(note, name)) for name, g in gates(model).items()]
    for ids in sequences:
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return seen


def save_bytes(model: Any, folder: Path) -> None:
    """Write a checkpoint whose tokens are bytes, each with its own number."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    letters = {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(hidden)}
    built = Tokenizer(models.BPE(letters, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(folder)
