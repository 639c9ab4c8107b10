"""A small mixture of experts that has learned something: routers and experts that aren't random.

2 layers, width 64, 6 experts of which 2 are used, over bytes (vocabulary 256), trained on given
texts: a Qwen2-MoE with a shared expert and its gate, a Mixtral, both with the usual load-balancing
loss, or a DeepSeek-V3 in 3 groups, balanced as that model is: after each step the bias of an expert
with less than the mean load rises by 0.01, that of one with more falls. It is far from a good
language model; it is one whose experts have different jobs, which is what a table of sensitivities
needs. Seeded: the same torch on the same machine trains the same weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

__all__ = ["Family", "TinyMoE", "train_tiny_moe"]

Family = Literal["qwen2_moe", "mixtral", "deepseek_v3"]

_LENGTH = 96
_BATCH = 12
_RATE = 4e-3
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
_SIZES: dict[Family, dict[str, Any]] = {
    "qwen2_moe": {
        **{"num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 48},
        **{"shared_expert_intermediate_size": 48, "intermediate_size": 96},
        **{"decoder_sparse_step": 1, "norm_topk_prob": True},
        **_BALANCED,
    },
    "mixtral": {
        **{"num_key_value_heads": 2, "num_local_experts": 6, "intermediate_size": 48},
        **_BALANCED,
    },
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3, "topk_group": 2},
        **{"moe_intermediate_size": 48, "intermediate_size": 96, "n_shared_experts": 1},
        **{"first_k_dense_replace": 0, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        **{"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    },
}
_BIAS_STEP = 0.01
_EVERY = 5
"""Of the texts, every fifth is never trained on."""


@dataclass(frozen=True, slots=True)
class TinyMoE:
    """The trained model in evaluation mode, its losses in nats per byte, and held-out text."""

    model: nn.Module
    first_loss: float
    last_loss: float
    held_out: Tensor
    """Bytes as int64 [n]."""

    def windows(self, count: int, length: int = _LENGTH) -> list[Tensor]:
        """Return `count` windows [1, length] of held-out text.

        Raises ValueError if there aren't as many.
        """
        if count * length > len(self.held_out):
            raise ValueError(f"{len(self.held_out)} held-out bytes are no {count} × {length}.")
        return list(self.held_out[: count * length].view(count, 1, length))


def train_tiny_moe(
    texts: Sequence[str], *, steps: int = 300, seed: int = 0, family: Family = "qwen2_moe"
) -> TinyMoE:
    """Train on the bytes of four fifths of the texts; about 20 s on one core for 300 steps.

    Raises ValueError for too little text or no steps.
    """
    data = _bytes([text for number, text in enumerate(texts) if number % _EVERY])
    if len(data) <= _LENGTH or steps < 1:
        raise ValueError(f"{len(data)} bytes of text and {steps} steps are too few to train on.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family)
        losses = _train(model, data, steps, torch.Generator().manual_seed(seed))
    model.eval().requires_grad_(False)
    tail = max(1, steps // 10)
    return TinyMoE(model, losses[0], sum(losses[-tail:]) / tail, _bytes(texts[::_EVERY]))


def _bytes(texts: Sequence[str]) -> Tensor:
    joined = bytearray("\n\n".join(texts).encode())
    return torch.frombuffer(joined, dtype=torch.uint8).long() if joined else torch.empty(0).long()


def _model(family: Family) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        num_experts_per_tok=2,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        **_SIZES[family],
    )
    return AutoModelForCausalLM.from_config(config).train()


def _train(model: Any, data: Tensor, steps: int, generator: Generator) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps + 1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - _LENGTH, (_BATCH,), generator=generator)
        ids = torch.stack([data[start : start + _LENGTH] for start in starts.tolist()])
        with _balancing(model):
            loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    return losses


@contextmanager
def _balancing(model: nn.Module) -> Iterator[None]:
    """Move the biases of routers that have some towards equal loads, after what runs inside."""
    gates: list[Any] = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    counts: dict[int, Tensor] = {}

    def count(gate: Any, _: object, output: tuple[Tensor, ...]) -> None:
        counts[id(gate)] = torch.bincount(output[2].flatten(), minlength=gate.num_experts).float()

    hooks = [gate.register_forward_hook(count) for gate in gates]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for gate in gates:
        loads = counts[id(gate)]
        gate.e_score_correction_bias += _BIAS_STEP * torch.sign(loads.mean() - loads)
