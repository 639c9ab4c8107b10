"""Who may read a checkpoint may read its weights."""

import os
import stat
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quantwatch_kernels.quantize.saved import save_whole


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=["all", "group", "owner"])
def test_weights_are_as_readable_as_their_configuration(tmp_path: Path, umask: int) -> None:
    """Catches weights that a service under another user can't open, and ones that too many can."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    before = os.umask(umask)
    try:
        save_whole(model, tmp_path / "m", max_shard_size="2KB")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "m").iterdir()}
    assert modes == {0o666 & ~umask}
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
