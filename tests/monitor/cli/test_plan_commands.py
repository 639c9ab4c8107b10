"""`kernels plan …` on files of samples: figures by hand, JSON, and one clear line for bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
DATA = Path(__file__).parents[2] / "kernels/planning/data"
KV = ("--layers", "30", "--kv-heads", "3", "--head-dim", "64")
LAYER = (
    "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--head-dim", "128",
    "--intermediate", "14336", "--gb-per-s", "2000", "--gflop-per-s", "300000",
)  # fmt: skip
CEILINGS = ("--gb-per-s", "2000", "--gflop-per-s", "50000")
SHAPES = "batch,length,tokens,seconds\n" + "".join(
    f"{batch},{length},{batch},{seconds}\n"
    for batch, length, seconds in ((1, 16, 0.1), (2, 16, 0.1), (2, 64, 0.1), (1, 64, 0.5))
    for _ in range(6)
)
COLLECTIVES = "collective,devices,bytes,seconds\n" + "".join(
    # 10 µs a step and 200 GB/s: all_reduce of p = 2 has 2 steps and sends n, all_to_all n / 2 in one.
    f"all_reduce,2,{n},{2 * 10e-6 + n / 200e9}\nall_to_all,2,{n},{10e-6 + n / 2 / 200e9}\n"
    for n in (1024, 2**20, 2**28)
)
COPIES = "bytes,seconds\n" + "1000000000,0.1\n" * 3
PLAN = """
compute_s = 0.001
[tiers]
gpu = "10 MB"
host = "1 GiB"
[[links]]
between = ["gpu", "host"]
samples = "pcie.csv"
[[groups]]
name = "layers"
count = 4
size = "4 MB"
moves = 1
"""
PCIE = "bytes,seconds\n" + "".join(f"{n},{1e-5 + n / 1e10}\n" for n in (10**3, 10**6, 10**9))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    def put(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return put


Write = Callable[[str, str], str]


def rows(run: Run, *words: str) -> tuple[list[dict[str, Any]], str]:
    outcome = run("kernels", "plan", *words, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    return document["rows"], "\n".join(document["notes"])


def test_pareto(run: Run, write: Write) -> None:
    """Batch 2 × 16 beats its own latency's others; 64 tokens take four pages, 16 take one."""
    found, notes = rows(run, "pareto", write("s.csv", SHAPES), *KV)
    by = {(row["batch"], row["length"]): row for row in found}
    assert by[2, 16]["kv_bytes"] == 2 * 16 * 23_040
    assert by[2, 64]["kv_bytes"] == 4 * by[2, 16]["kv_bytes"]
    assert by[2, 16]["tokens_per_s"] == pytest.approx(20)
    assert {key: row["front"] for key, row in by.items()} == {
        (1, 16): 0,
        (2, 16): 0,
        (2, 64): 1,
        (1, 64): 1,
    }
    assert [key for key, row in by.items() if row["surely_beaten"]] == [(1, 64), (2, 64)]
    assert "fit" not in notes


def test_pareto_with_a_budget_and_length_as_a_goal(run: Run, write: Write) -> None:
    path = write("s.csv", SHAPES)
    small, notes = rows(run, "pareto", path, *KV, "--budget", "1 MB")
    assert [(row["batch"], row["length"]) for row in small] == [(1, 16), (2, 16)]
    assert "2 of 4 shapes don't fit 1,000,000 bytes" in notes
    longer, _ = rows(run, "pareto", path, *KV, "--length-counts")
    assert {(row["batch"], row["length"]): row["front"] for row in longer}[2, 64] == 0


def test_parallel(run: Run, write: Write) -> None:
    """The links come back from the samples, the costs are those of the model by hand."""
    found, notes = rows(
        run, "parallel", write("c.csv", COLLECTIVES), *LAYER, "--devices", "4", "--tokens", "1,8"
    )
    sends = 2 * (6 * 10e-6 + 2 * 3 / 4 * 8 * 4096 * 2 / 200e9) * 1e6
    assert found[1]["tensor_send_us"] == pytest.approx(sends)
    assert [row["faster"] for row in found] == ["tensor", "tensor"]
    assert "10.00 µs + bytes at 200.000 GB/s (186.265 GiB/s)" in notes


