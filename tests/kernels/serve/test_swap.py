"""Swapping to host memory and back; watermarks; recompute or swap."""

import errno
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.serve.block_pool import BlockPool, PoolExhaustedError
from quantwatch_kernels.serve.host_tier import HostFile, HostTensors, HostTier, SwapSpaceError
from quantwatch_kernels.serve.preemption import PreemptionCosts, Watermark, choose
from quantwatch_kernels.serve.swap import PageBytes, SwapSpace


def int4_planes(num_blocks: int = 6) -> list[Tensor]:
    """Packed codes, 16-bit scales, 4-bit zeros, and a plane with the values that copies spoil."""
    torch.manual_seed(1)
    odd = torch.randn(num_blocks, 5, dtype=torch.float64)
    odd[:, 0], odd[:, 1], odd[:, 2] = math.nan, -0.0, math.inf
    odd.view(torch.int64)[:, 3] = 0x7FF4_0000_DEAD_BEEF  # a signalling NaN with a payload
    return [
        torch.randint(0, 256, (num_blocks, 2, 4, 8), dtype=torch.uint8),
        torch.randn(num_blocks, 2, 4).to(torch.float16),
        torch.randn(num_blocks, 3).to(torch.bfloat16),
        odd,
    ]


def raw(planes: list[Tensor], block: int) -> list[list[int]]:
    return [plane[block].contiguous().view(torch.uint8).flatten().tolist() for plane in planes]


TIERS: dict[str, Callable[[Path, int, int], HostTier]] = {
    "file": HostFile,
    "tensors": lambda _folder, slots, size: HostTensors(slots, size),
}


@pytest.mark.parametrize("kind", TIERS)
def test_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Catches scales left behind, NaN payloads changed, and pages back in another order."""
    planes = int4_planes()
    pages = PageBytes(planes)
    assert pages.page_bytes == 64 + 16 + 6 + 40
    space = SwapSpace(TIERS[kind](tmp_path, 4, pages.page_bytes), pages)
    pool = BlockPool(6)
    blocks = pool.take(3)[::-1]
    before = [raw(planes, block) for block in blocks]
    swapped = space.swap_out([0, *blocks], pool)
    assert (swapped.num_pages, space.num_free, pool.num_used) == (3, 1, 0)
    for plane in planes:
        plane.fill_(7)
    back = space.swap_in(swapped, pool)
    assert back[0] == 0
    assert [raw(planes, block) for block in back[1:]] == before
    assert space.num_free == 4


@given(data=st.data())
def test_slots_keep_what_was_written(data: st.DataObject) -> None:
    """Catches slots that overlap, at sizes that aren't multiples of the alignment."""
    size, slots = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 4))
    tier = HostTensors(slots, size)
    written = {}
    for slot in data.draw(st.permutations(range(slots))):
        written[slot] = torch.randint(0, 256, (size,), dtype=torch.uint8)
        tier.view(slot).copy_(written[slot])
    assert all(torch.equal(tier.view(slot), value) for slot, value in written.items())


