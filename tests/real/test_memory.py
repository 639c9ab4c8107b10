"""Memory must not grow with the number of prompts: measured in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import quantwatch

torch.set_num_threads(1)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=512)
torch.manual_seed(0)
reference, candidate = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
candidate.load_state_dict(reference.state_dict())
with torch.no_grad():
    candidate.model.layers[2].mlp.down_proj.weight *= 1.01
ids = torch.randint(0, 512, (int(sys.argv[1]), 64), generator=torch.Generator().manual_seed(0))
run = quantwatch.compare(reference, candidate, ids)
assert run.num_prompts == len(ids) and run.candidates[0].culprit.scope == "layers.2.mlp.down_proj"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kilobytes(prompts: int, folder: Path) -> int:
    command = [sys.executable, "-c", SCRIPT, str(prompts)]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_thousand_prompts_take_the_memory_of_a_hundred(tmp_path: Path) -> None:
    """Catches anything kept per token in memory until the end."""
    few, many = peak_kilobytes(100, tmp_path), peak_kilobytes(1000, tmp_path)
    assert many <= 1.10 * few, (few, many)
