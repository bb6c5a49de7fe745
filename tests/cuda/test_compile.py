"""Every device kernel compiles for Hopper and Blackwell, without a GPU, and spills nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_compile.py"
KERNELS = {
    "_count_kernel",
    "_exchange_kernel",
    "plan_kernel",
    "_stream_kernel",
    "_receive_kernel",
    "_identity_kernel",
    "_relays_kernel",  # of the calibration
}


ONE_AFTER_ANOTHER = {"_identity_kernel", "_relays_kernel"}
Row: TypeAlias = dict[str, Any]


def test_older_compilers_are_given_what_they_take() -> None:
    """Triton 3.7, which torch 2.13 brings, knows no field of a tuple as a constant there."""
    for path in (SCRIPT.parents[1] / "kernels" / "ultraep_kernels" / "device").glob("*.py"):
        found = re.findall(r"tl\.zeros\(|static_range\([^)\n]*\w\.\w", path.read_text())
        assert not found, f"{path.name}: {found}: tl.full, or a tl.constexpr of its own"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """What the benchmark writes of every kernel."""
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    path = tmp_path_factory.mktemp("compiled") / "compiled.json"
    command = [sys.executable, str(SCRIPT), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.compiler
def test_every_kernel_compiles_and_spills_nothing(compiled: list[Row]) -> None:
    rows = compiled
    assert {row["name"] for row in rows} == KERNELS
    assert {row["arch"] for row in rows} == {90, 100}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        exchanges = row["name"] in ("_count_kernel", "_exchange_kernel")
        streams, receives = (row["name"] == f"_{name}_kernel" for name in ("stream", "receive"))
        relays = (row["domain_size"] or row["num_ranks"]) > 4
        copies = streams or row["follows_plan"] or (receives and relays)
        assert row["vector_copies"] > 0 or not copies, row
        if streams or receives:  # they leave room for the engine's kernels on a multiprocessor
            most = 65536 * 3 // 8 if relays else 65536 // 4
            assert 32 * row["num_warps"] * row["registers"] <= most, row
        tells = exchanges or copies or receives  # other ranks, or the host of a wait given up
        assert (row["flags_posted"] > 0) == tells, row
        assert (row["traps"] > 0) == (receives or row["follows_plan"]), row  # before experts run
        waits = exchanges or receives or row["follows_plan"] or (streams and relays)
        for count in ("alias_fences", "clock_reads", "flags_read"):
            assert (row[count] > 0) == waits, row  # without relays nothing waits beside dispatch
        assert row["system_atomics"] == 0, row


@pytest.mark.compiler
def test_what_waits_goes_by_the_order_in_which_programs_start(compiled: list[Row]) -> None:
    """Not by their numbers, of which a device may start any first."""
    for row in compiled:
        if row["name"] not in ONE_AFTER_ANOTHER:
            assert not row["reads_program_id"], row


@pytest.mark.compiler
def test_polls_do_not_write(compiled: list[Row]) -> None:
    """Some hundred programs look at one word."""
    import triton.language as tl

    if not hasattr(tl, "atomic_load"):
        pytest.skip("this Triton has no atomic loads")
    assert {row["name"] for row in compiled if row["polling_atomics"]} == set()