def test_offload(run: Run, write: Write) -> None:
    """Two of four layers fit 10 MB; two moves of 4 MB take 2 · (10 µs + 0.4 ms), beside or after."""
    write("pcie.csv", PCIE)
    path = write("plan.toml", PLAN)
    found, notes = rows(run, "offload", path)
    assert found == [{"group": "layers", "size": 4_000_000, "gpu": 2, "host": 2}]
    assert "A step takes 0.001000 s, moves beside" in notes
    assert "10.000 GB/s (9.313 GiB/s); busy 0.000820 s" in notes
    assert "0.001820 s, moves after" in rows(run, "offload", path, "--no-overlap")[1]


def test_bandwidth(run: Run, write: Write) -> None:
    series = "at_s,bytes,seconds\n" + "".join(f"{i},{9e9 if i > 2 else 1e9},1\n" for i in range(9))
    words = ("bandwidth", write("s.csv", series), "--peak", write("c.csv", COPIES))
    (episode,), notes = rows(run, *words)
    assert (episode["from_s"], episode["to_s"], episode["samples"]) == (3, 8, 6)
    assert episode["mean"] == pytest.approx(0.9)
    assert "10.000 GB/s (9.313 GiB/s)" in notes
    assert rows(run, *words, "--samples", "7")[0] == []


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("ncu_raw.csv", ["compute", "memory", "compute", "latency"]),
        ("ncu_details.csv", ["latency", "memory"]),
        ("torch_trace_gpu.json", ["latency", "latency"]),
    ],
)
def test_roofline(run: Run, name: str, bounds: list[str]) -> None:
    found, notes = rows(run, "roofline", str(DATA / name), *CEILINGS)
    assert [row["bound"] for row in found] == bounds
    assert "Ridge: 25.00" in notes
    assert all(row["shape"] for row in found)
    assert ("a cache served them" in notes) == name.endswith(".json")
    assert ("aten::sort 7.0 µs" in notes) == name.endswith(".json")


def test_markdown_and_a_file(run: Run, write: Write, tmp_path: Path) -> None:
    path = write("s.csv", SHAPES)
    assert "## Batch × length" in run("kernels", "plan", "pareto", path, *KV).out
    out = tmp_path / "table.json"
    assert run("kernels", "plan", "pareto", path, *KV, "--out", str(out)).code == 0
    assert len(json.loads(out.read_text())["rows"]) == 4


