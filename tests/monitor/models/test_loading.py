"""What each kind of source becomes once it is loaded."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwatch.errors import ModelError
from quantwatch.models.loading import from_module


def test_folder_keeps_every_weight_and_is_ready(make_folder: Any, load: Any) -> None:
    """Catches a dtype cast, a module left in training mode, or a cache that is still on."""
    folder = make_folder()
    model = load(folder, name="ref")
    stored = load_file(folder / "model.safetensors")
    state = model.module.state_dict()
    assert set(stored) == set(state)
    assert all(torch.equal(state[name], value) for name, value in stored.items())
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert model.module.config.use_cache is False
    assert (model.variant.execution, model.variant.name) == ("float32", "ref")
    assert (model.dtype, model.max_positions, model.num_tokens) == (torch.float32, 128, 262)
    assert model.device == torch.device("cpu")


def test_sizes_count_every_weight_once(make_folder: Any, load: Any) -> None:
    """Catches double counting of tied weights and a wrong element size."""
    plain = load(make_folder("plain"))
    tied = load(make_folder("tied", tie_word_embeddings=True))
    half = load(make_folder("half"), dtype="bfloat16")
    layer = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
    weights = 2 * 300 * 32 + 2 * layer + 32
    assert plain.variant.size_bytes == 4 * weights
    assert tied.variant.size_bytes == 4 * (weights - 300 * 32)
    assert half.variant.size_bytes == 2 * weights
    bits = [model.variant.bits_per_weight for model in (plain, tied, half)]
    assert bits == [32, 32, 16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_reaches_the_logits(dtype: str, make_folder: Any, load: Any) -> None:
    """Catches transformers' dtype="auto" taking over."""
    model = load(make_folder(), dtype=dtype)
    logits = model.module(torch.arange(5)[None]).logits
    assert logits.dtype == model.dtype == getattr(torch, dtype)
    assert model.variant.execution == dtype


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementation_is_passed_on(attention: str, make_folder: Any, load: Any) -> None:
    """Catches the setting being dropped on the way to transformers."""
    assert load(make_folder(), attention=attention).module.config._attn_implementation == attention


def test_relative_paths_start_at_the_configuration(make_folder: Any, load: Any) -> None:
    """Catches paths taken relative to the current directory."""
    make_folder("models/mine")
    assert load("models/mine").variant.source["resolved"].endswith("models/mine")


def test_sharded_and_bin_checkpoints_load_the_same(
    make_llama: Any, tmp_path: Path, load: Any
) -> None:
    """Catches a checkpoint layout that only the loader or only the digest knows."""
    model = make_llama()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    ids = torch.arange(9)[None]
    wanted = model(ids).logits
    for name in ("sharded", "bin"):
        assert torch.equal(load(tmp_path / name).module(ids).logits, wanted)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_own_model_code_runs_only_when_allowed(
    make_folder: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches code of a stranger being run, a question on the terminal, or code left out of the
    digest."""
    # transformers copies the code there; not into the user's cache.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "code")
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    with pytest.raises(ModelError, match="brings its own model code: set allow_code = true"):
        load(folder)
    allowed = load(folder, allow_code=True)
    assert type(allowed.module).__name__ == "Own"
    (folder / "own.py").write_text(OWN_CODE + "\n# changed\n")
    before, after = allowed.variant.fingerprint, load(folder, allow_code=True).variant.fingerprint
    assert before.config_sha != after.config_sha


def test_missing_tokenizer_is_a_note(make_folder: Any, load: Any) -> None:
    """Catches an error, or an empty tokenizer made up by transformers."""
    model = load(make_folder(tokenizer=None))
    assert model.tokenizer is None
    assert model.num_tokens == 300
    assert "has no tokenizer" in model.variant.notes


def test_tokenizer_wider_than_the_model_is_cut_and_noted(
    make_folder: Any, make_tokenizer: Any, load: Any
) -> None:
    """Catches ids that the embedding doesn't have."""
    folder = make_folder(tokenizer=lambda: make_tokenizer(extra=40))
    model = load(folder)
    assert model.num_tokens == 300
    assert any("302 ids" in note for note in model.variant.notes)


def test_unused_weights_are_noted(make_folder: Any, load: Any) -> None:
    """Catches a checkpoint of another model being loaded without a word."""
    folder = make_folder()
    file = folder / "model.safetensors"
    save_file({**load_file(file), "extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    notes = load(folder).variant.notes
    assert "1 weights of the checkpoint are not used: extra.weight" in notes


def test_loading_leaves_the_terminal_and_the_loggers_alone(
    make_folder: Any, load: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches progress bars on stderr, and silence that outlives the loading."""
    from transformers.utils import logging as transformers_logging

    folder = make_folder()
    capfd.readouterr()
    before = transformers_logging.get_verbosity()
    load(folder)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == before
    assert transformers_logging.is_progress_bar_enabled()


def test_module_in_hand_is_taken_as_it_is(make_llama: Any, make_tokenizer: Any) -> None:
    """Catches a cast, a copy, or training mode left on, for quantwatch.compare()."""
    module = make_llama().to(torch.bfloat16).train()
    model = from_module("mine", module, make_tokenizer())
    assert model.module is module
    assert not module.training
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert (model.dtype, model.num_tokens) == (torch.bfloat16, 262)
    assert model.variant.execution == "bfloat16"
    assert model.variant.source["kind"] == "module"
    assert model.variant.fingerprint.weights_sha
