"""How vLLM's processes learn that they are to balance, and what they refuse."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import NAMES, NUM_RANKS, configure
    from ultraep_serve.engines.vllm import plugin, routed_experts

from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.types import Policy


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ``register`` did; nothing of it reaches vLLM."""
    done: list[str] = []
    monkeypatch.setattr(routed_experts, "substitute", lambda: done.append("substituted"))
    monkeypatch.setattr(plugin, "repeat_at_exit", lambda: None)
    monkeypatch.setattr(plugin, "share_with_ray_workers", lambda: None)
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    monkeypatch.setattr(sys, "argv", ["server"])
    return done


def test_layers_are_registered_before_anybody_can_have_asked(registered: list[str]) -> None:
    plugin.register()
    assert registered == ["substituted"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('{"slotz": 1}', "unknown setting 'slotz'"),
        ('{"slots": "2"}', "slots = '2' must be a whole number"),
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


def test_two_sources_must_agree(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["s", '--additional-config={"ultraep": {"slots": 3}}'])
    monkeypatch.setenv("ULTRAEP_CONFIG", '{"slots": 3}')
    plugin.register()
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    with pytest.raises(SystemExit, match="--additional-config ultraep and the variable ULTRAEP_C"):
        plugin.register()


def test_another_vllm_is_refused_only_where_balancing_is_asked_for(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ImportError("no module named routed_experts")

    monkeypatch.setattr(routed_experts, "substitute", fail)
    plugin.register()
    assert "this vLLM is not one that can be balanced" in caplog.text
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    with pytest.raises(UnsupportedError, match="no module named routed_experts"):
        plugin.register()
    monkeypatch.setenv("ULTRAEP_CONFIG", "{")
    with pytest.raises(ConfigError, match="ULTRAEP_CONFIG is not JSON"):
        plugin.register()


def check_model(names: list[str]) -> Any:
    """What the embedding of a model with the MoE layers ``names`` does at its load."""
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", names)
    described = SimpleNamespace(model="some/model", architectures=["Some"])
    object.__setattr__(config, "model_config", described)
    made = routed_experts.CheckedEmbedding.__new__(routed_experts.CheckedEmbedding)
    torch.nn.Module.__init__(made)  # what vLLM needs to make one is not here
    with set_current_vllm_config(config):
        made.update_param_tp_status()
    return made


def test_models_without_experts_are_refused(
    balanced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_model(NAMES)
    with pytest.raises(UnsupportedError, match=r"some/model has no experts that vLLM routes"):
        check_model([])
    configure(monkeypatch.setenv, on_unsupported="off", run_dir=str(tmp_path))
    check_model([])
    assert "some/model" in (tmp_path / "unbalanced").read_text()


@pytest.mark.parametrize("policy", [None, Policy.OFF])
def test_nobody_is_refused_who_did_not_ask(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch, policy: Policy | None
) -> None:
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    if policy is not None:
        configure(monkeypatch.setenv, policy=policy)
    made = check_model([])
    assert type(made) is VocabParallelEmbedding  # ours is not needed any more
