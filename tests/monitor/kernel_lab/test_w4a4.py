"""The table of activations in low bits: its recipes, its bars, and the whole of it when tiny."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantwatch.kernel_lab.measure import Figures
from quantwatch.kernel_lab.tables import peers, w4a4
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_markdown
from quantwatch_kernels.quantize.hadamard import hadamard_base
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, PerTensor
from quantwatch_kernels.quantize.rotation import rotate_

TRIALS = w4a4.trials()
NAMES = [trial.name for trial in TRIALS]


def llama(hidden: int, inner: int, heads: tuple[int, int], layers: int = 1) -> Any:
    """A seeded model whose weights are large enough for its logits to differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(4)
    return model.eval()


@pytest.fixture
def request_(tmp_path: Path) -> TableRequest:
    """Two layers over bytes, and a text of 19 windows of which 2 are measured."""
    folder = tmp_path / "model"
    llama(64, 128, (4, 2), layers=2).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (i * i) % 23) for i in range(512 * 19)))
    return TableRequest(tmp_path, str(folder), text, windows=2, quick=True)


def figures(kl: float, ppl_reference: float = peers.PEERS_PPL) -> Figures:
    values: dict[str, Any] = {field.name: 1 for field in dataclasses.fields(Figures)}
    return Figures(**{**values, "kl": kl, "ppl_reference": ppl_reference})


def column(table: Table, name: str) -> list[Any]:
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in table.rows]


@pytest.mark.parametrize("trial", TRIALS, ids=NAMES)
def test_a_row_is_what_its_name_says(trial: w4a4.Trial) -> None:
    """Catches a recipe under another's name, by the bits, the scales and the help it claims."""
    recipe, spec = trial.recipe, trial.recipe.activations
    assert spec is not None
    assert trial.name[:4] == f"W{recipe.weights.format.bits}A{spec.format.bits}"
    scales = {"per tensor": PerTensor(), "per token": PerChannel()}
    scales |= {f"groups of {size}": PerGroup(size) for size in (32, 64)}
    assert [spec.granularity] == [kind for name, kind in scales.items() if name in trial.name]
    assert spec.static == ("static" in trial.name)
    assert (recipe.smooth is not None) == ("Smooth" in trial.name)
    assert (recipe.weights.method == "gptq") == ("GPTQ" in trial.name)
    rotation = recipe.rotation
    assert (rotation is not None) == ("Hadamard" in trial.name or "blocks" in trial.name)
    if rotation is not None:
        assert rotation.residual
        assert rotation.values
        assert rotation.down
        assert rotation.block == (
            int(trial.name.split("blocks of ")[1][:2]) if "blocks" in trial.name else None
        )


def test_the_bars_are_the_issues() -> None:
    """Catches a bar on a recipe that was to be compared only, and one that is missing."""
    eight = {t.name for t in TRIALS if t.reach == 0.02}
    assert eight == {"W8A8 per token, SmoothQuant", "W8A8 per token, Hadamard"}
    four = {t.name for t in TRIALS if t.reach == 0.35}
    assert four == {t.name for t in TRIALS if t.name.startswith("W4A4") and t.recipe.rotation}
    assert {t.reach for t in TRIALS} == {None, 0.02, 0.35}


@pytest.mark.parametrize(
    ("kl", "model", "ppl", "reached"),
    [
        (0.35, "smollm2-135m", 24.498, True),
        (0.3501, "smollm2-135m", 24.498, False),
        (math.nan, "smollm2-135m", 24.498, False),
        (0.1, "smollm2-135m", 24.52, None),
        (0.1, "smollm2-360m", 24.498, None),
    ],
    ids=["at the bar", "above it", "broken", "another text", "another model"],
)
def test_reached_only_on_the_peers_protocol(
    kl: float, model: str, ppl: float, reached: bool | None
) -> None:
    """Catches a bar that is held against another text or model, and a broken row that counts."""
    measured = figures(kl, ppl)
    comparable = peers.is_peers(TableRequest(Path(), model), measured)
    row = w4a4._row(TRIALS[-1], measured, 4.5, comparable)
    assert row[-1] is reached
    assert row[-2] == (None if reached is None else 0.35)
    assert w4a4._row(TRIALS[0], measured, 4.5, comparable)[-2:] == (None, None)


