"""Plant the faults of the field's comparison table into a real model and print what quantwatch
says.

Each fault is a checkpoint folder beside an untouched copy; each line is one `quantwatch compare
--json` in a process of its own, as a user would run it. Prints JSON. Text: the first 8 prompts of
900 characters of --text, each cut to at most 256 tokens (the protocol the published expectations
were measured with).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors.torch import load_file, save_file

from quantwatch.config.schema import VariantConfig
from quantwatch.models.loading import load_variant

CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
HEAD_ROWS = (260, 281, 284)
Weights = dict[str, torch.Tensor]


def untouched(_: Weights, __: dict[str, Any]) -> None:
    """Change nothing."""


def down_proj(weights: Weights, _: dict[str, Any]) -> None:
    weights["model.layers.17.mlp.down_proj.weight"] *= 1.05


def nan_weight(weights: Weights, _: dict[str, Any]) -> None:
    weights["model.layers.12.self_attn.q_proj.weight"][3, 5] = float("nan")


def head_rows(weights: Weights, config: dict[str, Any]) -> None:
    """Rotate three rows of an untied copy of the head, so that every hidden state stays equal."""
    head = weights["model.embed_tokens.weight"].clone()
    head[list(HEAD_ROWS)] = head[[*HEAD_ROWS[1:], HEAD_ROWS[0]]]
    weights["lm_head.weight"] = head
    config["tie_word_embeddings"] = False


def wider_vocabulary(weights: Weights, config: dict[str, Any]) -> None:
    old = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.cat([old, old.new_zeros(64, old.shape[1])])
    config["vocab_size"] += 64


FAULTS: dict[str, Callable[[Weights, dict[str, Any]], None]] = {
    "identical": untouched,
    "down_proj_1.05": down_proj,
    "nan_weight": nan_weight,
    "head_rows": head_rows,
    "wider_vocabulary": wider_vocabulary,
}


def plant(name: str, source: Path, target: Path) -> None:
    """Write a copy of a checkpoint folder with one fault in it."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    FAULTS[name](weights, config)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))


def swap_tokens(source: Path, target: Path) -> None:
    """Swap two entries of the tokenizer's vocabulary and nothing else."""
    shutil.copytree(source, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(t for t, i in vocabulary.items() if i == n) for n in HEAD_ROWS[:2])
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def write_prompts(text: Path, tokenizer: Any, target: Path, count: int) -> None:
    content = text.read_text()
    pieces = [content[900 * i : 900 * (i + 1)] for i in range(count)]
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"][:256] for piece in pieces]
    target.write_text("\n".join(json.dumps({"token_ids": row}) for row in ids))


def compare(reference: Path, candidate: Path, prompts: Path, *options: str) -> dict[str, Any]:
    """Run one comparison and return its exit code, first error line and the main figures."""
    command = [sys.executable, "-m", "quantwatch.cli", "compare", str(reference), str(candidate)]
    command += ["--text", str(prompts), "--json", "--no-store", "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line: dict[str, Any] = {"exit_code": done.returncode}
    document = json.loads(done.stdout)
    if document["status"] != "succeeded":
        errors = [row for row in done.stderr.splitlines() if row.startswith("error")]
        return line | {"error": errors}
    candidate_ = document["candidates"][0]
    wanted = ("verdict", "culprit", "culprit_words", "bit_equal", "first_nonfinite", "leaked_mass")
    figures = ("top1_agreement", "ppl_ratio")
    line |= {key: candidate_.get(key) for key in (*wanted, *figures)}
    line["kl"] = candidate_["logit_kl"]["mean"]
    line["layers_differing"] = [
        row["index"] for row in candidate_["layers"] if row["rel_error"] != 0
    ]
    line["worst_layers"] = sorted(
        candidate_["layers"], key=lambda row: -(row["isolated_error"] or 0)
    )[:3]
    line["alerts"] = sorted({(a["rule"], a["scope"]) for a in document["alerts"]})
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="*", help="names of faults")
    options = parser.parse_args()
    config = VariantConfig(model=options.model)
    loaded = load_variant("reference", config, base_dir=Path(), cache_dir=CACHE)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source, prompts = folder / "reference", folder / "prompts.jsonl"
        loaded.module.save_pretrained(source)
        loaded.tokenizer.save_pretrained(source)
        write_prompts(options.text, loaded.tokenizer, prompts, options.prompts)
        del loaded
        for name in options.only or (*FAULTS, "int4_g64", "swapped_tokens"):
            target = folder / name
            if name == "int4_g64":
                result = compare(source, source, prompts, "--recipe", "int4-g64")
            elif name == "swapped_tokens":
                swap_tokens(source, target)
                result = compare(source, target, prompts)
            else:
                plant(name, source, target)
                result = compare(source, target, prompts)
            shutil.rmtree(target, ignore_errors=True)
            print(json.dumps({"fault": name, **result}), flush=True)


if __name__ == "__main__":
    main()
