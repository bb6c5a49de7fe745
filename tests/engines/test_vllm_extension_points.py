"""What the adapter relies on, asked of the vLLM that is on the path: any verified build."""

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.plugins import DEFAULT_PLUGINS_GROUP
    from vllm.triton_utils import dispatcher
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from tests.support import vllm_layers
    from tests.support.vllm_gpu import NAMES, NUM_RANKS, NUM_SLOTS, SHAPE, build, configure
    from ultraep_serve.engines.vllm import (
        checks,
        expert_tensors,
        headless,
        kernel,
        layer_checks,
        load,
        model,
    )
    from ultraep_serve.engines.vllm.stage import BalancedStage, VllmFlow

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher.engine import PLUGIN_GROUPS
from ultraep_serve.system.versions import VLLM_CPU
from ultraep_serve.types import Policy, TokenView


def test_what_vllm_loads_at_start_imports_no_numba() -> None:
    """Attributes of llvmlite's stop vLLM where it looks through all modules for its own kernels."""
    modules = "ultraep_serve.engines.vllm.plugin, ultraep_serve.engines.vllm.load"
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_this_version_is_accepted_where_it_was_served_and_a_newer_one_if_it_is_to_be_tried(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: not on_cpu)
    monkeypatch.setattr(checks, "current_platform", platform)
    if not on_cpu or VLLM_CPU.is_verified(checks.vllm.__version__):
        checks.check_engine()
    monkeypatch.setattr(checks.vllm, "__version__", "0.39.1")
    with pytest.raises(UnsupportedError, match=r"install vllm.*, or set on_newer_engine"):
        checks.check_engine()
    where = "CPU" if on_cpu else "NVIDIA GPUs"
    assert f"vLLM 0.39.1 has not been verified on {where}" in checks.check_engine("try")


@pytest.mark.parametrize("name", ["prepare", "prepare_async"])
def test_what_would_change_in_silence_is_refused_in_every_release(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(checks, "current_platform", platform)
    checks.check_engine("try")
    other = lambda self, a1, topk_ids, topk_weights: None  # noqa: E731
    monkeypatch.setattr(mk.FusedMoEPrepareAndFinalizeModular, name, other)
    with pytest.raises(UnsupportedError, match=r"takes \(self, a1, topk_ids, topk_weights\), not"):
        checks.check_engine("try")


def test_its_tuned_kernels_are_found_for_experts_and_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "")  # put back in any case
    rest = ",N=1280,device_name=NVIDIA_H100_80GB_HBM3.json"
    monkeypatch.setattr(fused_moe, "get_config_file_name", lambda experts, *_: f"E={experts}{rest}")
    look = fused_moe.get_moe_configs.__wrapped__  # it remembers what it found
    assert look(68, 1280, None) is None
    use_tuned_kernels("vllm", 4, tmp_path / "tuned")
    assert look(68, 1280, None) == look(64, 1280, None) is not None


class OtherExperts(RoutedExperts):
    """As models bring them, for checkpoints of their own."""


class SubstitutedExperts(RoutedExperts):
    """As 0.33 has one: constants take the place of some experts, by their logical ids."""

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, *rest: Any) -> Any:
        return super().forward_modular(x, topk_weights, topk_ids % 2, *rest)


@pytest.fixture
def joined() -> Iterator[None]:
    """Workers load as they do when our plugin has been called, twice in a process."""
    there = "load_model" in vars(WorkerWrapperBase)
    load.join_workers()
    load.join_workers()
    yield
    if not there:
        del WorkerWrapperBase.load_model


def loaded(config: Any, seen: list[Any]) -> Any:
    """A worker that vLLM's executor has asked by name to load its model."""
    wrapper = WorkerWrapperBase()
    wrapper.vllm_config = config
    wrapper.worker = SimpleNamespace(load_model=lambda **named: seen.append(named))
    run_method(wrapper, "load_model", (), {"load_dummy_weights": True})
    return wrapper.worker


@pytest.mark.parametrize("settings", [{}, {"slots": NUM_SLOTS + 1}])
def test_a_workers_model_is_taken_over_when_it_has_been_loaded(
    joined: None, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    """With the settings that vLLM's own configuration has."""
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    config.additional_config = {"ultraep": settings}
    seen: list[Any] = []
    on_gpu(model, "take_over", lambda *given: seen.append(given))
    worker = loaded(config, seen)
    assert seen == [{"load_dummy_weights": True}, (BalanceConfig(**settings), worker, config)]


@pytest.mark.parametrize("policy", [None, Policy.OFF])
def test_models_on_a_gpu_that_nobody_asked_to_balance_are_left_alone(
    joined: None, on_gpu: Any, monkeypatch: pytest.MonkeyPatch, policy: Policy | None
) -> None:
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    if policy is not None:
        configure(monkeypatch.setenv, policy=policy)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    seen: list[Any] = []
    on_gpu(model, "take_over", lambda *given: pytest.fail("taken over"))
    loaded(config, seen)
    assert seen == [{"load_dummy_weights": True}]


def test_workers_that_are_asked_in_another_way_are_not_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WorkerWrapperBase, "load_model", lambda self: None, raising=False)
    with pytest.raises(AttributeError, match="does not hand load_model on to its worker"):
        load.join_workers()


