"""The ladder's recipe files, and the table made of them."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.kernel_lab.references import tied_llama
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import quantwatch
from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.config.recipes import load_recipe
from quantwatch.errors import PromptError, UserError
from quantwatch.kernel_lab.calibrating import of_section
from quantwatch.kernel_lab.measure import Figures
from quantwatch.kernel_lab.tables import ladder
from quantwatch.kernel_lab.tables.model import TableRequest, to_markdown
from quantwatch.kernel_lab.texts import measured_text
from quantwatch.models.anatomy import resolve
from quantwatch.models.recipes import kernel_recipe
from quantwatch.pipeline.calibration import calibration_reader
from quantwatch_kernels.quantize.api import model_size, quantize_
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.quantize.selection import scope_names, select

FOLDER = Path(__file__).parents[3] / "recipes" / "ladder"
SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def bits_per_weight(config: LlamaConfig, recipe: Recipe, device: str) -> float:
    """From shapes alone: what is converted as its spec counts it, the rest as it is."""
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    scopes = {path: str(scope) for path, scope in resolve(model).scopes_by_path.items()}
    layers = select(model, recipe, scope_names(model, scopes)).layers
    size, count = model_size(model)
    for layer in layers:
        weight = layer.weight
        size += layer.spec.num_bytes(*weight.shape) - weight.numel() * weight.element_size()
    return 8 * size / count


def test_one_recipe_file_per_bar() -> None:
    """Catches a row of the ladder without a recipe, and a recipe without a bar."""
    assert {rung.budget for rung in ladder.rungs(FOLDER)} == set(ladder.BARS)
    budgets = [rung.budget for rung in ladder.rungs(FOLDER)]
    assert budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_stays_within_its_bits(path: Path) -> None:
    """Catches a format, a group size or a rule that takes more than the file's name allows.

    And one that leaves more than a tenth of a bit unused, which the next format would have needed.
    """
    budget = float(path.stem.removeprefix("bpw-"))
    bits = bits_per_weight(SMOLLM2_135M, kernel_recipe(load_recipe(path)), "meta")
    assert budget - 0.15 < bits <= budget


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_rule_matches_a_layer(path: Path) -> None:
    """Catches a glob with a slip, whose layers would silently keep the common format."""
    recipe = kernel_recipe(load_recipe(path))
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(SMOLLM2_135M)
    scopes = {path: str(scope) for path, scope in resolve(model).scopes_by_path.items()}
    names = scope_names(model, scopes)
    for rule in recipe.layers:
        alone = dataclasses.replace(recipe, layers=(rule,))
        matched = [
            la
            for la in select(model, alone, names).layers
            if la.spec is rule.weights and la.name != "embedding"
        ]
        assert matched, rule.match


def test_counting_by_shapes_is_the_reports_count() -> None:
    """Catches a budget that is checked in other units than the report's."""
    model = tied_llama()
    recipe = Recipe.named("uint5-g16")
    recipe = dataclasses.replace(recipe, embedding=Recipe.named("int8-channel").weights)
    report = quantize_(model, recipe)
    assert bits_per_weight(model.config, recipe, "meta") == report.bits_per_weight
    assert bits_per_weight(model.config, recipe, "cpu") == report.bits_per_weight


def test_recipes_of_a_wheel_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that only works in a clone."""
    package = tmp_path / "lib" / "quantwatch"
    package.mkdir(parents=True)
    monkeypatch.setattr(quantwatch, "__file__", str(package / "__init__.py"))
    with pytest.raises(UserError, match="no recipes"):
        ladder.recipes_folder()
    (package / "_recipes" / "ladder").mkdir(parents=True)
    assert ladder.recipes_folder() == package / "_recipes"


@pytest.mark.parametrize("name", ["bpw-six.toml", "w4.toml", "4.0.toml"])
def test_a_file_without_a_budget_is_refused(tmp_path: Path, name: str) -> None:
    """Catches a recipe that is measured against nothing."""
    (tmp_path / name).write_text('weights = "int8"\ngranularity = "channel"\n')
    with pytest.raises(UserError, match=r"bpw-BITS\.toml"):
        ladder.rungs(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """Catches a table without rows that looks like a success."""
    with pytest.raises(UserError, match="holds no recipe"):
        ladder.rungs(tmp_path)


@pytest.mark.parametrize(
    ("bits", "kl", "reached"),
    [
        (6.17, 0.020, True),
        (6.1701, 0.019, False),
        (6.16, 0.0201, False),
        (6.16, math.nan, False),
    ],
)
def test_reached_needs_both(bits: float, kl: float, reached: bool) -> None:
    """Catches a recipe over its budget, or one that broke, that counts as reached."""
    figures = Figures(
        kl=kl, kl_se=0.0, kl_p99=0.0, kl_max=0.0, same_top1=1.0, ppl=1.0, ppl_reference=1.0,
        accuracy=1.0, accuracy_reference=1.0, bits_per_weight=bits, size_bytes=1, num_tokens=1,
        num_nonfinite=0,
    )  # fmt: skip
    rung = ladder.Rung("bpw-6.17", 6.17, Recipe.named("int8-channel"))
    assert ladder._row(rung, figures, ladder.BARS[6.17])[-1] is reached
    assert ladder._row(rung, figures, None)[-1] is None


@pytest.mark.slow
def test_the_table(
    tiny_request: TableRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rows in another order than the files', and bars of another model's protocol."""
    # The shipped recipes name layers that a tiny model lacks.
    (tmp_path / "ladder").mkdir()
    for name, weights in (("4", "int4"), ("6.17", "int6"), ("8.5", "int8")):
        text = RUNG.replace("int4", weights)
        (tmp_path / "ladder" / f"bpw-{name}.toml").write_text(text)
    monkeypatch.setattr(ladder, "recipes_folder", lambda: tmp_path)
    table = ladder.build(tiny_request)
    cells = [dict(zip([c.name for c in table.columns], row, strict=True)) for row in table.rows]
    assert [cell["budget"] for cell in cells] == [8.5, 4.0]
    kls: list[Any] = [cell["kl"] for cell in cells]
    assert 0 <= kls[0] < kls[1]
    assert all(math.isfinite(kl) for kl in kls)
    assert {(cell["peer"], cell["reach"], cell["reached"]) for cell in cells} == {(None,) * 3}
    assert "something else, so they aren't shown" in to_markdown(table)


