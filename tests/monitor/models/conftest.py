"""Tiny models, tokenizers and checkpoints, built from nothing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant

torch.set_num_threads(1)

Build = Callable[..., Path]
Load = Callable[..., LoadedModel]
VOCABULARY = 300


def _tokenizer(swap: tuple[str, str] | None = None, extra: int = 0) -> PreTrainedTokenizerFast:
    """256 bytes and merges for " the", " a", … on top; `swap` exchanges the ids of two entries."""
    pieces = sorted(ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("i", "n"), ("in", "g")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    if swap is not None:
        left, right = swap
        vocabulary[left], vocabulary[right] = vocabulary[right], vocabulary[left]
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_tokens([f"<extra_{index}>" for index in range(extra)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return _tokenizer


@pytest.fixture
def make_folder(tmp_path: Path) -> Build:
    """Save a tiny Llama (seed 0) as a model folder; keywords go to its configuration."""

    def build(name: str = "tiny", tokenizer: Any = _tokenizer, seed: int = 0, **kw: Any) -> Path:
        folder = tmp_path / name
        tiny_llama(seed, **kw).save_pretrained(folder)
        if tokenizer is not None:
            tokenizer().save_pretrained(folder)
        # Older than the clock's step, so that digests may be remembered.
        for path in folder.iterdir():
            os.utime(path, (1_000_000_000, 1_000_000_000))
        return folder

    return build


def tiny_llama(seed: int = 0, **kw: Any) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **kw})).eval()


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a variant given as keywords; the cache lies in tmp_path/cache."""

    def run(model: Path | str | None = None, name: str = "m", **kw: Any) -> LoadedModel:
        if model is not None:
            kw["model"] = str(model)
        config = VariantConfig(**kw)
        return load_variant(name, config, base_dir=tmp_path, cache_dir=tmp_path / "cache")

    return run


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def make_gguf(tmp_path: Path) -> Build:
    """Write a tiny Llama as GGUF, matrices in Q8_0 or in the float type that is asked for."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    def build(name: str = "tiny.gguf", kind: str = "Q8_0", seed: int = 0) -> Path:
        model, path = tiny_llama(seed), tmp_path / name
        writer = GGUFWriter(path, "llama")
        _describe(writer, model.config)
        ggml = GGMLQuantizationType[kind]
        for own, tensor in model.state_dict().items():
            values = tensor.numpy().astype(np.float32)
            packed = quantize(values, ggml) if tensor.ndim == 2 else values
            writer.add_tensor(_gguf_name(own), packed, raw_dtype=ggml if tensor.ndim == 2 else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.utime(path, (1_000_000_000 + seed, 1_000_000_000 + seed))
        return path

    return build


def _describe(writer: Any, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)


def _gguf_name(own: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if own in fixed:
        return fixed[own]
    _, _, index, rest = own.split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
