"""`quantwatch kernels` as it is called: exit codes, what is stored, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.kernel_lab.references import tied_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from quantwatch.cli import main
from quantwatch.kernel_lab import conformance
from quantwatch.kernel_lab.tables import registry
from quantwatch.kernel_lab.tables.model import Column, Table, TableRequest
from quantwatch.store import kernels
from quantwatch.store.session import open_database
from quantwatch_kernels.compare.tap import ISOLATED
from quantwatch_kernels.conformance.case import reference_case
from quantwatch_kernels.registry import Op


class Outcome:
    """A command's exit code and what it said."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        self.code = ended.value.code
        self.out, self.err = capfd.readouterr()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'q.db'}"


def test_a_passing_operator(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a grid that isn't stored, or a table that counts another way than the rows."""
    done = Outcome(
        capfd, "--database", url, "kernels", "test", "--op", ISOLATED.name, "--quick", "--json"
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["operator"], row["backend"], row["failed"]) for row in rows] == [
        (ISOLATED.name, "aten", 0),
        (ISOLATED.name, "reference", 0),
    ]
    database = open_database(url)
    [batch] = kernels.list_batches(database, "test")
    cases = kernels.cases_of(database, batch.id)
    database.close()
    assert batch.num_passed == len(cases) == sum(row["passed"] for row in rows)
    assert {case.status for case in cases} == {"passed"}
    assert batch.environment["cpu"]["threads"] == 1


