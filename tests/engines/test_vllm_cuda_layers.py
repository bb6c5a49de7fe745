"""Layers of the vLLM adapter on GPUs: what moves, which batches are balanced, who is left alone."""

import copy
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.v1.worker import ubatching

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import (
        NAMES,
        NUM_RANKS,
        NUM_SLOTS,
        build,
        configure,
        forward_pass,
    )
    from ultraep_serve.engines.vllm import checks, group, routed_experts

from tests.support.experts import NUM_EXPERTS, TOP_K
from ultraep_serve.balance.cuda.recording import is_capturing
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import Policy


def test_batches_are_judged_by_all_ranks_tokens_and_captured_ones_not(balanced: Any) -> None:
    layer, config = build(balanced)
    seen: list[int] = []
    layer._group._layers = [layer]
    ids = torch.zeros(8, TOP_K, dtype=torch.int64)
    with forward_pass(config, [300, 8, 1]):
        seen.append(layer._group.batch(ids).tokens)
        balanced(group, "is_capturing", lambda _: True)
        seen.append(layer._group.batch(ids).tokens)
    assert seen == [309, 0]
    balanced(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_capturing(torch.device("cuda"))
    assert not is_capturing(ids.device)


def test_overlapping_micro_batches_are_told_apart(balanced: Any) -> None:
    """vLLM runs each in a thread of its own, and these take turns within a layer."""
    layer, config = build(balanced)
    assert layer._group._execution.num_micro_batches == 1
    config.parallel_config.enable_dbo = True
    assert layer._group._execution.num_micro_batches == 2
    checks.check_device_execution(layer, config)
    seen: list[tuple[str, int]] = []
    layer._group._layers = [layer]
    layer._group.balanced = SimpleNamespace(
        computed=lambda number: seen.append(("computed", number)),
    )
    ids = torch.zeros(8, TOP_K, dtype=torch.int32)
    with forward_pass(config, [8, 8, 8]):
        for number in (1, 0):
            balanced(ubatching, "_THREAD_ID_TO_CONTEXT", {threading.get_ident(): number})
            seen.append(("route", layer._group.batch(ids).micro_batch))
            layer._group.computed()
    assert seen == [("route", 1), ("computed", 1), ("route", 0), ("computed", 0)]


def test_unsupported_models_are_served_by_vllm_alone(
    balanced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(monkeypatch.setenv, on_unsupported="off", run_dir=str(tmp_path))
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer, _ = build(balanced, config=config)
    config.parallel_config.enable_elastic_ep = True
    layer.update_param_tp_status()
    assert layer._group.balanced is None
    layer._group.computed()
    assert layer.global_num_experts == NUM_EXPERTS
    assert "--enable-elastic-ep" in (tmp_path / "unbalanced").read_text()  # for the sidecar


def draft_config_of(config: Any) -> Any:
    """As vLLM derives it: everything shared but what the draft model needs otherwise."""
    return copy.copy(config)


def test_draft_models_run_as_the_engine_has_them(balanced: Any) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    target, _ = build(balanced, config=config)
    draft, _ = build(balanced, config=draft_config_of(config))
    assert type(draft) is RoutedExperts
    assert isinstance(target, routed_experts.DeviceRoutedExperts)
    assert target._group._num_expected == 1


def test_draft_experts_on_a_cpu_go_without_balancing(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (group, routed_experts, checks):
        monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setattr(checks.vllm, "__version__", "0.32.0")  # verified on CPU too
    config = vllm_layers.engine_config(0, NUM_RANKS, "", NAMES[:1])
    target, draft = (build(balanced, config=each)[0] for each in (config, draft_config_of(config)))
    assert isinstance(draft, routed_experts.CpuRoutedExperts)
    assert draft._group is not target._group
    assert draft._group._config.policy is Policy.OFF
    assert target._group._config.policy is Policy.QUOTA


def test_weights_loaded_anew_and_a_second_model_are_refused(
    balanced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configure(monkeypatch.setenv, on_unsupported="off", run_dir=str(tmp_path))
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    layer, _ = build(balanced, config=config)
    config.parallel_config.enable_elastic_ep = True
    layer.update_param_tp_status()
    with pytest.raises(UnsupportedError, match="loaded anew"):
        layer.update_param_tp_status()
    layer._group.balanced = object()
    other = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", ["other"])
    with pytest.raises(UnsupportedError, match="balances another model already"):
        build(balanced, config=other)


@pytest.mark.parametrize("asked", [False, True])
def test_vllm_on_a_gpu_is_untouched_unless_asked_or_with_policy_off(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(routed_experts, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    if asked:
        configure(monkeypatch.setenv, policy=Policy.OFF)
    layer, _ = build(on_gpu)
    assert type(layer) is RoutedExperts


@pytest.mark.parametrize("settings", [{}, {"slots": NUM_SLOTS + 1}])
def test_settings_come_from_vllms_own_configuration(
    on_gpu: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    config.additional_config = {"ultraep": settings}
    layer, _ = build(on_gpu, config=config)
    assert layer._group._config == BalanceConfig(**settings)
