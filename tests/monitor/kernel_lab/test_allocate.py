"""A recipe for a number of bits: never over it, better than chance, and what its file says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.kernel_lab.references import byte_text, tied_llama, token_ids
from tests.monitor.tiny_models import byte_tokenizer
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from quantwatch.cli import main
from quantwatch.cli.allocating import on_a_grid
from quantwatch.config.recipe_parts import (
    CalibrationConfig,
    LayerConfig,
    ResidualConfig,
    WeightsConfig,
)
from quantwatch.config.recipes import RecipeConfig, load_recipe
from quantwatch.config.suites import SuiteConfig
from quantwatch.errors import PromptError, UserError
from quantwatch.kernel_lab.allocate import (
    Wanted,
    chosen_recipe,
    fewest_bytes,
    groups_of,
    items_of,
    make_recipe,
    sensitivities,
)
from quantwatch.kernel_lab.calibrating import choose_calibration, some_of
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.recipe_files import recipe_toml, write_recipe
from quantwatch.kernel_lab.targets import budget
from quantwatch.kernel_lab.texts import Text
from quantwatch.models.recipes import kernel_recipe
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.quantize.allocation import (
    Allocation,
    allocate,
    allocate_randomly,
    allocate_uniformly,
)

SECTION = CalibrationConfig(suite=SuiteConfig(name="core-v1"))
FORMATS = ("uint2-g16", "uint3-g16", "uint4-g16", "uint6-g16")
NEAREST = Wanted(5.0, FORMATS, ("uint4-g16", "int8-channel"), method="nearest")


def uneven_llama(**changes: Any) -> Any:
    """Three layers of very different weight: the first matters most."""
    built = tied_llama(num_hidden_layers=3, **changes)
    for name, parameter in built.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(8.0 if ".layers.0." in name else 3.0)
    return built


def ids(count: int, seed: int) -> list[Tensor]:
    return token_ids(count, 32, seed)


@pytest.fixture
def yardstick() -> Yardstick:
    return Yardstick(uneven_llama(), Text("t", tuple(ids(4, 1))), {})


@pytest.mark.parametrize("target", [4.5, 5.0, 6.5])
def test_never_over_the_budget_and_near_it(yardstick: Yardstick, target: float) -> None:
    """Catches bits that leave something out: norms, scales, zeros, the tied table."""
    wanted = replace(NEAREST, target_bpw=target)
    found = make_recipe(yardstick, wanted, ids(6, 2), SECTION, tokens=64)
    assert found.measured.bits_per_weight <= target
    assert found.measured.bits_per_weight > target - 0.1
    assert found.recipe.calibration is None
    assert found.recipe.embedding is not None
    again = yardstick.try_recipe(kernel_recipe(found.recipe))
    assert again == found.measured


def test_the_recipe_is_the_allocation(yardstick: Yardstick) -> None:
    """Catches a rule that reaches another layer, and predicted KL that isn't the sum."""
    found = make_recipe(yardstick, NEAREST, ids(6, 2), SECTION)
    recipe = kernel_recipe(found.recipe)
    for name, option in zip(found.names, found.allocation.options, strict=True):
        embedding = "embed" in name
        spec = recipe.embedding if embedding else recipe.for_layer(name)
        assert spec == NEAREST.spec(option.name, embedding=embedding)
    assert len({option.name for option in found.allocation.options}) > 1
    assert found.additivity == found.again.kl / found.allocation.cost
    assert 0.5 < found.additivity < 2


def test_parts_are_coarser(yardstick: Yardstick) -> None:
    """Catches a rule for a half that reaches the other one, and a half that is left out."""
    found = make_recipe(yardstick, replace(NEAREST, detail="part"), ids(6, 2), SECTION)
    assert len(found.names) == 1 + 2 * 3
    assert found.measured.bits_per_weight <= 5
    recipe = kernel_recipe(found.recipe)
    for name, option in zip(found.names[1:], found.allocation.options[1:], strict=True):
        inside = ("q_proj", "o_proj") if name.endswith("attn") else ("gate_proj", "down_proj")
        for linear in inside:
            spec = recipe.for_layer(f"{name}.{linear}")
            assert spec == NEAREST.spec(option.name, embedding=False)
    assert len({option.name for option in found.allocation.options}) > 1


