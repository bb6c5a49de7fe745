"""Quantised experts on CPU: vLLM's own kernels compute from slots what they do from masters.

vLLM chooses these kernels where there is AMX; they also run with AVX512-BF16, which is all that the
processes here ask for (``torch.ops._C.fused_experts_cpu``). Below, vLLM's build for this CPU has
none of them, and such a checkpoint is refused before it is loaded.
"""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make setup")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization import get_quantization_config

    import tests.support.vllm_transports as transports
    from tests.support import vllm_layers
    from tests.support.vllm_gpu import forward_pass
    from ultraep_serve.engines.vllm import layer_checks
    from ultraep_serve.engines.vllm.host import put_in_kernels
    from ultraep_serve.engines.vllm.model import balance

from tests.support.experts import ALWAYS_PAYS, NUM_EXPERTS, expected_output, make_batch
from tests.support.hosts import engine_group, meet_in
from tests.support.quantised import SCHEMES
from tests.support.ranks import run_settings
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError

NUM_RANKS, NUM_SLOTS = 2, 2
NUM_MASTERS = NUM_EXPERTS // NUM_RANKS
HIDDEN, INNER = 256, 128  # multiples of an FP8 block
NUM_LAYERS = 2
BACKEND = "allgather_reducescatter"
HAS_AMX = torch.cpu._is_amx_tile_supported()
HAS_KERNELS = hasattr(torch.ops._C, "fused_experts_cpu")  # in the build for this CPU
UNQUANTISED = "X86CPUUnquantizedExperts" if HAS_AMX else "CPUUnquantizedExperts"


@dataclass(frozen=True)
class Case:
    """A checkpoint's format, and the kernel that vLLM has for it."""

    scheme: str  # of tests.support.quantised; empty: not quantised
    kernel: str
    error: float  # the largest, relative to what is computed in float32 without quantisation
    has_bias: bool = False
    apart: float = 0.0  # the largest relative difference between balanced and not


CASES = {
    "bfloat16 with biases": Case("", UNQUANTISED, 0.02, has_bias=True),
    # These two add up an expert's rows in another order where they are few.
    "fp8": Case("fp8", "CPUExpertsFp8", 0.1, apart=0.005),
    "fp8 with fp8 activations": Case("fp8", "CPUExpertsFp8W8A8", 0.15, apart=0.005),
    "int8": Case("int8", "CPUExpertsInt8", 0.1),
    "int4": Case("int4", "CPUExpertsInt4", 0.5),
    "mxfp4": Case("mxfp4", "CPUExpertsMxfp4", 0.5),
}
RUNS_HERE = {name: case for name, case in CASES.items() if HAS_KERNELS or not case.scheme}


def compute_on_rank(rank: int, run_dirs: list[str]) -> list[list[dict[str, Any]]]:
    engine_group(run_dirs[0], rank, NUM_RANKS)
    transports.join_ranks(rank, NUM_RANKS, BACKEND)
    vllm_layers.HIDDEN, vllm_layers.INNER = HIDDEN, INNER
    for case in CASES.values():
        choose(case.kernel, False)
    return [
        compute_case(case, rank, run_dir)
        for case, run_dir in zip(RUNS_HERE.values(), run_dirs, strict=True)
    ]


def choose(kernel: str, runs_here: bool) -> None:
    """Have vLLM believe that a kernel runs on this machine, or does not."""
    found: Any = getattr(cpu_moe, kernel)
    found._supports_current_device = staticmethod(lambda: runs_here)


def compute_case(case: Case, rank: int, run_dir: str) -> list[dict[str, Any]]:
    """How a batch came out of every layer, balanced and with all experts at home."""
    meet_in(run_dir)
    settings = BalanceConfig(
        slots=NUM_SLOTS,
        costs=ALWAYS_PAYS,
        min_batch_tokens=8,
    )
    choose(case.kernel, True)
    names = [f"layers.{index}" for index in range(NUM_LAYERS)]
    config = vllm_layers.engine_config(rank, NUM_RANKS, BACKEND, names)
    layers = [make_layer(case, rank, config, name) for name in names]
    weights = [make_weights(case, seed) for seed in range(NUM_LAYERS)]
    for layer, own in zip(layers, weights, strict=True):
        vllm_layers.load(layer, config, stored(case, own))
    choose(case.kernel, False)
    put_in_kernels(layers, 60.0)
    with set_current_vllm_config(config):
        balanced = balance(settings, config, layers)
    found = [
        run_batch(layer, config, own, rank) for layer, own in zip(layers, weights, strict=True)
    ]
    balanced.require_in_place()
    return found


def make_layer(case: Case, rank: int, config: Any, name: str) -> Any:
    quant_config = None
    if case.scheme:
        settings = SCHEMES[case.scheme].config([])
        method = settings["quant_method"]
        quant_config = get_quantization_config(method).from_config(settings)
    return vllm_layers.build_layer(
        config,
        vllm_layers.parallel_of(rank, NUM_RANKS, BACKEND),
        name,
        quant_config,
        has_bias=case.has_bias,
    )