BAD: dict[str, tuple[str, dict[str, str], list[str], str]] = {
    "no file": ("pareto", {}, ["gone.csv", *KV], "does not exist"),
    "no column": ("pareto", {"s.csv": "batch,length\n1,2\n"}, ["s.csv", *KV], "no column 'tokens'; it needs batch, length"),
    "no samples": ("pareto", {"s.csv": "batch,length,tokens,seconds\n"}, ["s.csv", *KV], "no samples"),
    "no number": ("pareto", {"s.csv": SHAPES + "1,x,1,1\n"}, ["s.csv", *KV], "line 26: length is 'x', not a whole number of 1 or more"),
    "a short line": ("pareto", {"s.csv": SHAPES + "1,2\n"}, ["s.csv", *KV], "line 26: tokens is missing, it is a whole number"),
    "one run": ("pareto", {"s.csv": "batch,length,tokens,seconds\n1,2,1,0.1\n"}, ["s.csv", *KV], "batch 1, length 2: 1 repeats"),
    "NaN": ("pareto", {"s.csv": SHAPES.replace("0.5", "nan")}, ["s.csv", *KV], "line 20: seconds is 'nan', not a number above 0"),
    "no unit": ("pareto", {"s.csv": SHAPES}, ["s.csv", *KV, "--budget", "8"], "--budget: '8' is no size"),
    "a wrong unit": ("pareto", {"s.csv": SHAPES}, ["s.csv", *KV, "--budget", "8 gb"], "units are B, kB, MB, GB"),
    "nothing fits": ("pareto", {"s.csv": SHAPES}, ["s.csv", *KV, "--budget", "1 kB"], "the smallest needs 368,640"),
    "epsilon": ("pareto", {"s.csv": SHAPES}, ["s.csv", *KV, "--epsilon", "2"], "--epsilon: epsilon must be"),
    "bits": ("pareto", {"s.csv": SHAPES}, ["s.csv", *KV, "--kv-bits", "1"], "2 … 32 bits"),
    "not text": ("pareto", {"s.csv": "\x00"}, ["s.csv", *KV], "no column"),
    "collective": ("parallel", {"s.csv": COLLECTIVES + "gather,2,1,1\n"}, ["s.csv", *LAYER, "--devices", "2"], "'gather'; it is all_reduce or all_to_all"),
    "alone": ("parallel", {"s.csv": COLLECTIVES + "all_reduce,1,1,1\n"}, ["s.csv", *LAYER, "--devices", "2"], "2 devices or more, not 1"),
    "one kind": ("parallel", {"s.csv": "collective,devices,bytes,seconds\nall_reduce,2,1,1\nall_reduce,2,2,1\n"}, ["s.csv", *LAYER, "--devices", "2"], "all_to_all: latency and bandwidth"),
    "devices": ("parallel", {"s.csv": COLLECTIVES}, ["s.csv", *LAYER, "--devices", "3"], "3 devices: 3 devices don't divide kv_heads = 8"),
    "token words": ("parallel", {"s.csv": COLLECTIVES}, ["s.csv", *LAYER, "--devices", "2", "--tokens", "1,x"], "whole numbers with commas"),
    "no ceiling": ("parallel", {"s.csv": COLLECTIVES}, ["s.csv", *LAYER, "--devices", "2", "--gb-per-s", "0"], "bytes_per_s must be positive"),
    "no TOML": ("offload", {"p.toml": "x"}, ["p.toml"], "p.toml: "),
    "unknown key": ("offload", {"p.toml": "speed = 1\n" + PLAN}, ["p.toml"], "unknown key 'speed'"),
    "missing key": ("offload", {"p.toml": PLAN.replace("moves = 1", "")}, ["p.toml"], "moves is missing"),
    "wrong type": ("offload", {"p.toml": PLAN.replace("count = 4", 'count = "4"')}, ["p.toml"], "count is '4', which has the wrong type"),
    "GB without a unit": ("offload", {"p.toml": PLAN.replace("4 MB", "4")}, ["p.toml"], "group layers: '4' is no size"),
    "no samples of a link": ("offload", {"p.toml": PLAN.replace("pcie", "gone")}, ["p.toml"], "gone.csv: No such file"),
    "too large": ("offload", {"p.toml": PLAN.replace("4 MB", "4 TB")}, ["p.toml"], "fit nowhere"),
    "between": ("offload", {"p.toml": PLAN.replace('["gpu", "host"]', '["gpu"]')}, ["p.toml"], "it names two tiers"),
    "peak": ("bandwidth", {"s.csv": "at_s,bytes,seconds\n0,1,1\n", "c.csv": "bytes,seconds\n1,1\n"}, ["s.csv", "--peak", "c.csv"], "c.csv: a peak needs three copies"),
    "beyond": ("bandwidth", {"s.csv": "at_s,bytes,seconds\n0,2e10,1\n", "c.csv": COPIES}, ["s.csv", "--peak", "c.csv"], "s.csv: sample 0 moves 200%"),
    "above": ("bandwidth", {"s.csv": "at_s,bytes,seconds\n0,1,1\n", "c.csv": COPIES}, ["s.csv", "--peak", "c.csv", "--above", "82"], "--above and --samples"),
    "no header": ("roofline", {"k.csv": "==ERROR== no permission\n"}, ["k.csv", *CEILINGS], "k.csv: no header"),
    "no trace": ("roofline", {"k.json": "{}"}, ["k.json", *CEILINGS], "k.json: no JSON with traceEvents"),
    "low ceilings": ("roofline", {"k.json": (DATA / "torch_trace_gpu.json").read_text()}, ["k.json", "--gb-per-s", "1", "--gflop-per-s", "1"], "the ceilings are too low"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    run: Run, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every mistake is exit 2 and one line that names the file, the value and what is allowed."""
    command, files, words, expected = BAD[name]
    write("pcie.csv", PCIE)
    for file, text in files.items():
        write(file, text)
    monkeypatch.chdir(tmp_path)
    outcome = run("kernels", "plan", command, *words)
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert expected in outcome.err
    assert "Traceback" not in outcome.err


def test_bytes_that_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes(b"\xff\xfe\x00")
    outcome = run("kernels", "plan", "pareto", str(tmp_path / "s.csv"), *KV)
    assert (outcome.code, "not UTF-8 text" in outcome.err) == (2, True)


def test_an_error_is_one_json_document(run: Run, write: Write) -> None:
    outcome = run("kernels", "plan", "pareto", write("s.csv", "a\n1\n"), *KV, "--json")
    assert outcome.code == 2
    assert "no column" in json.dumps(json.loads(outcome.out))
