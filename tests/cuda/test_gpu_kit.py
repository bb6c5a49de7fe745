"""The kit for a machine without a network: what is cut from libraries, and pieces put together."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "check_gpu"
PTX, CUBIN = 1, 2


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    import carried
    import fat_binary

    return fat_binary, carried


def container(*entries: tuple[int, int, bytes]) -> bytes:
    parts = [
        struct.pack("<HHIQ12xI32x", kind, 1, 64, len(code), architecture) + code
        for kind, architecture, code in entries
    ]
    body = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_machine_code_of_other_gpus_is_cut_and_nothing_else(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    code = container((CUBIN, 80, b"old!" * 4), (CUBIN, 90, b"ours" * 4), (PTX, 90, b"text" * 4))
    only_ptx = container((CUBIN, 100, b"new!" * 4), (PTX, 80, b"text" * 4))
    library = tmp_path / "library.so"
    magic_by_chance = struct.pack("<I", 0xBA55ED50) + b"data"
    library.write_bytes(magic_by_chance + code + b"between" + only_ptx)
    assert modules[0].keep_architecture(library, 90) == 3 * 16
    left = container((CUBIN, 80, bytes(16)), (CUBIN, 90, b"ours" * 4), (PTX, 90, bytes(16)))
    left_ptx = container((CUBIN, 100, bytes(16)), (PTX, 80, b"text" * 4))
    assert library.read_bytes() == magic_by_chance + left + b"between" + left_ptx


def test_pieces_are_asked_for_one_by_one_and_put_together(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    carried = modules[1]
    (tmp_path / "content").mkdir()
    (tmp_path / "content" / "carried.py").write_bytes(os.urandom(3000))
    command = ["tar", "--create", "--xz", f"--directory={tmp_path / 'content'}", "."]
    whole = subprocess.run(command, check=True, capture_output=True).stdout
    kit = tmp_path / "kit"
    kit.mkdir()
    assert carried.missing_piece(kit) == "the first one"
    for n in range(3):
        piece = kit / f"{carried.ARCHIVE}.{n + 1}of3"
        piece.write_bytes(whole[n * 1100 : (n + 1) * 1100 if n < 2 else None])
        missing = f"{carried.ARCHIVE}.{n + 2}of3" if n < 2 else None
        assert carried.missing_piece(kit) == missing
    carried.unpack(kit)
    unpacked = kit / "site" / "carried.py"
    assert unpacked.read_bytes() == (tmp_path / "content" / "carried.py").read_bytes()
    code = "import importlib.metadata as m; print(*m.entry_points(group='vllm.general_plugins'))"
    environment = {**os.environ, **carried.environment(kit)}
    command = [sys.executable, "-S", "-c", code]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert "ultraep_serve.engines.vllm.plugin:register" in found.stdout
    for path in kit.glob(f"{carried.ARCHIVE}*"):
        path.unlink()
    assert carried.missing_piece(kit) is None
