"""A tiny model and its prompts, for runs from models to verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(96)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and sixteen prompts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(WORDS)}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=64, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder / "tiny")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    whole.save_pretrained(folder / "tiny")
    texts = [" ".join(WORDS[(i * 5) % 70 : (i * 5) % 70 + 6 + i]) for i in range(16)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder
