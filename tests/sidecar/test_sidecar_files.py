"""Files of a run deleted while it serves, as some images do with /dev/shm, or no room for them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.rings import PLANNED_LAYERS, SyntheticRun, planned_run
from tests.support.sidecar_runs import BEARER, TOKEN, reasons, samples
from ultraep_lab.this_machine import free_port
from ultraep_serve.cli import main
from ultraep_serve.sidecar.app import create_app
from ultraep_serve.system.environment import TOKEN_VARIABLE
from ultraep_serve.types import Policy

_BATCHES = 3
_COUNTED = "ultraep_imbalance_ratio_count,phase=prefill,when=before"


def delete_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "says", "may_switch"),
    [
        (lambda path: os.truncate(path / "ring-1", 5000), "ring-1 was truncated", True),
        (lambda path: (path / "control").unlink(), "its control page was deleted", False),
        (delete_all, "ring-0 was deleted", False),
    ],
    ids=["a ring truncated", "the control page deleted", "everything deleted"],
)
def test_files_damaged_while_serving(
    tmp_path: Path,
    planned_run: SyntheticRun,
    client: TestClient,
    damage: Callable[[Path], None],
    says: str,
    may_switch: bool,
) -> None:
    """The run serves on as it was, and whoever asks is told that nobody sees it."""
    assert reasons(client) == {}
    damage(tmp_path)
    assert says in " ".join(reasons(client).values())
    for _ in range(_BATCHES):
        planned_run.batch()
    answer = client.post("/v1/control/policy", json={"policy": "off"}, headers=BEARER)
    assert answer.status_code == (200 if may_switch else 409)
    assert planned_run.control.policy is (Policy.OFF if may_switch else Policy.QUOTA)
    assert says in " ".join(reasons(client).values())
    assert not any(recorder.lost for recorder in planned_run.recorders)


@pytest.fixture
def full_memory(tmp_path: Path) -> Iterator[tuple[Path, SyntheticRun]]:
    """A run on a file system of its own, of 16 MiB, without a free byte."""
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(tmp_path)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    try:
        with closing(planned_run(tmp_path)) as run:
            with (tmp_path / "filler").open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))
            yield tmp_path, run
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_full_while_serving(full_memory: tuple[Path, SyntheticRun]) -> None:
    """Ranks record and follow the policy."""
    path, run = full_memory
    client = TestClient(create_app(path, TOKEN))
    for policy in ("off", "quota"):
        answer = client.post("/v1/control/policy", json={"policy": policy}, headers=BEARER)
        assert (answer.status_code, run.control.policy.value) == (200, policy)
    for _ in range(_BATCHES):
        run.batch()
    assert samples(client)[_COUNTED] == _BATCHES * PLANNED_LAYERS
    assert reasons(client) == {}


def test_full_at_the_start(
    full_memory: tuple[Path, SyntheticRun],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sidecar of its own says so in a line."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main(["sidecar", "--run-dir", str(full_memory[0]), "--port", str(free_port())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ultraep-serve: error: ")
    assert "No space left on device" in line
