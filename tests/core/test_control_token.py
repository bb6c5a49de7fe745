"""The control token: what others put in its place is never taken for one, nor sent anywhere."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ultraep_lab.arguments import ServerFlags, control_token
from ultraep_serve.errors import ConfigError, NoServerError
from ultraep_serve.system.environment import TOKEN_VARIABLE, control_token_from_environment

SECRET = "a-secret-of-this-user"


@pytest.fixture
def run_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of the server on port 8000, with a token."""

    def find_run(port: int) -> Path:
        if port != 8000:
            raise NoServerError("no server")
        return path

    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr("ultraep_lab.arguments.find_run", find_run)
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    (path / "token").write_text(SECRET)
    (path / "token").chmod(0o600)
    return path


def token_of(*flags: str) -> str | None:
    parser = argparse.ArgumentParser()
    ServerFlags.add_flags(parser)
    return control_token(ServerFlags.from_flags(parser.parse_args(flags)))


def link_directory(path: Path) -> None:
    path.rename(path.with_name("private"))
    path.symlink_to(path.with_name("private"))


def link_token(path: Path) -> None:
    (path / "token").rename(path / "secret")
    (path / "token").symlink_to(path / "secret")


def pipe(path: Path) -> None:
    (path / "token").unlink()
    os.mkfifo(path / "token", 0o600)


def test_the_token_of_the_local_server_is_found(run_path: Path) -> None:
    assert token_of() == SECRET
    assert token_of("--url", "http://127.0.0.1:8700") is None
    (run_path / "given").write_text(" given ")
    assert token_of("--token-file", str(run_path / "given")) == "given"


@pytest.mark.parametrize("flag", ["--url", "--sidecar"])
@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "elsewhere.invalid"])
def test_the_token_is_told_to_nobody_elsewhere(flag: str, host: str, run_path: Path) -> None:
    assert token_of(flag, f"http://{host}:8000") is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_the_token_is_told_to_a_sidecar_on_this_machine(host: str, run_path: Path) -> None:
    assert token_of("--sidecar", f"http://{host}:9000", "--url", f"http://{host}:8000") == SECRET


@pytest.mark.parametrize(
    "attack",
    [
        link_directory,
        link_token,
        pipe,
        lambda path: path.chmod(0o755),
        lambda path: (path / "token").chmod(0o640),
        lambda path: (path / "token").write_text("x" * 5000),
        lambda path: (path / "token").write_text(f"{SECRET}\nHost: elsewhere"),
        lambda path: (path / "token").write_text(" \n"),
    ],
    ids=["directory-link", "link", "pipe", "directory", "mode", "long", "lines", "empty"],
)
def test_what_others_could_know_or_make_is_no_token(
    attack: Callable[[Path], None], run_path: Path
) -> None:
    attack(run_path)
    with pytest.raises(ConfigError) as raised:
        token_of()
    assert str(run_path) in str(raised.value)
    assert SECRET not in str(raised.value)


def test_a_secret_linked_into_a_directory_of_another_user_is_not_sent(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hard link is a regular file, and its owner is this user."""
    status = os.stat(run_path)
    fields = list(status)
    fields[4] += 1
    real, foreign = os.fstat, os.stat_result(fields)
    monkeypatch.setattr(
        os, "fstat", lambda fd: foreign if os.path.samestat(real(fd), status) else real(fd)
    )
    with pytest.raises(ConfigError, match="another user"):
        token_of()


@pytest.mark.parametrize("value", ["one\ntwo", "one two", "o\0e", "caf\u00e9"])
def test_an_operators_token_that_no_header_holds_is_refused_unseen(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {TOKEN_VARIABLE: value})
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE} must be one line") as raised:
        control_token_from_environment()
    assert value not in str(raised.value)
    os.environ[TOKEN_VARIABLE] = "one\n"
    assert control_token_from_environment() == "one"
    file = tmp_path / "file"
    file.write_text(value, encoding="utf-8")
    os.environ.clear()
    with pytest.raises(ConfigError, match=r"--token-file.* must be one line"):
        token_of("--token-file", str(file))