@pytest.mark.parametrize("worker", ["gpu_worker.Worker", "cpu_worker.CPUWorker"])
def test_executors_ask_a_worker_by_the_names_that_are_watched(worker: str) -> None:
    """What an object has of its own comes before what its class has."""
    kind = resolve_obj_by_qualname(f"vllm.v1.worker.{worker}")
    asked, name = object.__new__(kind), "compile_or_warm_up_model"
    assert callable(getattr(kind, name))
    assert callable(GPUModelRunner.execute_model)
    said: list[str] = []
    setattr(asked, name, lambda: said.append("warm-up"))
    model._around(asked, name, after=lambda: said.append("ended"))
    wrapper = WorkerWrapperBase()
    wrapper.worker = asked
    run_method(wrapper, name, (), {})
    assert said == ["warm-up", "ended"]


@pytest.mark.parametrize("kind", [RoutedExperts, OtherExperts])
def test_layers_of_any_class_get_the_stage_that_balances(
    balanced: Any, kind: type[RoutedExperts]
) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    layer, _ = build(balanced, config=config, kind=kind)
    layer_checks.check_layer(layer)
    layer_checks.check_device_execution(layer, slots=2)
    stage = layer.quant_method.moe_kernel.prepare_finalize
    assert isinstance(stage, mk.FusedMoEPrepareAndFinalizeModular)
    wrapper = BalancedStage(stage, 0, VllmFlow(TokenView.OWN))
    layer.quant_method.moe_kernel.impl.prepare_finalize = wrapper
    assert layer.quant_method.moe_kernel.prepare_finalize is wrapper


def test_experts_that_look_at_logical_ids_themselves_are_refused(balanced: Any) -> None:
    layer, _ = build(balanced, kind=SubstitutedExperts)
    reason = f"{NAMES[0]}: SubstitutedExperts computes its experts in a way of its own"
    # the latter also where nobody balances
    for check in (layer_checks.check_layer, layer_checks.check_cpu_execution):
        with pytest.raises(UnsupportedError, match=reason):
            check(layer)


def test_every_question_about_a_stage_is_answered_by_the_one_that_is_wrapped() -> None:
    """Of a stage's own methods none is answered by its base class, whatever a release adds."""
    base = mk.FusedMoEPrepareAndFinalizeModular
    asked = {
        name
        for kind in base.__mro__[:-1]
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    assert asked <= vars(BalancedStage).keys()


def test_a_stage_with_slots_is_made_where_vllm_makes_stages_of_any_backend(
    balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is found there however vLLM chooses it, by a registry of others' stages too."""
    layer, _ = build(balanced)
    made, asked = object(), list[Any]()
    monkeypatch.setattr(
        kernel, "maybe_make_prepare_finalize", lambda **given: (asked.append(given), made)[1]
    )
    weights = ExpertWeights(layer, expert_tensors.expert_parameters(layer))
    stage, experts = kernel._made_again(weights, SHAPE)
    assert stage is made
    ((moe,),) = ([given["moe"]] for given in asked)
    assert moe is experts.moe_config
    numbers = moe.num_experts, moe.num_local_experts
    assert numbers == (SHAPE.num_ranks * SHAPE.num_local, SHAPE.num_local)


def test_an_engine_starts_where_another_one_was_balanced() -> None:
    """vLLM looks into all modules when its workers start, numba's by then among them."""
    importlib.import_module("numba")
    load._let_modules_be_scanned()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it looks at
        dispatcher._rebind_kernels([(object(), object())])


def test_vllm_loads_plugins_of_the_group_that_we_register_in() -> None:
    assert PLUGIN_GROUPS["vllm"] == DEFAULT_PLUGINS_GROUP


def test_ranks_without_a_server_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", started.append)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")  # put back in any case
    flags = ["-tp", "2", "-dp=4", "-dpl", "2", "-dpn", "1", "--nnodes", "2", "--headless", "-ep"]
    flags += ["--enable-dbo", "--ubatch-size", "2", "--kv_cache_memory_bytes=99", "--port", "81"]
    flags += ["--gpu-memory-utilization", "0.5"]
    monkeypatch.setattr("sys.argv", ["headless", "--model", "m", *flags])
    headless.main()
    (theirs,) = started
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert theirs.model == "m"
    assert (theirs.headless, theirs.data_parallel_size_local) == (True, 2)
