"""Every device kernel compiles for Hopper and Blackwell, without a GPU, and spills nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_compile.py"
KERNELS = {
    "_count_kernel",
    "_choose_kernel",
    "_exchange_kernel",
    "plan_kernel",
    "_stream_kernel",
    "_assign_kernel",
    "_identity_kernel",
    "_relays_kernel",  # of the calibration
}


@pytest.mark.compiler
def test_every_kernel_compiles_and_spills_nothing(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    path = tmp_path / "compiled.json"
    command = [sys.executable, str(SCRIPT), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["name"] for row in rows} == KERNELS
    assert {row["arch"] for row in rows} == {90, 100}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        copies = row["name"] == "_stream_kernel" or row["follows_plan"]
        shares = copies or row["name"] in ("_count_kernel", "_exchange_kernel")
        assert row["vector_copies"] > 0 or not copies, row
        for count in ("alias_fences", "clock_reads", "flags_read", "flags_posted"):
            assert (row[count] > 0) == shares, row
        assert row["system_atomics"] == 0, row
        assert row["longest_path"]["instructions"] > 100, row


def test_the_longest_path_takes_the_longer_branch_and_every_loop_once() -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    from ultraep_kernels.device.offline import LongestPath, longest_path

    ptx = """
.visible .entry kernel(
)
{
	.reg .pred 	%p<3>;
	mov.u32 	%r1, %tid.x;            // 1
	@%p1 bra 	$L__BB0_3;              // 2
	bra.uni 	$L__BB0_1;               // 3
$L__BB0_3:                               // runs last, though it lies here
	bar.sync 	0;                      // 8
	ret;                                 // 9
$L__BB0_1:
	shfl.sync.bfly.b32 	%r2, %r1, 1, 31, -1; // 4
$L__BB0_2:
	add.s32 	%r1, %r1, 1;             // 5
	@%p2 bra 	$L__BB0_2;              // 6
	bra.uni 	$L__BB0_3;               // 7
}
"""
    assert longest_path(ptx) == LongestPath(instructions=9, steps=2, loops=1)