@pytest.mark.parametrize(("order", "base"), [(576, 36), (1536, 12)])
def test_widths_of_the_real_model(order: int, base: int) -> None:
    """Catches a width whose Hadamard matrix can't be built: 36 · 16 and 12 · 128."""
    assert hadamard_base(order) == base


@pytest.mark.parametrize("block", [None, 64, 32])
def test_rotations_leave_a_model_of_the_real_widths(block: int | None) -> None:
    """Catches rows that measure the rotation, not the rounding: three heads share a value head."""
    rotations = {t.recipe.rotation for t in TRIALS if t.recipe.rotation is not None}
    (rotation,) = [r for r in rotations if r.block == block]
    model = llama(576, 1536, (9, 3))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits.double()
        rotate_(model, rotation)
        after = model(ids).logits.double()
    assert float((after - before).norm() / before.norm()) < 1e-5


@pytest.mark.slow
def test_the_table(request_: TableRequest) -> None:
    """Catches rows that don't run, bits that count the head, and bars of another protocol."""
    table = w4a4.build(request_)
    assert column(table, "recipe") == [trial.name for trial in TRIALS if trial.quick]
    kls = column(table, "kl")
    assert all(math.isfinite(kl) and kl > 0 for kl in kls)
    assert kls[2] > kls[0]
    assert column(table, "weights") == ["int8-channel", "int8-channel", "uint4-g64"]
    assert column(table, "activations") == ["uint8 per token", "uint8 per token", "uint4 per g64"]
    # Per layer 64 · 64 · 2 (q, o) + 32 · 64 · 2 (k, v) + 64 · 128 · 3 weights; a scale per row.
    rows, weights = 64 * 2 + 32 * 2 + 128 * 2 + 64, 64 * 64 * 3 + 64 * 128 * 3
    assert column(table, "layer_bits")[0] == pytest.approx(8 + 16 * rows / weights)
    # Embedding, norms and two buffers of rotary frequencies in float32 beside them.
    others = 256 * 64 + 64 * 5
    whole = (2 * (8 * weights + 16 * rows) + 32 * (others + 16)) / (2 * weights + others)
    assert column(table, "bits_per_weight")[0] == pytest.approx(whole)
    assert {*column(table, "reach"), *column(table, "reached")} == {None}
    assert "something else, so they aren't shown" in to_markdown(table)


@pytest.mark.slow
@pytest.mark.parametrize("with_text", [False, True], ids=["core-v1", "text"])
def test_every_row_runs(
    request_: TableRequest, monkeypatch: pytest.MonkeyPatch, with_text: bool
) -> None:
    """Catches a recipe that is refused, or calibrated on what is measured."""
    seen: list[list[list[int]]] = []
    measure = w4a4._measure

    def noted(measured: Any, recipe: Any, texts: Any) -> Any:
        taken = {tuple(window.flatten().tolist()) for window in measured.text.windows}
        assert not [ids for ids in texts if tuple(ids.flatten().tolist()) in taken]
        seen.append([list(ids.shape) for ids in texts])
        return measure(measured, recipe, texts[:2])

    monkeypatch.setattr(w4a4, "_measure", noted)
    # A quarter of core-v1 is much to measure: the short table is enough there.
    request = request_ if with_text else dataclasses.replace(request_, text=None)
    table = w4a4.build(dataclasses.replace(request, quick=not with_text))
    assert column(table, "recipe") == [t.name for t in TRIALS if with_text or t.quick]
    assert all(math.isfinite(kl) for kl in column(table, "kl"))
    if with_text:
        assert seen == [[[1, 512]] * 8] * len(NAMES)
