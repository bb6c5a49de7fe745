"""The vLLM adapter as on a GPU, in one process or several: ranks, settings, batches, layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from tests.support import vllm_layers
from tests.support.experts import NUM_EXPERTS, sum_of_experts, swiglu
from tests.support.vllm_transports import join_ranks
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common import group
from ultraep_serve.engines.vllm import checks, kernel, load, model
from ultraep_serve.system.environment import child_environment
from ultraep_serve.types import ExpertShape

NUM_RANKS, NUM_SLOTS = 3, 2
NUM_MASTERS = NUM_EXPERTS // NUM_RANKS
NUM_LOCAL = NUM_MASTERS + NUM_SLOTS
SHAPE = ExpertShape(NUM_RANKS, NUM_EXPERTS, NUM_SLOTS)
NAMES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def use_reference_kernels(patch: Any) -> None:
    """Have vLLM choose the kernels below where it would choose Triton's on a GPU."""

    def choose(moe: FusedMoEConfig) -> type[mk.FusedMoEExperts]:
        batched = moe.moe_parallel_config.use_batched_activation_format
        return BatchedTritonExperts if batched else TritonExperts

    patch(
        unquantized_fused_moe_method,
        "select_unquantized_moe_backend",
        lambda moe_config: (UnquantizedMoeBackend.TRITON, choose(moe_config)),
    )
    patch(
        fp8,
        "select_fp8_moe_backend",
        lambda config, **_: (Fp8MoeBackend.TRITON, choose(config)),
    )


class _Reference(mk.FusedMoEExpertsModular):
    """SwiGLU experts in float32 torch, with the contract that vLLM's kernels have."""

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    _supports_no_act_and_mul = _supports_current_device

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    _supports_parallel_config = _supports_activation

    def _expert(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, e: int) -> torch.Tensor:
        first, second = w1[e].float(), w2[e].float()
        if self.w1_scale is not None and self.w2_scale is not None:
            first, second = first * self.w1_scale[e].mean(), second * self.w2_scale[e].mean()
        return swiglu(x, first, second)


class TritonExperts(_Reference):
    """Rows in any order, global ids, an expert map."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:
        return (0,), (0,), (M, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **call: Any) -> None:
        ids, expert_map = call["topk_ids"], call["expert_map"]
        assert call["global_num_experts"] == expert_map.numel() == self.moe_config.num_experts
        assert call["w1"].shape[0] == self.moe_config.num_local_experts
        local = torch.where(ids >= 0, expert_map[ids.long().clamp(min=0)].long(), -1)
        output.copy_(
            sum_of_experts(
                hidden_states,
                local,
                call["topk_weights"],
                lambda x, e: self._expert(x, call["w1"], call["w2"], e),
            )
        )


class BatchedTritonExperts(_Reference):
    """Rows sorted by local expert."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any) -> Any:
        return (0,), (0,), (rest[2], M, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **call: Any) -> None:
        assert call["w1"].shape[0] == hidden_states.shape[0] == self.moe_config.num_local_experts
        for e, count in enumerate(call["expert_tokens_meta"].expert_num_tokens.tolist()):
            output[e, :count] = self._expert(hidden_states[e, :count], call["w1"], call["w2"], e)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's part for GPUs, with the reference kernels and the groups of rank 0."""
    replace_device(monkeypatch.setattr)
    for name in ("_EP", "_DP", "_TP", "_PCP", "_PP", "_WORLD", "_NODE_COUNT"):
        monkeypatch.setattr(parallel_state, name, None)
    join_ranks(0, NUM_RANKS, "allgather_reducescatter")
    world = SimpleNamespace(cpu_group=SimpleNamespace(get_group_store=lambda: None))
    monkeypatch.setattr(model, "get_world_group", lambda: world)
    monkeypatch.setattr(group, "require_agreement", lambda *_: None)  # with no other rank
    for module in (model, group):
        monkeypatch.setattr(module, "unanimous", lambda *_: nullcontext())


def replace_device(set_attribute: Callable[..., object]) -> None:
    """Have the adapter take the reference kernels for those of a GPU."""
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cpu")
    for module in (load, model, kernel, checks):
        set_attribute(module, "current_platform", platform)
    use_reference_kernels(set_attribute)


def configure(set_variable: Callable[[str, str], object], **settings: Any) -> None:
    config = BalanceConfig(**settings)
    set_variable("ULTRAEP_CONFIG", child_environment(config.to_json(), {})["ULTRAEP_CONFIG"])


@contextmanager
def forward_pass(config: VllmConfig, tokens_by_rank: list[int] | None) -> Iterator[None]:
    """One batch of vLLM's, with the number of tokens of every data-parallel rank."""
    metadata = DPMetadata(torch.tensor(tokens_by_rank)) if tokens_by_rank else None
    with override_forward_context(create_forward_context(None, config, metadata)):
        if metadata is None:
            yield
        else:
            with metadata.sp_local_sizes(1):
                yield


def one_scale_per_expert(weight: Any, scale: torch.Tensor, *_: Any, **__: Any) -> Any:
    """vLLM's requantisation, which needs a GPU, as far as shapes go."""
    return weight, scale.max(dim=1).values


def build(set_attribute: Any, backend: str = "allgather_reducescatter", **options: Any) -> Any:
    """A layer of rank 0 and its configuration, weights loaded, not yet balanced.

    ``made`` is called with the layer before.
    """
    set_attribute(fp8, "process_fp8_weight_tensor_strategy_moe", one_scale_per_expert)
    config = options.pop("config", None) or vllm_layers.engine_config(0, NUM_RANKS, backend, NAMES)
    quant_config = options.pop("quant_config", None)
    parallel = options.pop("parallel", None) or vllm_layers.parallel_of(0, NUM_RANKS, backend)
    made = options.pop("made", lambda _: None)
    layer = vllm_layers.build_layer(config, parallel, NAMES[0], quant_config, **options)
    made(layer)
    with set_current_vllm_config(config):
        for parameter in layer.parameters():
            parameter.data.fill_(1)
        layer.quant_method.process_weights_after_loading(layer)
    return layer, config


def fp8_config(scheme: str, block: list[int] | None) -> Fp8Config:
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=block
    )