def test_a_shared_page_stays_with_the_others() -> None:
    """Catches a swap that takes a page from under another request."""
    planes = [torch.arange(6).reshape(6, 1)]
    space, pool = SwapSpace(HostTensors(2, 8), PageBytes(planes)), BlockPool(6)
    blocks = pool.take(2)
    pool.share(blocks[:1])
    space.swap_out(blocks, pool)
    assert [pool.ref_cnt(block) for block in blocks] == [1, 0]


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_loses_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches slots or blocks that nobody has after a device or a file refused in the middle."""
    planes = int4_planes()
    pages = PageBytes(planes)
    space, pool = SwapSpace(HostTensors(4, pages.page_bytes), pages), BlockPool(6)
    blocks = pool.take(3)
    before = [raw(planes, block) for block in blocks]
    swapped = None if way == "out" else space.swap_out(blocks, pool)
    room = space.num_free, pool.num_free
    copies, real = iter([True, False]), getattr(pages, "save" if way == "out" else "load")

    def copy(block: int, at: Tensor) -> None:
        if not next(copies):
            raise RuntimeError("the device is gone")
        real(block, at)

    with monkeypatch.context() as patch:
        patch.setattr(pages, "save" if way == "out" else "load", copy)
        with pytest.raises(RuntimeError, match="the device is gone"):
            space.swap_out(blocks, pool) if swapped is None else space.swap_in(swapped, pool)
    assert (space.num_free, pool.num_free) == room
    swapped = swapped or space.swap_out(blocks, pool)
    for plane in planes:
        plane.view(torch.uint8).fill_(7)
    assert [raw(planes, block) for block in space.swap_in(swapped, pool)] == before
    assert (space.num_free, pool.num_free) == (4, 2)


def test_no_room_changes_nothing() -> None:
    """Catches half a request in the host: too few slots, then too few blocks for the way back."""
    planes = [torch.arange(6).reshape(6, 1)]
    space, pool = SwapSpace(HostTensors(2, 8), PageBytes(planes)), BlockPool(6)
    three, two = pool.take(3), pool.take(2)
    with pytest.raises(SwapSpaceError, match="3 pages don't fit into the 2 free slots of 2"):
        space.swap_out(three, pool)
    assert [pool.ref_cnt(block) for block in three] == [1, 1, 1]
    assert space.num_free == 2
    swapped = space.swap_out(two, pool)
    taken = pool.take(1)
    with pytest.raises(PoolExhaustedError, match="2 blocks were asked for and 1 of 6"):
        space.swap_in(swapped, pool)
    pool.free(taken)
    back = space.swap_in(swapped, pool)
    assert planes[0][back].flatten().tolist() == two
    with pytest.raises(ValueError, match="hold no swapped page; was it swapped in already"):
        space.swap_in(swapped, pool)
    with pytest.raises(ValueError, match="hold no swapped page"):
        space.discard(swapped)


def test_a_full_disk_is_an_error_when_the_tier_is_made(tmp_path: Path) -> None:
    """Catches a sparse file, whose full disk would be SIGBUS in the middle of a request."""

    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        SwapSpaceError, match=r"no room for a swap file of 256 bytes \(No space left"
    ):
        HostFile(tmp_path, 2, 100, allocate=full)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_system_refuses_a_file_that_is_too_large(tmp_path: Path) -> None:
    """The same without a fake: a real limit, in a process of its own, which must live on."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 16}, {resource.RLIM_INFINITY}))\n"
        "from quantwatch_kernels.serve.host_tier import HostFile, SwapSpaceError\n"
        "HostFile(Path(sys.argv[1]), 4, 4096).view(3).fill_(1)\n"
        "try: HostFile(Path(sys.argv[1]), 64, 4096)\n"
        "except SwapSpaceError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert "no room for a swap file of 262144 bytes" in done.stdout


