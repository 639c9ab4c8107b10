"""A reference that was recorded: other nights give the same numbers, bit for bit, without it."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quantwatch.capture import measure
from quantwatch.capture.course import Course
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.capture.sketches import LayerSketch, sketch_layers
from quantwatch.capture.stored import sides
from quantwatch.capture.stored.checked import CheckedFile
from quantwatch.capture.stored.manifest import Manifest
from quantwatch.capture.stored.packing import Packed, difference
from quantwatch.capture.stored.parts import file_of
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.capture.stored.sketches import unpack_sketches
from quantwatch.domain import Suite
from quantwatch.models.loaded import LoadedModel

PLAN = CapturePlan(batch_tokens=64, isolated_fraction=0.5, floor_tokens=8, condition_tokens=4)
LENGTHS = [11, 5, 24, 24, 1, 30]


def flat(value: Any) -> Any:
    """Return a value in which equal means equal bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [flat(getattr(value, each.name)) for each in dataclasses.fields(value)]
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return value


@dataclasses.dataclass
class Seen:
    """Everything that a night leaves behind but its timings."""

    sink: Any
    floor: Any
    report: Any
    use: Any = dataclasses.field(compare=False)


def night(
    kit: Any,
    models: dict[str, nn.Module],
    shelf: Shelf | None,
    suite: Suite | None = None,
    plan: CapturePlan = PLAN,
) -> Seen:
    loaded = {
        name: m if isinstance(m, LoadedModel) else kit.load(m, name) for name, m in models.items()
    }
    sink, floor, steps = kit.memory(), kit.memory(), kit.steps()
    suite = suite or kit.suite(LENGTHS)
    report = capture(Subject(loaded, suite, plan, shelf), sink, floor, steps)
    said = dict(report.to_json())
    del said["timings_s"]
    use = said.pop("reference_cache")
    assert steps.total == steps.done
    return Seen(flat(sink.observations), flat(floor.observations), said, use)


@contextmanager
def counting(module: nn.Module) -> Iterator[list[int]]:
    """Count how often the reference's first layer runs."""
    calls: list[int] = []
    layer = next(m for name, m in module.named_modules() if name.endswith("layers.0"))
    handle = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def spoiled(module: Any) -> Any:
    """Return the model with an infinite weight in its second layer."""
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[3, 2] = torch.inf
    return module


REFERENCES: dict[str, Callable[[Any], Any]] = {
    "llama": lambda kit: kit.build("llama"),
    "mixture": lambda kit: kit.build("qwen3-moe"),
    "bfloat16": lambda kit: kit.build("llama").to(torch.bfloat16),
    "not finite": lambda kit: spoiled(kit.build("llama")),
}


@pytest.mark.parametrize("which", REFERENCES)
def test_live_recorded_and_read_nights_are_bit_identical(
    kit: Any, tmp_path: Path, which: str
) -> None:
    """Catches a rounding on the way to the disk, a lost passage, a forgotten router or floor."""
    reference = REFERENCES[which](kit)
    models = {"reference": reference, "one": kit.perturb(reference), "two": kit.perturb(reference)}
    shelf = Shelf(tmp_path / "reference")
    live, recorded = night(kit, models, None), night(kit, models, shelf)
    with counting(reference) as calls:
        read = night(kit, models, shelf)
    assert [n.use["origin"] for n in (live, recorded, read)] == ["live", "recorded", "cache"]
    assert recorded == live
    assert read == live
    assert live.floor
    assert {row[0] for row in live.sink} == {"one", "two"}
    # The audit ran one batch, and what of the noise floor belongs to it: nothing else did.
    assert 1 <= len(calls) <= 2
    assert read.use["audit"]["num_differing"] == 0
    assert read.use["audit"]["num_values"] > 1000
    assert (recorded.use["floor_logit_kl"], read.use["floor_logit_kl"]) == (0.0, 0.0)
    assert not read.use["warnings"]


