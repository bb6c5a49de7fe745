"""Expert kernels in plain torch, where vLLM would choose Triton's on a GPU."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization import fp8

from tests.support.experts import sum_of_experts, swiglu


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
