"""The control page: one policy, shared."""

import os
from pathlib import Path

import pytest

from ultraep_serve.errors import ControlError
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.types import Policy, SpeedSource


def test_a_policy_set_by_one_is_read_by_the_other(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA, allow_ideal=True)
    with ControlPage.open(tmp_path) as sidecar:
        assert sidecar.policy is Policy.QUOTA
        for number, policy in enumerate([Policy.OFF, Policy.IDEAL, Policy.QUOTA], start=1):
            assert sidecar.set_policy(policy) == number
            assert engine.policy is policy
            assert engine.sequence == number
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
    engine.close()


def test_speeds_are_those_configured_until_set(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    assert engine.speeds is SpeedSource.CONFIGURED
    with ControlPage.open(tmp_path) as sidecar:
        for source in (SpeedSource.AUTO, SpeedSource.EQUAL):
            sidecar.set_speeds(source)
            assert engine.speeds is source
    with (tmp_path / "control").open("r+b") as file:
        file.seek(32)
        file.write(b"\xff" * 8)
    assert engine.speeds is SpeedSource.EQUAL  # as it was when the page was last whole
    engine.close()


def test_ideal_is_refused_where_the_server_was_not_started_for_it(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    with (
        ControlPage.open(tmp_path) as sidecar,
        pytest.raises(ControlError, match="started with --allow-ideal"),
    ):
        sidecar.set_policy(Policy.IDEAL)
    assert (engine.policy, engine.sequence, engine.allows_ideal) == (Policy.QUOTA, 0, False)
    engine.close()


def test_a_damaged_policy_keeps_the_last_legal_one(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.OFF)
    with (tmp_path / "control").open("r+b") as file:
        file.seek(24)
        file.write(b"\xff" * 8)
    assert engine.policy is Policy.OFF
    with pytest.raises(ControlError, match="not a control page"):
        ControlPage.open(tmp_path)
    engine.close()


@pytest.mark.parametrize("content", [None, b"", b"x" * 100, b"x" * 4096])
def test_what_is_no_control_page_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "control").write_bytes(content)
    with pytest.raises(ControlError):
        ControlPage.open(tmp_path)


def test_stages_share_a_page(tmp_path: Path) -> None:
    first = ControlPage.create(tmp_path, Policy.QUOTA)
    first.set_policy(Policy.OFF)
    second = ControlPage.create(tmp_path, Policy.QUOTA)
    assert second.policy is Policy.OFF
    first.close()
    second.close()


@pytest.mark.parametrize("left", [0, 30, 60])
def test_a_damaged_page_leaves_the_policy_as_it_was(tmp_path: Path, left: int) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    with ControlPage.open(tmp_path) as sidecar:
        sidecar.set_policy(Policy.OFF)
    assert engine.policy is Policy.OFF
    os.truncate(tmp_path / "control", left)
    assert (engine.policy, engine.sequence) == (Policy.OFF, 1)
    with pytest.raises(ControlError):
        ControlPage.open(tmp_path)
    (tmp_path / "control").unlink()
    assert engine.policy is Policy.OFF
    engine.close()


def test_a_doubt_lasts_until_somebody_sets_a_policy(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    with ControlPage.open(tmp_path) as sidecar:
        assert not sidecar.is_in_doubt
        assert engine.switch_off_in_doubt() == 1
        assert (sidecar.policy, sidecar.sequence, sidecar.is_in_doubt) == (Policy.OFF, 1, True)
        assert sidecar.set_policy(Policy.QUOTA) == 2
        assert (engine.policy, engine.is_in_doubt) == (Policy.QUOTA, False)
    engine.close()
