"""What the SGLang adapter accepts on GPUs, and what it refuses; one process."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when SGLang has it compile
    from tests.support import sglang_fakes as fakes  # has what SGLang looks for

    # isort: split
    from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from ultraep_serve.engines.sglang import checks, hooks, model, plugin, quantised

from tests.support.engine_flags import run_reader
from tests.support.published_lines import ROWS, Row
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher import engine
from ultraep_serve.launcher import sglang as launcher
from ultraep_serve.launcher.engine import EngineCommand
from ultraep_serve.types import Policy

FP8 = Fp8Config(
    is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
)


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.pretend_gpu(monkeypatch.setattr)


def refusal(check: Any, subject: Any) -> str:
    with pytest.raises(UnsupportedError) as error:
        check(subject)
    assert "set on_unsupported to off" in str(error.value)
    return str(error.value)


# Settings


@pytest.mark.parametrize("changes", [{}, {"attn_dp_size": 3}, fakes.DEEPEP])
def test_what_is_verified_is_accepted(changes: dict[str, Any]) -> None:
    checks.check_settings(resolving_view(fakes.publish(**changes)))
    checks.check_device_execution(fakes.loaded_layer(**changes))


REFUSED: list[tuple[str, object, str]] = [
    ("moe_a2a_backend", "mooncake", "use --moe-a2a-backend none or deepep"),
    ("moe_a2a_backend", "deepep_v2", "use --moe-a2a-backend none or deepep"),
    ("moe_a2a_backend", "flashinfer", "use --moe-a2a-backend none or deepep"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
    ("enable_single_batch_overlap", True, "drop --enable-single-batch-overlap"),
    ("enable_lora", True, "drop --enable-lora"),
    ("enable_torch_compile", True, "--enable-torch-compile"),
    ("enable_deterministic_inference", True, "same sums whatever else is in a batch"),
    ("pp_size", 2, "--pp-size 1"),
    ("dp_size", 2, "--attn-dp-size for one group"),
    ("attn_cp_size", 2, "--attn-cp-size 1"),
    ("moe_dp_size", 2, "--moe-dp-size"),
    ("dwdp_size", 3, "--dwdp-size"),
    ("enable_pdmux", True, "drop it"),
    ("enable_layernorm_sp", True, "drop it"),
    ("enable_nvidia_megakernel", True, "drop it"),
    ("enable_eplb", True, "--enable-eplb"),
    ("enable_waterfill", True, "--enable-waterfill"),
    ("ep_num_redundant_experts", 3, "--ep-num-redundant-experts"),
    ("init_expert_location", "/there.json", "must be trivial"),
    ("ep_dispatch_algorithm", "lp", "LPLB"),
    ("ep_dispatch_algorithm", "dynamic", "--ep-dispatch-algorithm"),
    ("elastic_ep_backend", "mooncake", "--elastic-ep-backend"),
    ("enable_elastic_expert_backup", True, "--enable-elastic-expert-backup"),
    ("enable_paged_experts", True, "--enable-paged-experts"),
    ("kt_weight_path", "/there", "--kt-weight-path"),
    ("cpu_offload_gb", 1, "--cpu-offload-gb"),
    ("offload_group_size", 2, "--offload-group-size"),
    ("enable_memory_saver", True, "--enable-memory-saver"),
    ("weight_cache_mode", "auto", "--weight-cache-mode off"),
    ("startup_weight_load_mode", "overlap", "must be serial"),
    ("expert_distribution_recorder_mode", "stat_approx", "use stat"),
    ("disaggregation_mode", "decode", "runs on other servers"),
    ("dllm_algorithm", "LowConfidence", "drop it"),
    ("ep_size", 1, "ranks share parts of every expert; choose the same for both"),
    ("tp_size", 6, "choose the same for both"),
    ("tp_size", 1, "there is nothing to balance on one rank"),
]


@pytest.mark.parametrize(("name", "value", "says"), REFUSED)
def test_settings_that_do_not_go_with_slots(name: str, value: object, says: str) -> None:
    view = Changed(resolving_view(fakes.publish()), **{name: value})
    assert says in refusal(checks.check_settings, view)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.engine == "sglang" and row.result == "accepted"]
)
def test_published_lines_that_the_launcher_accepts_are_accepted(row: Row) -> None:
    with patch.object(engine, "run_reader", run_reader):
        default, own = (
            vars(engine.read_flags("sglang", words)) for words in (["--model", "m"], row.words)
        )
    given = {name: value for name, value in own.items() if value != default[name]}
    given["ep_size"] = given["tp_size"]  # as SGLang resolves it for DeepEP
    checks.check_settings(Changed(resolving_view(fakes.publish()), **given))


def test_every_setting_that_is_judged_can_be_refused() -> None:
    judged = {name for name, _, _ in (*launcher.ANYWHERE, *checks._ON_GPU)}
    assert judged <= {name for name, _, _ in REFUSED}


class Changed:
    """SGLang's resolved settings, but for some."""

    def __init__(self, resolved: Any, **changes: object) -> None:
        self._resolved = resolved
        vars(self).update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolved, name)


