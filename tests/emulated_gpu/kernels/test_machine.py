"""The machine by small kernels: values, divergence, barriers, and what PTX orders."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

import torch

from tests.emulated_gpu.kernels.compiled import Prepared
from tests.emulated_gpu.kernels.machine import Machine, MachineError, Options
from tests.emulated_gpu.kernels.parse import parse
from tests.emulated_gpu.kernels.test_parse import module

pytestmark = pytest.mark.interpreter
PLACE = """
	mov.u32 	%r1, %tid.x;
	ld.param.b64 	%rd1, [one_param_0];
	mad.wide.u32 	%rd2, %r1, 4, %rd1;
"""


def run(
    body: str,
    memory: torch.Tensor,
    *,
    grid: int = 1,
    num_warps: int = 1,
    ranks: int = 1,
    seed: int = 0,
) -> list[str]:
    """Findings after ``body`` has run on every rank, over memory that all of them have."""
    ptx = module(PLACE + body).replace(".reqntid 32", f".reqntid {32 * num_warps}")
    kernel = parse(ptx)
    machine = Machine(ranks, Options(seed=seed, stuck_after=10_000))
    size = memory.numel() * memory.element_size()
    machine.add_memory(memory.data_ptr(), size, -1, machine.new_cells(size))
    machine.begin(grid * ranks)
    for rank in range(ranks):
        given = Prepared(kernel, 1024, grid, num_warps, [memory.data_ptr(), rank], [])
        machine.launch(given, rank, [])
    try:
        machine.run()
        return [f"{each.kind}: {each.first} / {each.second}" for each in machine.findings()]
    finally:
        machine.close()


def words(size: int = 128) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


OPERATIONS: Sequence[tuple[str, int, int, int]] = [
    ("add.s32 %r4, %r2, %r3;", 2**31 - 1, 1, -(2**31)),
    ("mul.hi.s32 %r4, %r2, %r3;", -5, 7, -1),
    ("mul.hi.u16 %rs2, %rs1, 5462; cvt.u32.u16 %r4, %rs2;", 7 * 12 + 11, 0, 7),
    ("mov.b32 %r5, 12; mad.wide.u16 %r4, %rs1, 3, %r5;", 100, 0, 312),
    ("add.s16x2 %r4, %r2, %r3;", 0x7FFF_FFFF, 0x0001_0002, -(1 << 31) + 1),
    ("shf.r.wrap.b32 %r4, %r2, %r3, 3;", 0x80, 1, 0x20000010),
    ("shf.l.wrap.b32 %r4, %r2, %r3, 35;", -1, 1, 15),
    ("shl.b32 %r4, %r2, %r3;", 1, 32, 0),
    ("shr.s32 %r4, %r2, %r3;", -8, 40, -1),
    ("div.s32 %r4, %r2, %r3;", -7, 2, -3),
    ("rem.s32 %r4, %r2, %r3;", -7, 2, -1),
    ("bfe.s32 %r4, %r2, 4, 4;", 0x80, 0, -8),
    ("prmt.b32 %r4, %r2, %r3, 0x5410;", 0x1111AAAA, 0x2222BBBB, -0x44445556),
    ("shf.l.wrap.b32 %r4, %r2, %r3, 40;", 0x12345678, 0x1ABBCCDD, -0x443322EE),
    ("min.u32 %r4, %r2, %r3;", -1, 3, 3),
    ("max.relu.s32 %r4, %r2, %r3;", -7, -3, 0),
    ("cvt.s32.s8 %r4, %r2;", 0xFF, 0, -1),
    ("popc.b32 %r4, %r2;", 0xF0F, 0, 8),
    ("shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;", 9, 0, 9),
    ("redux.sync.add.s32 %r4, %r2, -1;", 2, 0, 64),
    ("vote.sync.ballot.b32 %r4, %p1, -1;", 0, 0, -1),
    ("match.any.sync.b32 %r4, %r2, -1;", 5, 0, -1),
]


@pytest.mark.parametrize(("operation", "a", "b", "expected"), OPERATIONS)
def test_operations(operation: str, a: int, b: int, expected: int) -> None:
    memory = words(32)
    given = f"setp.eq.s32 %p1, 1, 1; mov.b32 %r2, {a}; mov.b32 %r3, {b}; cvt.u16.u32 %rs1, %r2;"
    body = f"{given} {operation} st.global.b32 [%rd2], %r4; ret;"
    assert not run(body, memory)
    assert memory.tolist() == [expected] * 32


def test_lanes_part_and_meet_again() -> None:
    """Lane n goes round n + 1 times; then all are together for a sum."""
    memory = words(32)
    body = """
	mov.b32 %r2, 0;
