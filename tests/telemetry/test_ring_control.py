"""The control page: one policy, shared."""

import contextlib
from pathlib import Path

import pytest

from ultraep_serve.errors import ControlError
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy


def test_a_policy_set_by_one_is_read_by_the_other(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA, allow_ideal=True)
    with ControlPage.open(tmp_path) as sidecar:
        assert sidecar.policy is Policy.QUOTA
        for policy in (Policy.OFF, Policy.IDEAL, Policy.QUOTA):
            sidecar.set_policy(policy)
            assert engine.policy is policy
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
    engine.close()


@pytest.mark.parametrize("whole_writes", range(3))
def test_a_doubt_outlives_a_change_that_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_writes: int
) -> None:
    with ControlPage.create(tmp_path, Policy.QUOTA) as page:
        page.switch_off_in_doubt()
        writes, write = iter(range(10)), page.file.write

        def failing(content: bytes, offset: int) -> None:
            if next(writes) >= whole_writes:
                raise OSError("no room")
            write(content, offset)

        monkeypatch.setattr(page.file, "write", failing)
        with contextlib.suppress(ControlError):
            page.set_policy(Policy.QUOTA)
        assert page.is_in_doubt == (whole_writes < 2)
        assert page.policy is (Policy.OFF if page.is_in_doubt else Policy.QUOTA)


@pytest.mark.parametrize("whole_writes", range(2))
def test_a_policy_set_while_ranks_come_to_doubt_hides_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_writes: int
) -> None:
    """The sidecar's change falls between any two words of the engine's."""
    with ControlPage.create(tmp_path, Policy.OFF) as engine, ControlPage.open(tmp_path) as sidecar:
        writes, write = iter(range(10)), engine.file.write

        def interrupted(content: bytes, offset: int) -> None:
            if next(writes) == whole_writes:
                sidecar.set_policy(Policy.QUOTA)
            write(content, offset)

        monkeypatch.setattr(engine.file, "write", interrupted)
        engine.switch_off_in_doubt()
        if whole_writes == 1:
            sidecar.set_policy(Policy.QUOTA)
        assert engine.is_in_doubt or engine.policy is Policy.QUOTA


def test_stages_share_a_page(tmp_path: Path) -> None:
    first = ControlPage.create(tmp_path, Policy.QUOTA)
    first.set_policy(Policy.OFF)
    second = ControlPage.create(tmp_path, Policy.QUOTA)
    assert second.policy is Policy.OFF
    first.close()
    second.close()


@pytest.mark.parametrize(
    "content", [None, b"", b"x" * 30, b"x" * 4096, b"whole, but for the policy"]
)
def test_a_damaged_page_is_refused_and_leaves_the_policy_as_it_was(
    tmp_path: Path, content: bytes | None
) -> None:
    engine, path = ControlPage.create(tmp_path, Policy.QUOTA), tmp_path / "control"
    with ControlPage.open(tmp_path) as sidecar:
        sidecar.set_policy(Policy.OFF)
    assert engine.policy is Policy.OFF
    if content is None:
        path.unlink()
    elif content.startswith(b"whole"):
        page = path.read_bytes()
        path.write_bytes(page[:16] + b"\xff" * 8 + page[24:])
    else:
        path.write_bytes(content)
    assert engine.policy is Policy.OFF
    with pytest.raises(ControlError):
        ControlPage.open(tmp_path)
    engine.close()
