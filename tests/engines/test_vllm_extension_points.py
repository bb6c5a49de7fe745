"""What the adapter relies on, asked of the vLLM that is on the path: any verified build."""
# ruff: noqa: TID251 - vLLM's own objects are what is tested

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import NAMES, NUM_RANKS, build
    from ultraep_serve.adapters.vllm import checks, launch, routed_experts

from ultraep_serve.doctor import engines
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.versions import VLLM_CPU

PLATFORM = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)  # an NVIDIA GPU


def test_this_version_is_accepted_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "current_platform", PLATFORM)
    checks.check_engine()


def test_this_version_is_accepted_on_cpu_where_it_was_served_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    if VLLM_CPU.is_verified(checks.vllm.__version__):
        checks.check_engine()
        return
    with pytest.raises(UnsupportedError, match="has not been verified on CPU"):
        checks.check_engine()


def test_other_parameters_of_the_hook_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "current_platform", PLATFORM)
    monkeypatch.setattr(RoutedExperts, "forward_modular", lambda self, x, router_logits: x)
    with pytest.raises(UnsupportedError, match=r"forward_modular takes .*'router_logits'"):
        checks.check_engine()


def test_vllm_builds_our_layers_where_it_would_build_its_own(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(op_registry_oot, RoutedExperts.__name__, raising=False)
    balanced(routed_experts, "current_platform", PLATFORM)
    balanced(checks, "current_platform", PLATFORM)
    balanced(vllm_layers, "DeviceRoutedExperts", RoutedExperts)
    routed_experts.substitute()
    try:
        layer, _ = build(balanced)
    finally:
        del op_registry_oot[RoutedExperts.__name__]
    assert type(layer) is routed_experts.DeviceRoutedExperts


def test_vllms_loader_tells_a_layer_when_its_weights_are_final(balanced: Any) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    layer = vllm_layers.build_layer(config, parallel, NAMES[0])
    seen: list[object] = []
    balanced(layer, "update_param_tp_status", lambda: seen.append(layer.quant_method.moe_kernel))
    model = torch.nn.Module()
    model.experts = layer
    model_config: Any = SimpleNamespace(
        quantization=None, dtype=torch.bfloat16, word_embeddings_untied_by_checkpoint=True
    )
    with set_current_vllm_config(config):
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    assert seen == [layer.quant_method.moe_kernel]
    assert seen[0] is not None


def test_vllm_loads_plugins_of_the_group_that_we_register_in() -> None:
    assert engines._ENGINES["vLLM"].group == DEFAULT_PLUGINS_GROUP


def test_ranks_without_a_server_start_and_our_reading_of_flags_is_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", started.append)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # put back in any case
    flags = ["-tp", "2", "-dp=4", "-dpl", "2", "-dpn", "1", "--nnodes", "2", "--headless", "-ep"]
    flags += ["--enable-dbo", "--ubatch-size", "2", "--kv_cache_memory_bytes=99", "--port", "81"]
    monkeypatch.setattr("sys.argv", ["launch", "--model", "m", *flags])
    launch.main()
    (theirs,) = started
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    ours = vars(launch.parse_engine_flags(flags))
    assert theirs.model == "m"
    ours |= {"host": None, "kv_cache_memory_bytes": int(ours["kv_cache_memory_bytes"])}
    assert ours == {name: getattr(theirs, name) for name in ours}
