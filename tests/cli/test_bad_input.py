"""What people and other programs get wrong ends in one line on stderr and an exit code."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.model_configs import QWEN3_30B
from ultraep_serve.cli import main

HUGE, DIGITS, LONG = str(10**30), "1" * 5000, "a" * 5000
COSTS = {"seconds_per_assignment": 1e-6, "bytes_per_expert": 10**6, "link_bytes_per_second": 1e9}
IDS = np.zeros((64, 2, 8), np.int16)
COMMAND = (sys.executable, "-m", "ultraep_serve.cli")


def arrays(path: Path, **given: np.ndarray) -> None:
    np.savez(path, allow_pickle=False, **given)


def header_says(path: Path, shape: str) -> None:
    """A .npz whose array of zeros has ``shape`` as its header puts it."""
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("loads.npy", head + bytes(512))


def make_files(folder: Path) -> None:
    """Everything that the table below names."""
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "deep.json").write_text("[" * 100_000)
    configs = {
        "nested": {"text_config": [1]},
        "digits": {**QWEN3_30B, "hidden_size": int("1" * 400)},
        "experts": {**QWEN3_30B, "num_experts": 10**30},
    }
    costs = {
        "late": {**COSTS, "plan_seconds": 1e300},
        "wide": {**COSTS, "bytes_per_expert": 10**400},
        "thin": {**COSTS, "link_bytes_per_second": 1e-300},
    }
    for name, value in (configs | costs).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    arrays(folder / "good.npz", topk_ids=IDS, metadata=np.array('{"num_experts": 128}'))
    arrays(folder / "time.npz", topk_ids=IDS.astype("m8[s]"))
    arrays(folder / "none.npz", loads=np.zeros((2, 2, 0), np.int32))
    arrays(folder / "bool.npz", topk_ids=IDS > 0)
    header_says(folder / "shape.npz", "(True, 2, 64)")


REPLAY = ("--ep", "8", "--policies", "off,quota,eplb", "--batch-tokens", "64")
PAYS = ("replay", "good.npz", *REPLAY)
VLLM = ("vllm", "model", "--no-sidecar", "--enable-expert-parallel", "-tp=2")
BENCH = ("bench", "prefill")
RECORD = ("record", "--out", "out.npz")
BAD = [
    *(
        (*PAYS, "--hardware", "h100", "--model-config", name)
        for name in (
            *("list.json", "binary.json", "deep.json", "nested.json", "digits.json"),
            *("experts.json", "pipe", "zero", LONG),
        )
    ),
    *((*PAYS, "--costs", f"{name}.json") for name in ("late", "wide", "thin", "list", "deep")),
    *((*PAYS, "--costs", name) for name in ("pipe", "zero")),
    *(
        ("replay", name, *REPLAY)
        for name in ("time.npz", "bool.npz", "shape.npz", "pipe", "zero", "a\0b", f"{LONG}.npz")
    ),
    ("replay", "none.npz", *REPLAY[:4]),
    *(
        ("replay", "good.npz", *REPLAY, flag, HUGE)
        for flag in ("--ep", "--experts", "--slots", "--skip", "--batch-tokens")
    ),
    *(
        ("replay", "good.npz", *REPLAY, "--json", name)
        for name in (LONG, "a\0b", "/proc/x", "/etc/passwd/x", "/dev/full")
    ),
    *((*PAYS, flag, DIGITS) for flag in ("--domain-size", "--limit")),
    *(
        (*command, flag, f"http://127.0.0.1:{port}")
        for command, flag in (
            (BENCH, "--url"),
            (BENCH, "--sidecar"),
            (("status",), "--url"),
        )
        for port in ("-1", "0", "65536", HUGE, DIGITS)
    ),
    *(
        (*BENCH, "--url", url)
        for url in ("http://[::1", "http://[bad]:80", f"http://{'a' * 64}.com", "http://x:1:1")
    ),
    *((*RECORD, "--run-dir", name) for name in ("pipe", "zero", "deep.json", LONG)),
    *((*RECORD, "--port", value) for value in ("0", "65536", "x")),
    *((*RECORD, "--seconds", value) for value in ("nan", "inf", "0")),
    *((*RECORD, "--out", name) for name in ("trace.txt", "/dev/null/trace.npz")),
    (*RECORD, "--batches", "0"),
    (*RECORD, "--port", "8000", "--from-vllm", "a.json"),
    *((*BENCH, "--timeout", value) for value in ("nan", "inf", "0")),
    *((*VLLM, "--timeout-seconds", value) for value in ("nan", "inf", "1e300")),
    *((*VLLM, "--port", value) for value in ("-1", "65536", HUGE)),
    *(
        (*VLLM, flag, HUGE)
        for flag in ("--domain-size", "--min-batch-tokens", "--max-imbalance", "--domain-size")
    ),
    *(("sidecar", "--run-dir", ".", "--port", port) for port in ("-1", "65536", HUGE)),
    ("sidecar", "--run-dir", "a\0b"),
    ("status", "--run-dir", LONG),
    ("make-trace", "--out", f"{LONG}.npz"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    make_files(made)
    return made


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(words)[:100].replace("\0", "0"))
def test_bad_input_is_one_line(
    words: Sequence[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words[0] == "vllm":
        pytest.importorskip("vllm", reason="its flags are read with its own parser")
    monkeypatch.chdir(folder)
    assert main(list(words)) == 2
    said = capsys.readouterr().err.splitlines()
    (line,) = (line for line in said if not line.startswith("The planner is being compiled"))
    assert line.startswith("ultraep-serve: error: ")


@pytest.mark.parametrize("words", [["--version"], ["replay", "good.npz", *REPLAY]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(words: list[str], folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=-1, text=True, cwd=folder)
    assert done.returncode == 2
    assert done.stderr == "ultraep-serve: error: [Errno 28] No space left on device\n"


def test_nobody_reading_is_no_error(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, "--version"], stdout=writing, stderr=-1, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