def test_estimates_come_from_the_sketch_that_was_kept(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sketch that isn't kept, so that every layer is read in full each night."""
    plan = dataclasses.replace(PLAN, lens="estimated", sketch_top=5, sketch_draws=4)
    reference = kit.build("llama")
    models = {"reference": reference, "one": kit.perturb(reference), "two": kit.perturb(reference)}
    shelf = Shelf(tmp_path)
    live = night(kit, models, None, plan=plan)
    recorded = night(kit, models, shelf, plan=plan)
    monkeypatch.setattr(measure, "sketch_layers", lambda *_: pytest.fail("sketched again"))
    read = night(kit, models, shelf, plan=plan)
    assert read.use["origin"] == "cache"
    assert recorded == live
    assert read == live
    metrics = {matrix[0] for row in live.sink for matrix in row[2]}
    assert "lens_kl_estimated" in metrics


def test_a_damaged_sketch_is_made_again(kit: Any, tmp_path: Path) -> None:
    """Catches estimates from a file that isn't what was written."""
    plan = dataclasses.replace(PLAN, lens="estimated", sketch_top=5, sketch_draws=4)
    reference = kit.build("llama")
    models = {"reference": reference, "one": kit.perturb(reference)}
    shelf = Shelf(tmp_path)
    live, _ = night(kit, models, None, plan=plan), night(kit, models, shelf, plan=plan)
    (entry,) = shelf.entries()
    file = sorted(entry.folder.glob("sketch-*"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    read = night(kit, models, shelf, plan=plan)
    assert read == live
    assert "sketch-" in read.use["warnings"][0]
    assert shelf.entries() == []


def test_a_sketch_that_this_machine_would_not_make_is_found(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sketch with a right checksum that other instructions computed, used for good."""
    plan = dataclasses.replace(PLAN, lens="estimated", sketch_top=5, sketch_draws=4)
    reference = kit.build("llama")
    models = {"reference": reference, "one": kit.perturb(reference)}
    shelf = Shelf(tmp_path)
    real = sketch_layers

    def otherwise(*given: Any) -> LayerSketch:
        made = real(*given)
        return dataclasses.replace(
            made, sketch=dataclasses.replace(made.sketch, logits=made.sketch.logits * (1 + 2e-7))
        )

    live = night(kit, models, None, plan=plan)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "sketch_layers", otherwise)
        night(kit, models, shelf, plan=plan)
    read = night(kit, models, shelf, plan=plan)
    assert read == live
    assert read.use["origin"] == "live"
    assert read.use["audit"]["num_differing"] > 0
    assert "is not what this machine computes" in read.use["warnings"][0]
    assert shelf.entries() == []


def test_sketches_of_another_vocabulary_are_noted(kit: Any, tmp_path: Path) -> None:
    """Catches a full lens every night of which nobody hears."""
    plan = dataclasses.replace(PLAN, lens="estimated", sketch_top=5, sketch_draws=4)
    reference = kit.build("llama")
    one = {"reference": reference, "one": kit.perturb(reference)}
    shelf = Shelf(tmp_path)
    night(kit, one, shelf, plan=plan)
    assert night(kit, one, shelf, plan=plan).use["notes"] == []
    known = unpack_sketches
    with pytest.MonkeyPatch.context() as patch:
        wider = lambda packed: {width + 1: each for width, each in known(packed).items()}  # noqa: E731
        patch.setattr(sides, "unpack_sketches", wider)
        read = night(kit, one, shelf, plan=plan)
    assert read == night(kit, one, None, plan=plan)
    assert read.use["notes"] == [
        "estimates of another number of ids than were recorded: sketched anew every night"
    ]


def test_another_set_of_candidates_reads_the_same_entry(kit: Any, tmp_path: Path) -> None:
    """Catches a key with a candidate in it, and numbers that depend on who else was there."""
    reference = kit.build("llama", num_hidden_layers=2)
    one, two = kit.perturb(reference), kit.perturb(reference, seed=2)
    shelf = Shelf(tmp_path)
    night(kit, {"reference": reference, "one": one}, shelf)
    read = night(kit, {"reference": reference, "two": two}, shelf)
    assert read.use["origin"] == "cache"
    assert read == night(kit, {"reference": reference, "two": two}, None)
    assert len(shelf.entries()) == 1


def test_every_part_has_its_turn_to_be_audited(kit: Any, tmp_path: Path) -> None:
    """Catches an audit that looks at the same batch each night, and one that counts as a run."""
    reference = kit.build("llama", num_hidden_layers=2)
    models = {"reference": reference, "one": kit.perturb(reference)}
    shelf = Shelf(tmp_path)
    recorded = night(kit, models, shelf)
    course = Course(kit.suite(LENGTHS), PLAN, 64)
    nights = [night(kit, models, shelf) for _ in range(len(course.batches) + 2)]
    parts = [seen.use["audit"]["part"].split(" ")[0] for seen in nights]
    wanted = [f"batch-{n:05}" for n in range(len(course.batches))] + ["conditions"]
    assert parts == [*wanted, "batch-00000"]
    assert any("isolated" in seen.use["audit"]["part"] for seen in nights)
    assert all(seen == recorded and seen.use["audit"]["num_differing"] == 0 for seen in nights)
    assert [seen.use["uses"] for seen in nights] == list(range(1, len(nights) + 1))


def plant(shelf: Shelf, part: str, name: str, by: float) -> float:
    """Change one stored number and every checksum, as a machine that computes otherwise would."""
    (entry,) = shelf.entries()
    manifest = entry.manifest()
    with manifest.open_file(entry.folder, file_of(part)) as file:
        packed = Packed.read(file)
    tensor = packed[name]
    before = float(tensor.view(-1)[0])
    tensor.view(-1)[0] += by
    data = b"".join(packed.pieces())
    (entry.folder / file_of(part)).write_bytes(data)
    manifest.files[file_of(part)] = (hashlib.sha256(data).hexdigest(), len(data))
    (entry.folder / "manifest.json").write_text(manifest.text())
    return abs(float(tensor.view(-1)[0]) - before)


@pytest.mark.parametrize(
    ("part", "name"),
    [("batch-00000", "tap layers.0"), ("batch-00000", "head input"), ("floor", "0 0 values")],
)
def test_the_audit_finds_one_planted_number(kit: Any, tmp_path: Path, part: str, name: str) -> None:
    """Catches an audit that compares with a tolerance, or that lets a wrong number through."""
    reference = kit.build("llama", num_hidden_layers=2)
    models = {"reference": reference, "one": kit.perturb(reference)}
    shelf, suite = Shelf(tmp_path), kit.suite(LENGTHS)
    live = night(kit, models, shelf)
    course = Course(suite, PLAN, 64)
    if part == "floor":
        number = next(n for n, b in enumerate(course.batches) if course.has_floor(b))
        part = f"floor-{number:05}"
        for _ in range(number):
            night(kit, models, shelf)
    away = plant(shelf, part, name, 1e-3)
    found = night(kit, models, shelf)
    assert found.use["origin"] == "live"
    assert found == live
    (warning,) = found.use["warnings"]
    assert "1 of " in warning
    assert name in warning
    assert found.use["audit"]["largest"] == pytest.approx(away)
    if name == "head input":
        assert found.use["floor_logit_kl"] > 0
    assert not shelf.entries()
    again = night(kit, models, shelf)
    assert (again.use["origin"], again.use["warnings"]) == ("recorded", [])


def test_a_run_that_ends_early_leaves_nothing(kit: Any, tmp_path: Path) -> None:
    """Catches half an entry that the next night takes for a whole one."""
    reference = kit.build("llama", num_hidden_layers=2)
    loaded = {"reference": kit.load(reference), "one": kit.load(kit.perturb(reference))}
    steps = kit.steps(interrupt_after=60)
    subject = Subject(loaded, kit.suite(LENGTHS), PLAN, Shelf(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        capture(subject, kit.memory(), kit.memory(), steps)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.0, -0.0], [torch.nan, torch.inf]]),
        torch.randn(6, 4).t(),
        torch.randn(5, 3, dtype=torch.float64),
        torch.randn(3, 2).to(torch.bfloat16),
        torch.randn(2, 2).to(torch.float16),
        torch.tensor([True, False]),
        torch.arange(7),
        torch.empty(0, 3),
    ],
    ids=["special", "transposed", "double", "bfloat16", "half", "bool", "int64", "empty"],
)
def test_packs_come_back_bit_for_bit(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Catches a dtype, a sign of zero or strides that get lost: sums of strided rows may differ."""
    packed = Packed(structure={"a": [1, "é"]})
    packed.add("first", tensor)
    packed.add("again", tensor)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(packed.pieces()))
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    with CheckedFile(path, sha, path.stat().st_size) as file:
        back = Packed.read(file)
    assert list(load_file(path)) == ["first"], "anybody can read such a file"
    assert load_file(path)["first"].shape == tensor.shape
    found = back["again"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    if tensor.numel():
        assert found.stride() == tensor.stride()
        assert found.data_ptr() % 64 == 0
    assert found is back["first"]
    assert back.structure == packed.structure
    assert difference(packed, back).num_differing == 0
    assert bytes(found.contiguous().view(torch.uint8).numpy()) == bytes(
        tensor.contiguous().view(torch.uint8).numpy()
    )


def test_a_shared_tensor_is_written_once(kit: Any, tmp_path: Path) -> None:
    """Catches isolated batches that take twice the room: a layer's input is the last one's output."""
    reference = kit.build("llama", num_hidden_layers=2)
    shelf = Shelf(tmp_path)
    night(kit, {"reference": reference, "one": kit.perturb(reference)}, shelf)
    (entry,) = shelf.entries()
    course = Course(kit.suite(LENGTHS), PLAN, 64)
    number = next(n for n, batch in enumerate(course.batches) if batch.isolated)
    name = f"batch-{number:05}.safetensors"
    with Manifest.read(entry.folder).open_file(entry.folder, name) as file:
        packed = Packed.read(file)
    assert packed.aliases["input 0 of layers.1"] == "tap layers.0"
    assert packed.aliases["output of layers.1"] == "tap layers.1"