@pytest.mark.slow
def test_gptq_recipes_are_calibrated(yardstick: Yardstick) -> None:
    """Catches a file without its calibration, and a table that is calibrated on nothing."""
    wanted = replace(NEAREST, method="gptq")
    found = make_recipe(yardstick, wanted, ids(6, 2), SECTION)
    assert found.recipe.calibration == SECTION
    assert found.recipe.method == "gptq"
    assert found.recipe.embedding is not None
    assert found.recipe.embedding.method == "nearest"
    again = yardstick.try_recipe(kernel_recipe(found.recipe), calibration=ids(6, 2))
    assert again == found.measured


def test_experts_get_formats_of_their_own() -> None:
    """Catches rules that reach all experts of a layer or none, and bytes of a stack left out."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        tie_word_embeddings=True,
    )
    model: Any = MixtralForCausalLM(config).eval()
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(6)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj[1].mul_(0.05)
    scopes = {f"model.layers.{n}.mlp": f"layers.{n}.mlp" for n in range(2)}
    yardstick = Yardstick(model, Text("t", tuple(ids(4, 1))), scopes)
    found = make_recipe(yardstick, replace(NEAREST, target_bpw=4.6), ids(6, 2), SECTION)
    assert 4.5 < found.measured.bits_per_weight <= 4.6
    formats = dict(zip(found.names, found.allocation.options, strict=True))
    experts = [formats[f"layers.0.mlp.experts.{e}"].name for e in range(4)]
    assert len(set(experts)) > 1
    assert experts[1] == min(experts)
    _, report = yardstick.quantized(kernel_recipe(found.recipe))
    assert "layers.0.mlp.experts.1.down_proj" in report.converted
    assert report.size_bytes == found.measured.size_bytes


@pytest.mark.slow
def test_better_than_uniform_and_random(yardstick: Yardstick) -> None:
    """Catches costs that are attached to the wrong items: equal bytes, the others' best formats.

    Against 12 random allocations: their mean by a factor, and at least 11 of 12.
    """
    texts = ids(6, 2)
    rows = sensitivities(yardstick, replace(NEAREST, probe="uint3-g16"), texts, texts)
    groups = list({row.group.name: row.group for row in rows}.values())
    items, room = items_of(rows), budget(yardstick.module, groups, 4.6)

    def kl(way: Allocation) -> float:
        assert way.num_bytes <= room
        recipe = chosen_recipe(NEAREST, groups, way, None)
        figures = yardstick.try_recipe(kernel_recipe(recipe))
        assert figures.bits_per_weight <= 4.6
        return figures.kl

    ours = kl(allocate(items, room))
    others = [kl(allocate_randomly(items, room, seed)) for seed in range(12)]
    assert ours < 0.8 * kl(allocate_uniformly(items, room))
    assert ours < 0.7 * sum(others) / len(others)
    assert sum(ours < other for other in others) >= 11


@pytest.mark.parametrize("detail", ["linear", "part"])
def test_too_few_bits_are_refused_before_anything_is_measured(
    yardstick: Yardstick, detail: Any
) -> None:
    """Catches minutes of sensitivities for a target that no format reaches."""
    told: list[str] = []
    wanted = replace(NEAREST, target_bpw=2.0, detail=detail, tell=told.append)
    with pytest.raises(UserError, match="smallest possible is"):
        make_recipe(yardstick, wanted, ids(6, 2), SECTION)
    assert told == []


def test_the_fewest_bytes_are_those_that_are_stored(yardstick: Yardstick) -> None:
    """Catches a size foretold that is not the size measured: zeros, scales and ends of rows."""
    wanted = replace(NEAREST, probe="uint3-g16")
    items = items_of(sensitivities(yardstick, wanted, ids(2, 1), ids(2, 1)))
    groups = groups_of(yardstick, wanted)
    assert fewest_bytes(groups, wanted) == sum(item.smallest for item in items)


@pytest.mark.slow
def test_too_few_bits_name_the_fewest(yardstick: Yardstick) -> None:
    """Catches a budget that is exceeded; and the number that is named must work."""
    with pytest.raises(UserError, match=r"smallest possible is (\d\.\d+)") as caught:
        make_recipe(yardstick, replace(NEAREST, target_bpw=2.0), ids(6, 2), SECTION)
    smallest = float(str(caught.value).rpartition(" ")[2])
    found = make_recipe(yardstick, replace(NEAREST, target_bpw=smallest), ids(6, 2), SECTION)
    assert found.measured.bits_per_weight <= smallest
    with pytest.raises(UserError, match="can't be reached"):
        make_recipe(yardstick, replace(NEAREST, target_bpw=smallest - 0.01), ids(6, 2), SECTION)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no bits": ({"target_bpw": 0.0}, "--target-bpw must be above 0; it is 0"),
    "not a number": ({"target_bpw": math.nan}, "--target-bpw must be above 0; it is nan"),
    "unknown format": ({"formats": ("int9-g64",)}, "--formats: unknown recipe 'int9-g64'"),
    "no format": ({"formats": ()}, "--formats must name one format or more"),
    "twice": (
        {"embedding": ("int8-channel",) * 2},
        "--embedding must name one format or more, each",
    ),
    "probe": ({"probe": "uint5-g64"}, "--probe uint5-g64 is none of the formats uint2-g16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_wishes(name: str) -> None:
    """Catches a mistake that only shows after ten minutes of measuring."""
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        replace(NEAREST, **changes)


def test_weights_and_specs_agree() -> None:
    """Catches sensitivities of another format than the recipe's."""
    for name in ("uint4-g16", "int4-g16", "int8-channel", "int8-tensor"):
        wanted = Wanted(4.0, (name,), ("int8-channel",))
        for embedding in (False, True):
            weights = wanted.weights(name, embedding=embedding)
            calibration = None if embedding else SECTION
            config = RecipeConfig(
                **weights.model_dump(exclude_defaults=True), calibration=calibration
            )
            assert kernel_recipe(config).weights == wanted.spec(name, embedding=embedding)


