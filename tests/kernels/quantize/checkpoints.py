"""Tiny decoders to be written to disk and read again."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

IDS = torch.arange(3, 40)[None]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(config: Any) -> Any:
    """Return a seeded model in evaluation mode whose biases aren't zero: a lost one must show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits of `IDS`."""
    found: torch.Tensor = model(IDS).logits
    return found
