"""What the adapter relies on, asked of the vLLM that is on the path: any verified build."""

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
    from vllm.model_executor.model_loader import utils as loading
    from vllm.plugins import DEFAULT_PLUGINS_GROUP
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from tests.support import vllm_layers
    from tests.support.experts import NUM_EXPERTS
    from tests.support.vllm_gpu import NAMES, NUM_RANKS
    from ultraep_serve.engines.vllm import checks, launch, routed_experts
    from ultraep_serve.engines.vllm.warm_up import after_warm_up

from ultraep_serve.doctor import versions
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.versions import VLLM_CPU

PLATFORM = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)  # an NVIDIA GPU


def test_what_vllm_loads_at_start_imports_no_numba() -> None:
    """Attributes of llvmlite's stop vLLM where it looks through all modules for its own kernels."""
    modules = "ultraep_serve.engines.vllm.routed_experts, ultraep_serve.engines.vllm.group"
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


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


def test_a_newer_release_is_refused_unless_it_is_to_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "current_platform", PLATFORM)
    monkeypatch.setattr(checks.vllm, "__version__", "0.39.1")
    with pytest.raises(UnsupportedError, match=r"install vllm==0\.33\.\*, or set on_newer_engine"):
        checks.check_engine()
    assert "vLLM 0.39.1 has not been verified on NVIDIA GPUs" in checks.check_engine("try")


@pytest.mark.parametrize(
    ("owner", "name", "other", "reason"),
    [
        (
            RoutedExperts,
            "forward_modular",
            lambda self, x, topk_ids, topk_weights: None,
            r"takes \(self, x, topk_ids, topk_weights\), not \(self, x, topk_w",
        ),
        (loading, "process_weights_after_loading", lambda model: None, "update_param_tp_status"),
    ],
)
def test_what_would_change_in_silence_is_refused_in_every_release(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, other: object, reason: str
) -> None:
    monkeypatch.setattr(checks, "current_platform", PLATFORM)
    monkeypatch.setattr(checks.vllm, "__version__", "0.33.0")
    checks.check_engine()
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(UnsupportedError, match=reason):
        checks.check_engine()


@pytest.mark.parametrize("worker", ["gpu_worker.Worker", "cpu_worker.CPUWorker"])
def test_the_end_of_a_workers_warm_up_is_noticed_once(
    monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    """The method is asked for by name, as vLLM's executor does; then it is vLLM's own again."""
    name, said = "compile_or_warm_up_model", list[str]()
    kind = resolve_obj_by_qualname(f"vllm.v1.worker.{worker}")
    monkeypatch.setattr(kind, name, lambda self: said.append("warm-up"))
    original = vars(kind)[name]
    parallel = SimpleNamespace(worker_cls=f"vllm.v1.worker.{worker}")
    after_warm_up(SimpleNamespace(parallel_config=parallel), lambda: said.append("ended"))
    for _ in range(2):
        getattr(object.__new__(kind), name)()
    assert said == ["warm-up", "ended", "warm-up"]
    assert vars(kind)[name] is original


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


class Runner(torch.nn.Module):
    """What vLLM puts routed experts into."""

    def __init__(self, experts: RoutedExperts, router: object) -> None:
        super().__init__()
        self.router = router
        self.routed_experts = experts


@pytest.fixture
def substituted(balanced: Any) -> Iterator[Any]:
    balanced(routed_experts, "current_platform", PLATFORM)
    balanced(checks, "current_platform", PLATFORM)
    balanced(vllm_layers, "take_over", lambda layer: None)  # vLLM builds without our help
    balanced(routed_experts, "_hook", None)
    routed_experts.substitute()
    hook = routed_experts._hook
    routed_experts.substitute()
    assert hook is routed_experts._hook is not None
    yield balanced
    hook.remove()


@pytest.mark.parametrize("kind", [RoutedExperts, OtherExperts])
def test_experts_of_any_class_become_ours_in_their_model(
    substituted: Any, kind: type[RoutedExperts]
) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    zero_router = ZeroExpertRouter.__new__(ZeroExpertRouter)
    layers = []
    for name, router in zip(NAMES, (object(), zero_router), strict=True):
        layer = vllm_layers.build_layer(config, parallel, name, kind=kind)
        assert type(layer) is kind
        with set_current_vllm_config(config):
            runner = Runner(layer, router)
            other = torch.nn.ModuleList([runner.routed_experts])  # registered again
        assert other[0] is runner.routed_experts is layer
        assert isinstance(layer, routed_experts.DeviceRoutedExperts)
        assert isinstance(layer, kind)
        assert type(layer).__name__ in (kind.__name__, "DeviceRoutedExperts")
        layers.append(layer)
    assert [layer._has_zero_experts for layer in layers] == [False, True]
    assert layers[0]._group is layers[1]._group
    assert layers[0]._group._num_expected == len(NAMES)


def test_experts_that_look_at_logical_ids_themselves_are_refused_at_load(substituted: Any) -> None:
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    layer = vllm_layers.build_layer(config, parallel, NAMES[0], kind=SubstitutedExperts)
    with set_current_vllm_config(config):
        Runner(layer, None)
    assert isinstance(layer, routed_experts.DeviceRoutedExperts)
    reason = f"{NAMES[0]}: SubstitutedExperts computes its experts in a way of its own"
    for check in (checks.check_layer, checks.check_cpu_execution):  # the latter without balancing
        with pytest.raises(UnsupportedError, match=reason):
            check(layer)
    with set_current_vllm_config(config), pytest.raises(UnsupportedError, match=reason):
        layer.update_param_tp_status()  # the last one that vLLM loads


def test_vllms_own_substituted_experts_are_refused_by_vllm_or_else_by_us() -> None:
    """vLLM has no expert parallelism for them; if it ever does, they look at logical ids."""
    module = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.expert_substitution",
        reason="vLLM before 0.33 has no such experts",
    )
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES[:1])
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    kind = module.SubstitutedRoutedExperts
    constants = SimpleNamespace(num_compute_experts=NUM_EXPERTS)
    made: Any = functools.partial(kind, expert_substitution=constants)
    with pytest.raises(NotImplementedError, match="does not support: expert parallelism"):
        vllm_layers.build_layer(config, parallel, NAMES[0], kind=made)
    ours = routed_experts._put_before(routed_experts.DeviceRoutedExperts, kind)
    problem = checks._wrong_class(ours.__new__(ours))
    assert problem is not None
    assert problem.startswith("SubstitutedRoutedExperts computes its experts in a way of its own")


def test_models_that_nobody_asked_to_balance_keep_their_layers(
    substituted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ULTRAEP_CONFIG", raising=False)
    config = vllm_layers.engine_config(0, NUM_RANKS, "allgather_reducescatter", NAMES)
    parallel = vllm_layers.parallel_of(0, NUM_RANKS, "allgather_reducescatter")
    layer = vllm_layers.build_layer(config, parallel, NAMES[0], kind=OtherExperts)
    with set_current_vllm_config(config):
        Runner(layer, None)
    assert type(layer) is OtherExperts


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
        loading.process_weights_after_loading(model, model_config, torch.device("cpu"))
    assert seen == [layer.quant_method.moe_kernel]
    assert seen[0] is not None


def test_vllm_loads_plugins_of_the_group_that_we_register_in() -> None:
    assert versions._GROUPS["vLLM"] == DEFAULT_PLUGINS_GROUP


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