def test_files_round_trip(tmp_path: Path) -> None:
    """Catches strings that end early, tables in the wrong order, comments that become keys."""
    recipe = RecipeConfig(
        weights="uint4",
        granularity="group",
        group_size=64,
        method="gptq",
        exclude=('a"b\\', "c\x7fd", "ü"),
        layers=(
            LayerConfig(match="layers.0.*"),
            LayerConfig(match="layers.[1]", weights="int8", granularity="channel", clip="mse"),
        ),
        embedding=WeightsConfig(weights="int8", granularity="channel"),
        residual_dtype=(
            ResidualConfig(match="layers.1", dtype="float16"),
            ResidualConfig(match="*", dtype="bfloat16"),
        ),
        calibration=CalibrationConfig(
            suite=SuiteConfig(files=("/a b/ü.txt",), window=512), skip=8, limit=16
        ),
    )
    path = tmp_path / "x.toml"
    write_recipe(path, recipe, ["two\nlines", "weights = 'int2'"])
    assert load_recipe(path) == recipe
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# two", "# lines", "# weights = 'int2'"]
    assert recipe_toml(RecipeConfig(weights="int8", granularity="channel")) == (
        'weights = "int8"\ngranularity = "channel"\n'
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(byte_text(6))
    return path


def test_calibration_is_never_what_is_measured(file: Path, tmp_path: Path) -> None:
    """Catches the measured windows among those of the calibration."""
    tokenizer = byte_tokenizer()
    same = choose_calibration(tokenizer, str(file), file, windows=3, skip=2)
    other = choose_calibration(tokenizer, str(file), None, windows=3, skip=2)
    assert (same.section.skip, same.section.limit, len(same.inputs)) == (2, 3, 3)
    assert (other.section.skip, len(other.inputs)) == (0, 3)
    assert torch.equal(same.inputs[0], other.inputs[2])
    with pytest.raises(PromptError, match="fewer than 7 windows of 512 tokens"):
        choose_calibration(tokenizer, str(file), file, windows=5, skip=2)
    core = choose_calibration(tokenizer, "core-v1", file, windows=1, skip=2)
    rest = choose_calibration(tokenizer, "core-v1", None, windows=1, skip=2)
    assert len(rest.inputs) == len(core.inputs) * 3 // 4
    assert core.section.suite.name == rest.section.suite.name == "core-v1"


@pytest.mark.parametrize("spelling", ["{name}", "d/../{name}", "link.txt", "~/{name}", "{file}"])
def test_the_measured_file_by_any_name(
    spelling: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a comparison of spellings: the windows that are measured would be calibrated on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d").mkdir()
    (tmp_path / "link.txt").symlink_to(file)
    source = spelling.format(name=file.name, file=file)
    for measured in (file, Path(file.name), Path("d/..") / file.name, Path("link.txt")):
        found = choose_calibration(byte_tokenizer(), source, measured, windows=3, skip=2)
        plain = choose_calibration(byte_tokenizer(), str(file), file, windows=3, skip=2)
        assert found.section.skip == 2
        assert all(map(torch.equal, found.inputs, plain.inputs))
        assert found.note.endswith("after its first 2")
        again = load_suite(
            found.section.suite, byte_tokenizer(), base_dir=Path("/"), max_positions=None
        )
        assert len(again.prompts) == 6


def test_a_copy_of_the_measured_file(file: Path, tmp_path: Path) -> None:
    """Catches measured windows that come from a file of another name, in whichever order."""
    text = file.read_text()
    (tmp_path / "copy.txt").write_text(text)
    (tmp_path / "moved.txt").write_text(text[1024:1536] + text[:1024])
    (tmp_path / "rest.txt").write_text(text[1024:])
    for name, words in {"copy.txt": "2 of 3 windows", "moved.txt": "2 of 3 windows"}.items():
        with pytest.raises(PromptError, match=words):
            choose_calibration(byte_tokenizer(), str(tmp_path / name), file, windows=3, skip=2)
    rest = choose_calibration(byte_tokenizer(), str(tmp_path / "rest.txt"), file, windows=3, skip=2)
    assert (rest.section.skip, len(rest.inputs)) == (0, 3)


def test_some_of() -> None:
    """Catches an empty choice, and one that takes the beginning only."""
    texts = ids(10, 0)
    assert [len(some_of(texts, tokens)) for tokens in (1, 64, 96, 1000)] == [1, 2, 4, 10]
    assert some_of(texts, 64)[1] is texts[5]


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    uneven_llama(vocab_size=256, max_position_embeddings=512).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_command(
    checkpoint: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a file that doesn't say what it holds, and a document that differs from it."""
    out = tmp_path / "small.toml"
    words: list[str | Path] = [
        *("kernels", "allocate", checkpoint, "--target-bpw", "5", "--text", file, "--windows", "2"),
        *("--calibrate-on", file, "--calibration-windows", "2", "--method", "nearest"),
        *("--formats", ",".join(FORMATS), "--embedding", "uint4-g16,int8-channel", "--out", out),
    ]
    code, printed, err = run(capsys, *words, "--json")
    assert code == 0, err
    document = json.loads(printed)
    assert document["bits_per_weight"] <= 5
    text = out.read_text()
    assert f"KL {document['kl']:.4g}" in text
    assert f"predicted {document['predicted_kl']:.4g}" in text
    recipe = kernel_recipe(load_recipe(out))
    assert set(document["formats"]) > {"embedding", "layers.0.attention.q_proj"}
    for scope, name in document["formats"].items():
        spec = recipe.embedding if scope == "embedding" else recipe.for_layer(scope)
        assert spec is not None
        assert spec.format.name == name.partition("-")[0]


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "suffix": (("--target-bpw", "5", "--out", "x.json"), "a recipe is a .toml file"),
    "folder": (("--target-bpw", "5", "--out", "/nowhere/x.toml"), "/nowhere"),
    "format": (("--target-bpw", "5", "--out", "x.toml", "--formats", "q4"), "unknown recipe 'q4'"),
    "target": (("--target-bpw", "-1", "--out", "x.toml"), "must be above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_refuses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a refusal that comes after the model has been loaded and measured."""
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[name]
    code, _, err = run(capsys, "kernels", "allocate", "no-such-model", *words)
    assert code == 2, err
    assert message in err


@pytest.mark.parametrize(
    ("bits", "told"),
    [(4.6, True), (8.5, True), (16.0, False), (32.0, False)],
    ids=["q4", "q8", "bfloat16", "float32"],
)
def test_a_model_on_a_grid_is_told(bits: float, told: bool) -> None:
    """Catches figures that are small because the weights go back to where they came from."""
    lines = on_a_grid("smollm2-135m", bits)
    assert bool(lines) == told
    assert all("off-grid" in line and f"{bits:.2f} bits" in line for line in lines)