$L__BB0_1:
	add.s32 %r2, %r2, 1;
	setp.le.s32 %p1, %r2, %r1;
	@%p1 bra $L__BB0_1;
	redux.sync.add.s32 %r3, %r2, -1;
	st.global.b32 [%rd2], %r3;
	ret;"""
    assert not run(body, memory)
    assert memory.tolist() == [32 * 33 // 2] * 32


NEIGHBOUR = """
	xor.b32 %r2, %r1, 32; mul.wide.u32 %rd3, %r2, 4; add.s64 %rd3, %rd3, %rd1;
	st.global.b32 [%rd2], %r1; {barrier}
	ld.global.b32 %r3, [%rd3]; {barrier}
	st.global.b32 [%rd2], %r3; ret;"""


def test_a_barrier_orders_what_it_must() -> None:
    memory = words(64)
    assert not run(NEIGHBOUR.format(barrier="bar.sync 0;"), memory, num_warps=2)
    assert memory.tolist() == [n ^ 32 for n in range(64)]
    found = run(NEIGHBOUR.format(barrier=""), memory, num_warps=2)
    assert found
    assert all(each.startswith("race: ") and "one.py:7" in each for each in found)


def test_a_barrier_where_lanes_parted_is_refused() -> None:
    body = "setp.lt.s32 %p1, %r1, 5; @%p1 bra $L__BB0_1; bar.sync 0; $L__BB0_1:\n ret;"
    with pytest.raises(MachineError, match="only some lanes"):
        run(body.replace("; $L", ";\n$L"), words())


MESSAGE = """
	mov.u32 %r4, %ctaid.x; ld.param.b32 %r5, [one_param_1]; or.b32 %r4, %r4, %r5;
	setp.ne.s32 %p1, %r4, 0; @%p1 bra $L__BB0_2;
	st.global.b32 [%rd2+128], %r1; bar.sync 0; setp.eq.s32 %p2, %r1, 0;
	{before} @%p2 st.{post}.global.b32 [%rd1], 1; ret;
$L__BB0_2:
	setp.eq.s32 %p2, %r1, 0; mov.b32 %r2, 0;
$L__BB0_3:
	@%p2 ld.{look}.global.b32 %r2, [%rd1];
	redux.sync.max.s32 %r3, %r2, -1; setp.ne.s32 %p1, %r3, 1; @%p1 bra $L__BB0_3;
	{after} bar.sync 0; ld.global.b32 %r3, [%rd2+128]; ret;"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("post", "look", "before", "after", "ranks", "is_right"),
    [
        ("release.gpu", "acquire.gpu", "", "", 1, True),
        ("release.gpu", "acquire.gpu", "", "", 2, False),  # of another device
        ("release.sys", "acquire.sys", "", "", 2, True),
        ("relaxed.sys", "acquire.sys", "", "", 2, False),
        ("release.sys", "relaxed.sys", "", "", 2, False),
        ("relaxed.sys", "relaxed.sys", "fence.release.sys;", "fence.acquire.sys;", 2, True),
        ("relaxed.sys", "relaxed.sys", "fence.acq_rel.gpu;", "fence.acq_rel.sys;", 2, False),
        ("relaxed.sys", "relaxed.sys", "", "fence.acquire.sys;", 2, False),
    ],
)
def test_messages(
    post: str, look: str, before: str, after: str, ranks: int, is_right: bool, seed: int
) -> None:
    """Program 0 of rank 0 writes and raises a flag; others wait for it and read."""
    body = MESSAGE.format(post=post, look=look, before=before, after=after)
    found = run(body, words(), grid=2 if ranks == 1 else 1, ranks=ranks, seed=seed)
    assert (not found) == is_right, found


def test_who_waits_for_what_never_comes_is_found() -> None:
    look = "ld.relaxed.gpu.global.b32 %r2, [%rd1]; setp.eq.s32 %p1, %r2, 0;"
    body = f"$L__BB0_1:\n {look} @%p1 bra $L__BB0_1; ret;"
    with pytest.raises(MachineError, match="deadlock"):
        run(body, words())


def test_another_ranks_memory_and_no_memory_are_refused() -> None:
    with pytest.raises(MachineError, match="no memory of this rank"):
        run("st.global.b32 [%rd2+4096], %r1; ret;", words())
    assert np.all(words().numpy() == 0)


@pytest.mark.parametrize(("fence", "is_right"), [("fence.proxy.alias;", True), ("", False)])
def test_reading_through_another_address_takes_a_proxy_fence(fence: str, is_right: bool) -> None:
    memory = words(64)
    body = "ld.global.b32 %r2, [%rd2]; add.s32 %r2, %r2, 1; st.global.b32 [%rd2], %r2;"
    kernel, machine = parse(module(f"{PLACE} {body} {fence} ret;")), Machine(1, Options())
    cells = machine.new_cells(128)  # of both halves, as if they were the same memory
    for half in range(2):
        machine.add_memory(memory.data_ptr() + 128 * half, 128, 0, cells)
    machine.begin(2)
    before: list[int] = []
    for half in range(2):
        address = memory.data_ptr() + 128 * half
        before = [machine.launch(Prepared(kernel, 0, 1, 1, [address, 0], []), 0, before)]
    machine.run()
    found = {each.kind for each in machine.findings()}
    machine.close()
    assert found == (set() if is_right else {"no proxy fence"})