def make_weights(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Experts of different sizes, so that one's scales are wrong for another."""
    generator = torch.Generator().manual_seed(seed)
    experts = NUM_EXPERTS
    size = torch.arange(1.0, 1.0 + experts).view(-1, 1, 1) / experts
    w13 = torch.randn(experts, 2 * INNER, HIDDEN, generator=generator) * size / HIDDEN**0.5
    w2 = torch.randn(experts, HIDDEN, INNER, generator=generator) * size / INNER**0.5
    found = {"w13_weight": w13, "w2_weight": w2}
    if case.has_bias:
        found["w13_bias"] = torch.randn(experts, 2 * INNER, generator=generator)
        found["w2_bias"] = torch.randn(experts, HIDDEN, generator=generator)
    return found


def stored(case: Case, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as vLLM's parameters hold them when the checkpoint has been read."""
    if not case.scheme:
        return weights
    found = {}
    for name in ("w13", "w2"):
        write = SCHEMES[case.scheme].write
        parts = [write(matrix, matrix.abs().max()) for matrix in weights[f"{name}_weight"]]
        for suffix in parts[0]:
            found[f"{name}_{suffix}"] = torch.stack([part[suffix] for part in parts])
    return found


def run_batch(
    layer: Any, config: Any, weights: dict[str, torch.Tensor], rank: int
) -> dict[str, Any]:
    batch = make_batch(rank, 192, HIDDEN)
    masters = torch.from_numpy(identity_table(NUM_EXPERTS, NUM_RANKS, NUM_SLOTS))
    stage, taken = layer.quant_method.moe_kernel.prepare_finalize, []
    prepare = stage.wrapped.prepare
    stage.wrapped.prepare = lambda *of, **named: (taken.append(of[2]), prepare(*of, **named))[1]
    home = torch.where(batch.ids < 0, -1, masters[batch.ids.long()]).int()
    with forward_pass(config, transports.everywhere(batch.x.shape[0])):
        balanced = layer.forward_modular(batch.x, batch.weights, batch.ids)
        with stage._flow.unbalanced():
            off = layer.forward_modular(batch.x, batch.weights, home)
    expected = expected_output(batch, weights)
    num_local = NUM_MASTERS + NUM_SLOTS
    return {
        "kernel": type(layer.quant_method.moe_kernel.fused_experts.kernel).__name__,
        "on_slots": int((taken[0] % num_local >= NUM_MASTERS)[taken[0] >= 0].sum()),
        "apart": float((balanced.float() - off.float()).norm() / off.float().norm()),
        "error": float((balanced.float() - expected).norm() / expected.norm()),
    }


@pytest.fixture(scope="module")
def computed() -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks' layers by case."""
    ranks = run_settings(compute_on_rank, NUM_RANKS, RUNS_HERE)
    return {
        name: [layer for found in of_ranks for layer in found] for name, of_ranks in ranks.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_replicas_compute_what_their_masters_would(computed: Any, name: str) -> None:
    if name not in RUNS_HERE:
        pytest.skip("vLLM's build for this CPU has no quantised experts; it needs AVX512-BF16")
    assert sum(layer["on_slots"] for layer in computed[name]) > 0
    for layer in computed[name]:
        assert layer["kernel"] == CASES[name].kernel
        assert layer["apart"] <= CASES[name].apart
        assert layer["error"] < CASES[name].error


class CpuLayer(SimpleNamespace):
    forward_modular = RoutedExperts.forward_modular


def cpu_layer(kernel: str, **changes: Any) -> Any:
    """A layer that one of vLLM's kernels computes, as far as the checks look at it."""
    cls = getattr(cpu_moe, kernel)
    experts = cls.__new__(cls)
    method = SimpleNamespace(is_monolithic=False, moe_kernel=SimpleNamespace(fused_experts=experts))
    values: dict[str, Any] = {
        "layer_name": "layer",
        "quant_method": method,
        "moe_config": SimpleNamespace(
            moe_parallel_config=vllm_layers.parallel_of(0, NUM_RANKS, BACKEND)
        ),
        "expert_placement_strategy": "linear",
        "apply_router_weight_on_input": False,
    }
    return CpuLayer(**{**values, **changes})


def test_kernels_are_accepted_and_refused_by_name() -> None:
    layer_checks.check_cpu_execution(cpu_layer("CPUExpertsFp8"))
    for kernel in ("ZenCPUExpertsInt8", "ArmCPUExpertsInt8"):
        with pytest.raises(UnsupportedError, match=f"{kernel} has not been verified; use an unq"):
            layer_checks.check_cpu_execution(cpu_layer(kernel))
    on_input = cpu_layer("CPUExpertsFp8", apply_router_weight_on_input=True)
    with pytest.raises(UnsupportedError, match="CPUExpertsFp8 takes no router weights"):
        layer_checks.check_cpu_execution(on_input)
    on_input.quant_method.is_monolithic = True
    with pytest.raises(UnsupportedError, match="CPUExpertsFp8 routes inside its kernel"):
        layer_checks.check_cpu_execution(on_input)
