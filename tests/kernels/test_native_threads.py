"""Compiled code that shares its work among threads: torch's own, or the calling one alone."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import quantwatch_kernels.compare
from quantwatch_kernels import native
from quantwatch_kernels.native import library, why_not_built

HEADER = Path(quantwatch_kernels.compare.__file__).parent / "spread.h"
CODE = """
#include "spread.h"

#include <chrono>
#include <thread>

extern "C" void count(int64_t rows, int64_t threads, int64_t* times) {
  spread(rows, threads, [=](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) times[r] += 1;
  });
}

// How many of as many parts were under way at once, waiting for each other for so long.
extern "C" int64_t meet(int64_t threads, double seconds) {
  std::atomic<int64_t> there{0}, most{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  spread(threads, threads, [&](int64_t, int64_t) {
    ++there;
    while (there < threads && most < threads && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    for (int64_t now = there, seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
    }
    --there;
  });
  return most;
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Side by side: a library is built anew for the headers beside its source.
    folder = tmp_path_factory.mktemp("spread")
    shutil.copy(HEADER, folder)
    (folder / "count.cpp").write_text(CODE)
    if reason := why_not_built(folder / "count.cpp"):
        pytest.skip(reason)
    return folder / "count.cpp"


@pytest.fixture(params=["torch's threads", "one thread"])
def built(source: Path, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    found = library(source)
    found.count.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    found.meet.argtypes = [ctypes.c_int64, ctypes.c_double]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if native._team() is None:
        pytest.skip("this torch's threads are not OpenMP's as g++ knows them")
    found.spread_on(ctypes.c_void_p(native._team() if request.param == "torch's threads" else None))
    yield found
    found.spread_on(ctypes.c_void_p(native._team()))
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [-1, 0, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 63, 1000])
def test_every_row_is_done_once(built: ctypes.CDLL, rows: int, threads: int) -> None:
    """Catches a part that two threads do, one that nobody does, and a team of none."""
    times = np.zeros(rows, np.int64)
    built.count(rows, threads, times.ctypes.data)
    assert times.tolist() == [1] * rows


@pytest.mark.parametrize("built", ["torch's threads"], indirect=True)
def test_two_threads_work_at_once_and_are_torchs(built: ctypes.CDLL) -> None:
    """Catches work that is done in turns, and threads beside those that torch keeps waiting."""
    torch.ones(400, 400) @ torch.ones(400, 400)
    torch.ones(1_000_000).exp()
    before = set(os.listdir("/proc/self/task"))
    assert built.meet(2, 30.0) == 2
    assert set(os.listdir("/proc/self/task")) <= before
    assert built.meet(3, 0.2) == 2  # and no more than torch has


LIMITED = """
import ctypes, sys
from pathlib import Path
import numpy as np
import torch
from quantwatch_kernels import native
torch.set_num_threads(4)
found = native.library(Path(sys.argv[1]))
found.count.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
found.meet.argtypes = [ctypes.c_int64, ctypes.c_double]
times = np.zeros(1000, np.int64)
found.count(1000, 4, times.ctypes.data)
print(times.tolist() == [1] * 1000, found.meet(4, 0.2))
"""


@pytest.mark.slow
def test_a_smaller_team_than_was_asked_for_does_it_all(source: Path) -> None:
    """Catches parts of threads that OpenMP's limit withheld: numbers from memory nobody wrote."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(source)],
        env={**os.environ, "OMP_THREAD_LIMIT": "1"},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "1"]
