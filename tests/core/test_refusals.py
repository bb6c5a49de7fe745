"""What an engine's first process does at its end, with small programs in the engine's place."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ultraep_serve import errors
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system import refusals

PROGRAM = """
import multiprocessing, sys
from ultraep_serve import errors
from ultraep_serve.system.refusals import repeated_at_exit, repeat_at_exit

def rank(names):
    repeat_at_exit()  # not the first process: nothing is said at its end
    for name in names:
        try:
            with repeated_at_exit():
                raise getattr(errors, name)("because of " + name)
        except errors.UltraEPError:
            pass

if __name__ == "__main__":
    repeat_at_exit()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=rank, args=(sys.argv[1:],))
    process.start()
    process.join()
    sys.stderr.write("the engine's last words\\n")
"""


def said_by(tmp_path: Path, *raised: str) -> list[str]:
    """Lines on stderr of a program whose rank raised errors of these names."""
    program, temporary = tmp_path / "program.py", tmp_path / "tmp"
    program.write_text(PROGRAM)
    temporary.mkdir()
    stale, foreign = (temporary / f"ultraep-{os.getuid()}-refused-{n}" for n in ("999999999", "x"))
    stale.touch()
    foreign.touch()
    done = subprocess.run(
        [sys.executable, str(program), *raised],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in temporary.iterdir()] == [foreign.name]
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (["UnsupportedError"], "UnsupportedError"),
        (["UnsupportedError", "PeerTimeoutError"], "UnsupportedError"),
        (["PeerTimeoutError", "ConfigError"], "ConfigError"),
        (["FabricError"], "FabricError"),
    ],
)
def test_why_a_rank_refused_is_said_last(tmp_path: Path, raised: list[str], said: str) -> None:
    last = f"ultraep: error: {getattr(errors, said)(f'because of {said}')}"
    assert said_by(tmp_path, *raised) == ["the engine's last words", last]


def test_nothing_is_said_where_nothing_was_refused(tmp_path: Path) -> None:
    assert said_by(tmp_path) == ["the engine's last words"]


def test_a_pipe_in_the_place_of_the_reason_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make one under a name that is known beforehand."""
    monkeypatch.setattr(refusals, "_path", lambda _: tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe")

    def refuse() -> None:
        with suppress(UnsupportedError), refusals.repeated_at_exit():
            raise UnsupportedError("no experts")

    refusal = threading.Thread(target=refuse, daemon=True)
    refusal.start()
    refusal.join(10)
    assert not refusal.is_alive()
