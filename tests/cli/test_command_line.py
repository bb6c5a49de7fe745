"""What all commands have in common: help, one-line errors, packages that are not installed."""

import subprocess
import sys

import pytest

from ultraep_serve.cli import all_commands, main


@pytest.mark.parametrize("command", all_commands())
def test_every_command_explains_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: ultraep-serve {command}")
    assert "default: None" not in shown


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ultraep-serve")
    assert all(command in shown for command in all_commands())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["replay", "t.npz"], "the following arguments are required"),
        (["replay", "t.npz", "--ep", "4", "--policies", "off", "--fast"], "--fast"),
        (["doctor", "--port", "0"], "--port = 0 must be 1 to 65535"),
    ],
)
def test_an_error_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ultraep-serve: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("httpx", "bench", "client"), ("rich", "replay", "client"), ("fastapi", "sidecar", "sidecar")],
)
def test_a_missing_package_is_named(package: str, command: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None; from ultraep_serve.cli import main; "
        f"sys.exit(main(['{command}']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    expected = f"{package} is not installed; run `pip install '.[{extra}]'` in a checkout"
    assert done.stderr == f"ultraep-serve: error: {expected}\n"
