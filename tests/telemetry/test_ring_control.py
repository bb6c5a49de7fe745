"""The control page: one policy, shared."""

import os
from pathlib import Path

import pytest

from ultraep_serve.errors import ControlError
from ultraep_serve.telemetry.control import ControlPage, RecordLevel
from ultraep_serve.types import Policy, SpeedSource


def test_a_policy_set_by_one_is_read_by_the_other(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    with ControlPage.open(tmp_path) as sidecar:
        assert sidecar.policy is Policy.QUOTA
        for number, policy in enumerate([Policy.OFF, Policy.IDEAL, Policy.QUOTA], start=1):
            assert sidecar.set_policy(policy) == number
            assert engine.policy is policy
            assert engine.sequence == number
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
    engine.close()


def test_a_threshold_is_kept_in_millionths(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    assert engine.max_imbalance_millionths == 0
    with ControlPage.open(tmp_path) as sidecar:
        sidecar.set_max_imbalance(1.05)
        assert engine.max_imbalance_millionths == 1_050_000
        sidecar.set_max_imbalance(None)
    assert engine.max_imbalance_millionths == 0
    assert (engine.policy, engine.recording_word) == (Policy.QUOTA, 0)
    engine.close()


def test_speeds_are_those_configured_until_set(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    assert engine.speeds is SpeedSource.CONFIGURED
    with ControlPage.open(tmp_path) as sidecar:
        for source in (SpeedSource.AUTO, SpeedSource.EQUAL):
            sidecar.set_speeds(source)
            assert engine.speeds is source
    with (tmp_path / "control").open("r+b") as file:
        file.seek(48)
        file.write(b"\xff" * 8)
    assert engine.speeds is SpeedSource.CONFIGURED
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


def test_a_deleted_page_is_put_back_and_followed(tmp_path: Path) -> None:
    primary, other = ControlPage.create(tmp_path, Policy.QUOTA), ControlPage.open(tmp_path)
    primary.set_policy(Policy.OFF)
    for _ in range(2):
        (tmp_path / "control").unlink()
        other.follow(put_back=False)
        assert not (tmp_path / "control").exists()
        primary.follow(put_back=True)
        other.follow(put_back=False)
        with ControlPage.open(tmp_path) as sidecar:
            assert (sidecar.policy, sidecar.sequence % 2) == (Policy.OFF, 1)
            sidecar.set_policy(Policy.OFF)
            sidecar.set_policy(Policy.OFF)
            word = sidecar.record(RecordLevel.LOADS, 1 << 20).word
        assert primary.sequence == other.sequence
        assert primary.recording_word == other.recording_word == word
    (tmp_path / "control").unlink()
    (tmp_path / "control").write_bytes(bytes(4096))  # no page of ours
    primary.follow(put_back=True)
    assert primary.policy is Policy.OFF
    primary.close()
    other.close()


@pytest.mark.parametrize("left", [0, 30, 60])
def test_a_truncated_page_is_filled_up(tmp_path: Path, left: int) -> None:
    primary, other = ControlPage.create(tmp_path, Policy.QUOTA), ControlPage.open(tmp_path)
    other.set_policy(Policy.OFF)
    for page in (primary, other):
        assert page.policy is Policy.OFF
    os.truncate(tmp_path / "control", left)
    for page in (primary, other):
        assert (page.policy, page.sequence) == (Policy.OFF, 1)
    primary.follow(put_back=True)
    with ControlPage.open(tmp_path) as sidecar:
        assert (sidecar.policy, sidecar.set_policy(Policy.QUOTA)) == (Policy.OFF, 2)
    for page in (primary, other):
        assert page.policy is Policy.QUOTA
        page.close()


def test_a_doubt_lasts_until_somebody_sets_a_policy(tmp_path: Path) -> None:
    engine = ControlPage.create(tmp_path, Policy.QUOTA)
    with ControlPage.open(tmp_path) as sidecar:
        assert not sidecar.is_in_doubt
        assert engine.switch_off_in_doubt() == 1
        assert (sidecar.policy, sidecar.sequence, sidecar.is_in_doubt) == (Policy.OFF, 1, True)
        sidecar.set_max_imbalance(1.5)
        assert engine.is_in_doubt
        assert sidecar.set_policy(Policy.QUOTA) == 2
        assert (engine.policy, engine.is_in_doubt) == (Policy.QUOTA, False)
    engine.close()