def ids_of(texts: Any) -> list[list[int]]:
    return [text.flatten().tolist() for text in texts]


SECTIONS: dict[str, dict[str, Any]] = {
    "all of core-v1": {"suite": {"name": "core-v1"}, "limit": 1000},
    "some of it": {"suite": {"name": "core-v1"}, "skip": 3, "limit": 20},
    "a suite with a limit": {"suite": {"name": "core-v1", "limit": 9}, "skip": 2},
    "a file": {"suite": {"files": ["text.txt"], "window": 512}, "skip": 1, "limit": 4},
}


@pytest.mark.parametrize("with_text", [False, True], ids=["core-v1", "text"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_is_read_as_a_check_reads_it(
    tiny_request: TableRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    with_text: bool,
) -> None:
    """Catches a figure that the recipe file doesn't give in a check, or a leak of what is measured."""
    monkeypatch.chdir(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_request.model)
    measured = measured_text(tokenizer, tiny_request.text if with_text else None, windows=2)
    section = CalibrationConfig.model_validate(SECTIONS[name])
    model: Any = torch.nn.Linear(1, 1)
    check = ids_of(calibration_reader(tmp_path)(section, model, tokenizer).ids)
    found = of_section(section, tokenizer, measured)
    taken = ids_of(measured.windows)
    assert ids_of(found.inputs) == [ids for ids in check if ids not in taken]
    fewer = len(found.inputs) < len(check)
    assert fewer == ("are measured" in found.note) == (with_text == (name == "a file"))


def test_a_section_of_which_nothing_is_left(tiny_request: TableRequest) -> None:
    """Catches a recipe calibrated on nothing, and a choice that is passed over."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_request.model)
    measured = measured_text(tokenizer, tiny_request.text, windows=2)
    suite = {"files": [str(tiny_request.text)], "window": 512}
    section = CalibrationConfig.model_validate({"suite": suite, "limit": 2})
    with pytest.raises(PromptError, match=r"all 2 prompts of text\.txt are measured"):
        of_section(section, tokenizer, measured)
    drawn = CalibrationConfig.model_validate({"suite": suite, "limit": 2, "selection": "random"})
    with pytest.raises(PromptError, match="selection = 'random' is done by checks"):
        of_section(drawn, tokenizer, measured)


RUNG = """
weights = "int4"
granularity = "channel"
method = "gptq"
[calibration]
suite = { name = "core-v1" }
skip = 5
limit = 6
"""


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("with_text", [False, True], ids=["core-v1", "text"])
def test_rows_are_calibrated_as_their_files_say(
    tiny_request: TableRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_text: bool,
    quick: bool,
) -> None:
    """Catches a table that ignores the file's own section."""
    request = dataclasses.replace(tiny_request, quick=quick)
    request = request if with_text else dataclasses.replace(request, text=None)
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "bpw-8.5.toml").write_text(RUNG)
    (tmp_path / "ladder" / "bpw-4.toml").write_text(RUNG.replace("limit = 6", "limit = 2"))
    monkeypatch.setattr(ladder, "recipes_folder", lambda: tmp_path)
    seen: list[int] = []

    def measure(_measured: Any, _recipe: Any, texts: Any) -> Figures:
        seen.append(len(texts))
        zeros = {field.name: 1 for field in dataclasses.fields(Figures)}
        return Figures(**zeros)

    monkeypatch.setattr(ladder, "_measure", measure)
    table = ladder.build(request)
    names = [row[1] for row in table.rows]
    # Of prompts 5 … 10 number 8 is measured where core-v1 is.
    own = ["core-v1: 6 prompts", "core-v1: 2 prompts"]
    less = ["core-v1: 5 prompts of 6, the others are measured", "core-v1: 2 prompts"]
    later = ["later windows"] * 2
    assert names == ((later if quick else later + own) if with_text else less)
    assert seen == (([16, 16] if quick else [16, 16, 6, 2]) if with_text else [5, 2])