@pytest.mark.parametrize(
    ("graphs", "says"),
    [
        ({"prefill": PhaseConfig("breakable")}, "add --disable-prefill-cuda-graph"),
        ({"prefill": PhaseConfig("full")}, "add --disable-prefill-cuda-graph"),
        ({"prefill": PhaseConfig(), "decode": PhaseConfig("breakable")}, "use full"),
    ],
)
def test_phases_that_the_host_does_not_see(graphs: dict[str, PhaseConfig], says: str) -> None:
    view = Changed(resolving_view(fakes.publish()), cuda_graph_config=CudaGraphConfig(**graphs))
    assert says in refusal(checks.check_settings, view)


def test_with_deepep_prefill_may_be_in_breakable_graphs() -> None:
    """SGLang's default there; experts run between the graphs' parts, at every replay."""
    resolved = resolving_view(fakes.publish(**fakes.DEEPEP))
    graphs = {name: CudaGraphConfig(prefill=PhaseConfig(name)) for name in ("breakable", "full")}
    checks.check_settings(Changed(resolved, cuda_graph_config=graphs["breakable"]))
    says = refusal(checks.check_settings, Changed(resolved, cuda_graph_config=graphs["full"]))
    assert "prefill in CUDA graphs (full)" in says


def test_schedulers_must_tell_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    view = resolving_view(fakes.publish(**fakes.DEEPEP))
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    assert "SGLANG_SCHEDULER_SKIP_ALL_GATHER" in refusal(checks.check_settings, view)


def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_cuda", lambda: False)
    assert "only on NVIDIA GPUs and for --device cpu" in refusal(checks.check_engine, "refuse")


def test_a_newer_release_is_refused_unless_it_is_to_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "is_cuda", lambda: True)
    monkeypatch.setattr(checks.metadata, "version", lambda _: "0.5.24")
    assert "or set on_newer_engine to try" in refusal(checks.check_engine, "refuse")
    assert "SGLang 0.5.24 has not been verified" in checks.check_engine("try")


