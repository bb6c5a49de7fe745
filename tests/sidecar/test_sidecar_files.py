"""Files of a run deleted while it serves, as some images do with /dev/shm, or no room for them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.live_run import LiveRun, command
from tests.support.rings import PLANNED_LAYERS
from tests.support.sidecar_runs import samples, status
from tests.support.waiting import until
from ultraep_serve.system.environment import TOKEN_VARIABLE
from ultraep_serve.system.machine import free_port

_BATCHES = 3
_COUNTED = "ultraep_imbalance_ratio_count,phase=prefill,when=before"
_DAMAGES = {
    "a ring truncated": ("truncate -s 5000 */ring-1", "ring-1 was truncated"),
    "the control page deleted": ("rm */control", "its control page was deleted"),
    "everything": ("rm -rf ./*", "ring-0 was deleted"),
}


class Answers(httpx.Client):
    """What a sidecar answers."""

    def set_policy(self, token: str, policy: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        path = "/v1/control/policy"
        return self.post(path, json={"policy": policy}, headers=headers).status_code

    def ready(self) -> int:
        return status(f"{self.base_url}/readyz")


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def run(shared_memory: Path) -> Iterator[LiveRun]:
    made = LiveRun(shared_memory, "8000")
    yield made
    made.kill()


@pytest.fixture
def sidecar(shared_memory: Path, run: LiveRun) -> Iterator[Answers]:
    with started_sidecar(shared_memory) as answers:
        yield answers


@contextmanager
def started_sidecar(shared_memory: Path) -> Iterator[Answers]:
    """One that found the run by itself."""
    port = free_port()
    words = command(shared_memory, "ultraep-serve", "sidecar", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(words) as process, Answers(base_url=url, timeout=30) as answers:
        until(lambda: answers.ready() == 200)
        yield answers
        process.terminate()


@pytest.mark.parametrize("damage", list(_DAMAGES))
def test_files_damaged_while_serving(
    shared_memory: Path, run: LiveRun, sidecar: Answers, damage: str
) -> None:
    """The run serves on as it was, and whoever asks is told that nobody sees it."""
    token = (run.path / "token").read_text()
    command, says = _DAMAGES[damage]
    subprocess.run(["sh", "-c", command], cwd=shared_memory, check=True)
    assert sidecar.ready() == 503
    reasons = sidecar.get("/readyz").json()["reasons"]
    assert says in " ".join(reasons.values())
    for _ in range(_BATCHES):
        run.batch()
    assert run.policy() == "quota"
    if damage != "a ring truncated":
        assert sidecar.set_policy(token, "off") == 409
        assert run.policy() == "quota"
    assert sidecar.ready() == 503
    run.end()
    assert list(shared_memory.iterdir()) == []


@pytest.fixture
def little_memory(shared_memory: Path) -> Iterator[Path]:
    """A file system of its own, of 16 MiB."""
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(shared_memory)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs to mount a file system: {mounted.stderr.strip()}")
    try:
        yield shared_memory
    finally:
        subprocess.run(["umount", "--lazy", str(shared_memory)], check=True)


def filled(shared_memory: Path) -> Path:
    """A file that leaves no byte free."""
    path = shared_memory / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


def test_full_while_serving(little_memory: Path) -> None:
    """Ranks record and follow the policy."""
    run = LiveRun(little_memory, "8000")
    try:
        with started_sidecar(little_memory) as sidecar:
            token = (run.path / "token").read_text()
            filled(little_memory)
            assert sidecar.set_policy(token, "quota") == 200
            assert run.policy() == "quota"
            for _ in range(_BATCHES):
                run.batch()
            until(lambda: samples(sidecar)[_COUNTED] == _BATCHES * PLANNED_LAYERS)
            assert (sidecar.ready(), run.policy()) == (200, "quota")
            run.end()
            assert [path.name for path in little_memory.iterdir()] == ["filler"]
    finally:
        run.kill()


def test_full_at_the_start(little_memory: Path) -> None:
    """A sidecar of its own says so in a line."""
    run = LiveRun(little_memory, "8000")
    try:
        filled(little_memory)
        done = subprocess.run(
            command(little_memory, "ultraep-serve", "sidecar", "--port", str(free_port())),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith("ultraep-serve: error: ")
        assert "No space left on device" in done.stderr
        assert done.stderr.count("\n") == 1
        assert len(list(little_memory.glob("ultraep-*"))) == 1  # that of the run
    finally:
        run.kill()