def test_a_file_is_allocated_whole_and_leaves_nothing(tmp_path: Path) -> None:
    """Catches a swap file that stays after a crash."""
    asked: list[tuple[int, int]] = []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        asked.append((offset, length))
        os.posix_fallocate(descriptor, offset, length)

    tier = HostFile(tmp_path, 3, 65, allocate=allocate)
    assert asked == [(0, 3 * 128)]
    assert list(tmp_path.iterdir()) == []
    view = tier.view(2)
    view.fill_(9)
    tier.close()
    assert view.tolist() == [9] * 65  # the last view keeps the mapping


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda: HostTensors(0, 8), "at least 1 slot of 1 byte; got 0 of 8"),
        (lambda: HostTensors(2, 0), "got 2 of 0"),
        (lambda: HostTensors(2, 8).view(2), r"slot 2 is none of 0 … 1"),
        (lambda: PageBytes([]), "there are no planes"),
        (lambda: PageBytes([torch.zeros(4, 2), torch.zeros(3, 2)]), r"plane 1 has shape \[3, 2\]"),
        (lambda: PageBytes([torch.zeros(4)]), r"plane 0 has shape \[4\]"),
        (lambda: PageBytes([torch.zeros(4, 6)[:, ::2]]), "plane 0 isn't contiguous"),
        (
            lambda: SwapSpace(HostTensors(2, 7), PageBytes([torch.zeros(4, 2)])),
            "takes 8 bytes and a slot has 7",
        ),
        (
            lambda: SwapSpace(HostTensors(2, 8), PageBytes([torch.zeros(4, 2)])).swap_out(
                [1], BlockPool(4)
            ),
            "block 1 is used by nobody",
        ),
        (lambda: Watermark(0.2, 0.1), "0 ≤ low ≤ high ≤ 1"),
        (lambda: Watermark(0.1, 0.2).blocks_to_free(5, 4), "5 of 4 blocks can't be free"),
        (lambda: PreemptionCosts(0, 0, 1), "bandwidth must be above 0"),
        (lambda: PreemptionCosts(0, 1, math.nan), "seconds_per_token must be finite"),
        (lambda: PreemptionCosts(-1, 1, 1), "latency_s must be finite and at least 0"),
        (
            lambda: choose(
                PreemptionCosts(0, 1, 1), num_pages=-1, page_bytes=1, num_tokens=1, free_slots=1
            ),
            "num_pages must be at least 0",
        ),
    ],
)
def test_bad_input(step: Callable[[], object], message: str) -> None:
    """Catches a tier that can't hold a page, and costs that mean nothing."""
    with pytest.raises(ValueError, match=message):
        step()


@pytest.mark.parametrize(
    ("num_free", "expected"),
    [(100, 0), (10, 0), (9, 11), (0, 20)],
    ids=["all free", "at the low mark", "below it", "nothing free"],
)
def test_room_is_made_up_to_the_high_mark(num_free: int, expected: int) -> None:
    """Catches a single threshold, at which a request would go and come back at every token."""
    assert Watermark(0.1, 0.2).blocks_to_free(num_free, 100) == expected


def test_marks_are_whole_blocks() -> None:
    """Catches 5 % of 7 blocks as none, and 7 % of 100 as 8 (floats make 7.000000000000001)."""
    assert Watermark(0.05, 0.05).blocks_to_free(0, 7) == 1
    assert Watermark(0.07, 0.07).blocks_to_free(0, 100) == 7


@given(num_blocks=st.integers(1, 200), low=st.floats(0, 1), data=st.data())
def test_after_making_room_there_is_room(num_blocks: int, low: float, data: st.DataObject) -> None:
    """A law: what is asked for reaches the low mark, and never exceeds the pool."""
    high = data.draw(st.floats(low, 1))
    free = data.draw(st.integers(0, num_blocks))
    freed = Watermark(low, high).blocks_to_free(free, num_blocks)
    assert free + freed <= num_blocks
    assert free + freed >= low * num_blocks - 1e-6
    assert freed == 0 or free < low * num_blocks


COSTS = PreemptionCosts(0.001, 1e9, 2e-4, 1e-7)


@pytest.mark.parametrize(
    ("num_tokens", "free_slots", "expected"),
    [
        (8, 1000, "recompute"),
        (4096, 1000, "swap"),
        (4096, 255, "recompute"),
        (0, 1000, "recompute"),
    ],
    ids=["short", "long", "long without room", "all of it cached"],
)
def test_short_texts_are_recomputed_and_long_ones_swapped(
    num_tokens: int, free_slots: int, expected: str
) -> None:
    """Catches a choice by length alone, and one that needs slots that aren't there."""
    made = choose(
        COSTS, num_pages=256, page_bytes=4096, num_tokens=num_tokens, free_slots=free_slots
    )
    assert made.how == expected
    assert made.swap_s == pytest.approx(2 * (0.001 + 256 * 4096 / 1e9))
    assert made.recompute_s == pytest.approx(2e-4 * num_tokens + 1e-7 * num_tokens**2)


def test_ties_are_recomputed() -> None:
    """It needs no room."""
    costs = PreemptionCosts(1.0, 1.0, 1.0)
    assert choose(costs, num_pages=1, page_bytes=1, num_tokens=4, free_slots=9).how == "recompute"
