"""How vLLM's processes learn that they are to balance, and what they refuse."""

import sys
import warnings

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from ultraep_serve.engines.vllm import load, plugin

from ultraep_serve.errors import ConfigError, UnsupportedError


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``register`` did; nothing of it reaches vLLM."""
    done: list[str] = []
    monkeypatch.setattr(load, "join_workers", lambda: done.append("joined"))
    monkeypatch.setattr(plugin, "repeat_at_exit", lambda: None)
    monkeypatch.setattr(plugin, "share_with_ray_workers", lambda: None)
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    monkeypatch.setattr(sys, "argv", ["server"])
    return done


def test_workers_are_joined_before_anybody_can_have_asked(registered: list[str]) -> None:
    plugin.register()
    assert registered == ["joined"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('{"slotz": 1}', "unknown setting 'slotz'"),
        ('{"slots": "two"}', "slots = 'two' must be a whole number"),
        ('{"policy": "quotta"}', "policy = 'quotta' must be"),
        ("1", "must be a JSON object of settings"),
    ],
)
def test_wrong_settings_on_the_command_line_end_the_process_with_one_line(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, setting: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["s", "--additional-config", f'{{"ultraep": {setting}}}'])
    with pytest.raises(SystemExit, match=reason) as refusal:
        plugin.register()
    assert str(refusal.value).startswith("ultraep: error: ")
    assert registered == []


def test_another_vllm_is_refused_only_where_balancing_is_asked_for(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ImportError("no module named worker_base")

    monkeypatch.setattr(load, "join_workers", fail)
    plugin.register()
    assert "this vLLM is not one that can be balanced" in caplog.text
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    with pytest.raises(UnsupportedError, match="no module named worker_base"):
        plugin.register()
    monkeypatch.setenv("ULTRAEP_CONFIG", "{")
    with pytest.raises(ConfigError, match="ULTRAEP_CONFIG is not JSON"):
        plugin.register()
