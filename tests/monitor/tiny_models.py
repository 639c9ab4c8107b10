"""Tiny seeded Llamas and their tokenizers: as modules, and as the folder that a check names."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(vocab_size: int, *, scale: float = 1.0, **changes: Any) -> Any:
    """Return a float32 model (seed 0) whose matrices are `scale` times as large as usual.

    At their usual size its logits hardly depend on its layers: with 4 or more they do.
    """
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab_size, **changes})
    built: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return built


def byte_tokenizer() -> Any:
    """Return a tokenizer of one id per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built)


def word_tokenizer(num_words: int) -> Any:
    """Return a tokenizer of the words w0, w1, … with their numbers as ids."""
    vocabulary = {f"w{i}": i for i in range(num_words)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=built, unk_token="w0")


def save_word_model(folder: Path, num_words: int, **changes: Any) -> None:
    """Write a checkpoint that reads words."""
    llama(num_words, tie_word_embeddings=False, **changes).save_pretrained(folder)
    word_tokenizer(num_words).save_pretrained(folder)


def save_byte_model(folder: Path, **changes: Any) -> None:
    """Write a checkpoint that reads bytes."""
    llama(256, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