def test_a_failing_operator(
    url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a failed case that exits with 0, isn't stored, or isn't named."""
    op: Op[[Tensor], Tensor] = Op("halver")
    op.register("wrong")(lambda x: x / 2 + 1e-3)
    op.register("reference")(lambda x: x.double() / 2)
    case = reference_case(op, lambda ask: (ask.randn(3, 4),), lambda _b, _d: 2e-3, ((3, 4),))
    monkeypatch.setattr(conformance, "all_cases", lambda: (case,))
    done = Outcome(capfd, "--database", url, "kernels", "test")
    assert done.code == 1
    assert "failed: --op halver --case '/wrong/3x4/float32/contiguous': wrong is off by" in done.err
    database = open_database(url)
    [batch] = kernels.list_batches(database, "test")
    database.close()
    assert batch.num_failed > 0


def test_one_case_by_its_name(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a name that repeats another case, and a lone case that stands for its operator."""
    words = ["--database", url, "kernels", "test", "--op", ISOLATED.name, "--json", "--case"]
    done = Outcome(capfd, *words, "/aten/7x33/bfloat16/strided")
    unknown = Outcome(capfd, *words, "/aten/7x34/bfloat16/strided")

    assert unknown.code == 2
    assert "VARIANT/BACKEND/SHAPE/DTYPE/LAYOUT" in unknown.err
    assert done.code == 0, done.err
    [row] = json.loads(done.out)["rows"]
    assert (row["backend"], row["passed"]) == ("aten", 1)
    assert not Path("q.db").exists()


def test_an_unknown_operator(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches an empty grid that looks like a passed one."""
    done = Outcome(capfd, "--database", url, "kernels", "test", "--op", "int9_linear")
    assert done.code == 2
    assert "int8_linear" in done.err
    assert not Path("q.db").exists()


def test_tables_are_listed_and_written(
    url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches options that don't reach the table, and a folder that is missed after an hour."""
    asked: list[TableRequest] = []

    def build(_name: str, request: TableRequest) -> Table:
        asked.append(request)
        return Table("T", (Column("a", "A", ".1f"),), ((1.25,),))

    listed = Outcome(capfd, "kernels", "table")
    assert [line.split()[0] for line in listed.out.splitlines()] == list(registry.TABLES)
    monkeypatch.setattr(registry, "build", build)
    text = tmp_path / "text.txt"
    text.write_text("words")
    out = tmp_path / "t.md"
    done = Outcome(
        capfd, "kernels", "table", "ladder", "--text", str(text), "--windows", "3", "--seed", "7",
        "--quick", "--out", str(out),
    )  # fmt: skip
    assert done.code == 0
    assert out.read_text().endswith("| 1.2 |\n")
    request = asked[0]
    assert (request.text, request.windows, request.seed, request.quick) == (text, 3, 7, True)
    missing = Outcome(capfd, "kernels", "table", "ladder", "--out", "nowhere/t.md")
    assert missing.code == 2
    assert len(asked) == 1


def test_off_grid_writes_a_checkpoint(
    url: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a checkpoint that computes something else once it is loaded again."""
    model = tied_llama()
    model.save_pretrained(tmp_path / "m")

    class Loaded:
        module, tokenizer = model, None

    from quantwatch.kernel_lab import references

    class Nothing:
        def save_pretrained(self, folder: Path) -> None:
            """There is no tokenizer."""

    Loaded.tokenizer = Nothing()  # type: ignore[assignment]
    monkeypatch.setattr(references, "load_reference", lambda *_a, **_k: Loaded)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
    done = Outcome(capfd, "kernels", "off-grid", "m", "--out", "off", "--seed", "3")
    assert done.code == 0, done.err
    assert "2 layers rescaled, seed 3" in done.out
    again = AutoModelForCausalLM.from_pretrained("off").eval()
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, before, atol=1e-5)
    original = AutoModelForCausalLM.from_pretrained("m")
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(again.get_parameter(name), original.get_parameter(name))
    assert Outcome(capfd, "kernels", "off-grid", "m", "--out", "off").code == 2


class Saved:
    """A part of a model that can be saved."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "half").write_text("half")
        if self.error is not None:
            raise self.error


UNSAVED: dict[str, tuple[Any, Any, str]] = {
    "no tokenizer": (Saved(), None, "m: it has no tokenizer, which a checkpoint needs"),
    "another tokenizer": (Saved(), object(), "its tokenizer, a object, can't be saved"),
    "another module": (torch.nn.Linear(1, 1), Saved(), "its model, a Linear, can't be saved"),
    "full disk": (Saved(), Saved(OSError(28, "No space left")), "out can't be written: [Errno 28]"),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_off_grid_writes_all_or_nothing(
    url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches half a checkpoint that the second try says exists already."""
    from quantwatch.kernel_lab import references

    class Loaded:
        module, tokenizer, words = UNSAVED[name]

    monkeypatch.setattr(references, "load_reference", lambda *_a, **_k: Loaded)
    monkeypatch.setattr(references, "take_off_grid_", lambda *_a: 2)
    before = sorted(Path().iterdir())
    for _ in range(2):
        done = Outcome(capfd, "kernels", "off-grid", "m", "--out", "out")
        assert (done.code, Loaded.words in done.err) == (2, True), done.err
        assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("device", ["banana", "cuda:99", ""])
def test_a_device_that_is_not_there(
    url: str, capfd: pytest.CaptureFixture[str], device: str
) -> None:
    """Catches an internal error (exit 3) for a device that this machine lacks."""
    done = Outcome(
        capfd, "--database", url, "kernels", "test", "--op", ISOLATED.name, "--device", device
    )
    assert done.code == 2, done.err
    assert f"device {device!r} does not exist; this machine has cpu" in done.err
    assert not Path("q.db").exists()


@pytest.mark.parametrize(
    "name",
    sorted(name for name, e in registry.TABLES.items() if e.takes_model and e.rescales),
)
def test_a_table_of_a_model_that_can_not_be_rescaled(
    url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches an internal error (exit 3) for a model that a table can't be made of."""
    from quantwatch.kernel_lab import references

    config = GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=4)

    class Loaded:
        module, tokenizer = GPT2LMHeadModel(config), None

    monkeypatch.setattr(references, "load_variant", lambda *_a, **_k: Loaded)
    done = Outcome(capfd, "kernels", "table", name, "--model", "m", "--quick")
    assert done.code == 2, done.err
    assert "m: GPT2LMHeadModel has no decoder layer" in done.err