def test_sglang_ends_where_the_adapter_does_not_import(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would log what a plugin raises, and serve without it."""
    monkeypatch.setattr("ultraep_serve.system.refusals.repeat_at_exit", lambda: None)
    monkeypatch.setitem(sys.modules, "ultraep_serve.engines.sglang.hooks", None)
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    reason = "this SGLang is not one that can be balanced: import of ultraep_serve.engines.sglang.h"
    with pytest.raises(SystemExit, match=reason):
        plugin.register()
    monkeypatch.setenv("ULTRAEP_CONFIG", '{"policy": "off"}')
    plugin.register()
    assert reason in caplog.text


def test_a_hooked_function_with_other_parameters_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks.check_hooked_functions()
    other = lambda self, topk_output, hidden_states: None  # noqa: E731
    monkeypatch.setattr(BaseDispatcher, "_dispatch_with_hook", other)
    with pytest.raises(UnsupportedError, match=r"takes \(self, topk_output, hidden_states\), not"):
        hooks.check_hooked_functions()


def test_every_setting_that_is_judged_is_sglangs() -> None:
    judged = {name for name, _, _ in (*launcher.ANYWHERE, *launcher.ON_CPU, *checks._ON_GPU)}
    assert judged <= set(POSITIONAL_FIELD_ORDER)


# Layers


def test_accepted_names_are_sglangs_own() -> None:
    assert {StandardDispatcher.__name__, DeepEPDispatcher.__name__} == set(checks._DISPATCHERS)


def test_other_dispatch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fakes.loaded_layer()
    monkeypatch.setattr(checks, "_DISPATCHERS", ())
    assert "FusedMoE with StandardDispatcher has not been verified" in refusal(
        checks.check_device_execution, layer
    )


@pytest.mark.parametrize(
    ("changes", "base"), [({}, FusedMoE), (fakes.DEEPEP, DeepEPMoE)], ids=["tensor", "deepep"]
)
def test_subclasses_are_balanced_unless_they_go_their_own_way(
    changes: dict[str, Any], base: type[FusedMoE]
) -> None:
    """A model may bring its own class; what matters is that its calls pass the hook."""
    layer = fakes.loaded_layer(**changes)
    layer.__class__ = type("TheirExperts", (base,), {"load": lambda self: None})
    checks.check_layer(layer)
    for name in ("forward", "forward_impl", "run_moe_core"):
        layer.__class__ = type("TheirExperts", (base,), {name: lambda self: None})
        assert f"TheirExperts has a {name} of its own" in refusal(checks.check_layer, layer)


def test_experts_that_deepep_cannot_run_are_refused() -> None:
    layer = fakes.loaded_layer(**fakes.DEEPEP)
    layer.deprecate_flag = False
    assert "use --moe-runner-backend deep_gemm" in refusal(checks.check_device_execution, layer)


def test_runners_that_route_themselves_are_refused() -> None:
    layer = fakes.loaded_layer()
    layer.runner_backend = MoeRunnerBackend.FLASHINFER_TRTLLM
    says = refusal(checks.check_device_execution, layer)
    assert "MoE runner flashinfer_trtllm routes inside its kernel" in says
    assert "use --moe-runner-backend triton or deep_gemm or flashinfer_cutlass" in says
    layer.runner_backend = None
    assert "MoE runner None" in refusal(checks.check_device_execution, layer)


def test_other_quantisations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fakes.loaded_layer(FP8)
    layer.quant_method.use_mxfp8 = True
    assert "MXFP8 and FP4 experts of an FP8 checkpoint" in refusal(
        checks.check_device_execution, layer
    )
    monkeypatch.setattr(quantised, "_RUNNERS", {})
    assert "quantisation Fp8MoEMethod has not" in refusal(checks.check_device_execution, layer)


def test_fused_shared_experts_and_uneven_experts_are_refused() -> None:
    layer = fakes.loaded_layer()
    layer.num_experts = 13
    assert "choose an --ep-size that divides them" in refusal(checks.check_layer, layer)
    layer.num_fused_shared_experts = 1
    assert "--disable-shared-experts-fusion" in refusal(checks.check_layer, layer)


@pytest.mark.parametrize("as_parameter", [True, False])
def test_tensors_outside_sglangs_rule_are_refused(as_parameter: bool) -> None:
    layer = fakes.loaded_layer()
    kept = torch.nn.Parameter(torch.ones(fakes.SHAPE.num_masters))
    kept._sglang_require_global_experts = True  # type: ignore[attr-defined]  # as SGLang marks them
    layer.w13_alpha = kept if as_parameter else kept.data
    with pytest.raises(UnsupportedError, match=r"w13_alpha .* cannot be moved"):
        model.movable_parameters(layer)


# Starting


def engine_command(flags: list[str], policy: Policy) -> EngineCommand:
    words = ["--model", "some/model", *flags]
    with patch.object(engine, "run_reader", run_reader):
        parsed = engine.read_flags("sglang", words)
    return launcher.engine_command(parsed, words, BalanceConfig(policy=policy))


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ([], ["--disable-prefill-cuda-graph", "--disable-shared-experts-fusion"]),
        (["--cuda-graph-backend-prefill", "full"], ["--disable-shared-experts-fusion"]),
        (["--disable-cuda-graph", "--enforce-shared-experts-fusion"], []),
        (["--moe-a2a-backend", "deepep"], ["--disable-shared-experts-fusion"]),
    ],
)
def test_server_is_started_with_what_balancing_needs(flags: list[str], added: list[str]) -> None:
    ranks = ["--device", "cuda", "--tp-size", "4", "--ep-size", "4"]
    for policy, expected in ((Policy.QUOTA, added), (Policy.OFF, [])):
        command = engine_command([*ranks, *flags], policy)
        assert command.arguments[-len([*ranks, *flags, *expected]) :] == [*ranks, *flags, *expected]


def test_attention_data_parallelism_is_one_group_in_both_spellings() -> None:
    """And ``--dp-size`` alone is not: its replicas know nothing of each other."""
    groups = ["--device", "cuda", "--tp", "8", "--moe-a2a-backend", "deepep"]
    for spelling in (["--dp", "8", "--enable-dp-attention"], ["--attn-dp-size", "8"]):
        words = [*groups, *spelling]
        assert engine_command(words, Policy.QUOTA).arguments[5 : 5 + len(words)] == words
    with pytest.raises(UnsupportedError, match="every replica balances apart"):
        engine_command([*groups, "--dp", "8"], Policy.QUOTA)


def test_its_tuned_kernels_are_found_for_experts_and_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "")  # put back in any case
    use_tuned_kernels("sglang", 2, tmp_path)
    assert os.environ["SGLANG_MOE_CONFIG_DIR"] == str(tmp_path)  # fused_moe_triton_config reads it
    folder = Path(fused_moe_triton_config.__file__).parent
    own = {path.relative_to(folder) for path in folder.glob("configs/triton_*/E=64,*")}
    assert own
    for name in own:
        assert (tmp_path / name).read_text() == (folder / name).read_text()
        more = name.with_name(name.name.replace("E=64,", "E=66,"))
        assert (tmp_path / more).exists()
