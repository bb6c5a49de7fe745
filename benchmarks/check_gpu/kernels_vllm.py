"""vLLM's modular expert kernels, chosen, brought into order and made by vLLM's own functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from expert_layer import BLOCK, Compute, ExpertKernel, Masters, Sizes
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.worker.workspace import init_workspace_manager

_BACKENDS = {
    "bf16": ("triton", "flashinfer_cutlass"),
    "fp8-block": ("triton", "deep_gemm", "marlin", "flashinfer_cutlass"),
    "fp8-channel": ("triton", "cutlass", "marlin"),
}
_KEYS = {
    "bf16": (None, None),
    "fp8-block": (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym),
    "fp8-channel": (quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym),
}


@contextmanager
def ready(device: torch.device) -> Iterator[None]:
    """vLLM's settings and work space."""
    load_general_plugins()  # as vLLM does wherever it runs
    config = VllmConfig()
    init_workspace_manager(device)
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=1):
        yield


def kernels(sizes: Sizes, device: torch.device) -> list[ExpertKernel | str]:
    """Each kernel, or why this machine has not got it."""
    if not current_platform.is_cuda():
        return [f"this vLLM is built for {current_platform.device_name}"]
    return [
        _offer(sizes, device, kind, backend)
        for kind, backends in _BACKENDS.items()
        for backend in backends
    ]


def _offer(sizes: Sizes, device: torch.device, kind: str, name: str) -> ExpertKernel | str:
    config = _config(sizes, device, 0)
    try:
        if kind == "bf16":
            backend = unquantized.map_unquantized_backend(name)
            kinds = unquantized.backend_to_kernel_cls(backend)
        else:
            backend = fp8.map_fp8_backend(name)
            kinds = fp8.backend_to_kernel_cls(backend)
    except (ImportError, ValueError) as error:
        return f"{name}, {kind}: {error}"
    reason = "it routes itself"
    for experts in kinds:
        if issubclass(experts, mk.FusedMoEExpertsModular):
            standard = mk.FusedMoEActivationFormat.Standard
            fits, reason = experts.is_supported_config(experts, config, *_KEYS[kind], standard)
            if fits:
                return _Modular(sizes, device, kind, backend, experts)
    return f"{name}, {kind}: {reason}"


class _Modular:
    """One kernel on ranks that are told apart by their expert maps."""

    def __init__(
        self, sizes: Sizes, device: torch.device, kind: str, backend: Any, experts: type
    ) -> None:
        self.name, self.format = f"vllm {experts.__name__}", kind
        self._sizes, self._device = sizes, device
        self._backend, self._experts = backend, experts

    def order(self, masters: Masters, rank: int) -> list[torch.Tensor]:
        """What vLLM makes of a checkpoint when it has loaded it."""
        config = _config(self._sizes, self._device, rank)
        weights = masters.gate_up, masters.down
        if self.format == "bf16":
            of_vllm = unquantized.convert_to_unquantized_kernel_format
            return [*of_vllm(self._backend, config, *weights)]
        layer = _layer(self._sizes, config, self.format)
        scales = masters.gate_up_scale, masters.down_scale
        return [
            *fp8.convert_to_fp8_moe_kernel_format(
                self._backend, layer, *weights, *scales, None, None
            )
        ]

    def prepare(self, tensors: list[torch.Tensor], rank: int) -> Compute:
        """See ``ExpertKernel``."""
        sizes, config = self._sizes, _config(self._sizes, self._device, rank)
        gate_up, down, *scales = tensors
        kernel = self._kernel(config, scales)
        local = sizes.shape.num_local
        expert_map = torch.full((sizes.num_physical,), -1, dtype=torch.int32, device=self._device)
        own = torch.arange(local, dtype=torch.int32, device=self._device)
        expert_map[rank * local : (rank + 1) * local] = own

        def run(x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = kernel.apply(
                x,
                gate_up,
                down,
                weights,
                physical,
                activation=MoEActivation.SILU,
                global_num_experts=sizes.num_physical,
                expert_map=expert_map,
                apply_router_weight_on_input=False,
            )
            return output

        return run

    def _kernel(self, config: FusedMoEConfig, scales: list[torch.Tensor]) -> mk.FusedMoEKernel:
        if not scales:
            unquantised = FUSED_MOE_UNQUANTIZED_CONFIG
            return unquantized.make_unquantized_moe_kernel(
                unquantised, config, self._backend, self._experts
            )
        is_block = self.format == "fp8-block"
        quantised = fp8.make_fp8_moe_quant_config(
            self._backend,
            *scales,
            None,
            None,
            block_shape=[BLOCK, BLOCK] if is_block else None,
            per_act_token_quant=not is_block,
            per_out_ch_quant=not is_block,
        )
        return fp8.make_fp8_moe_kernel(quantised, config, self._experts, self._backend)


def _config(sizes: Sizes, device: torch.device, rank: int) -> FusedMoEConfig:
    """Of a rank that dispatches nothing itself."""
    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=1,
        ep_size=sizes.shape.num_ranks,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=rank,
        sp_size=1,
        use_ep=True,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    return FusedMoEConfig(
        num_experts=sizes.num_physical,
        experts_per_token=sizes.top_k,
        hidden_dim=sizes.hidden,
        intermediate_size=sizes.inner,
        num_local_experts=sizes.shape.num_local,
        num_logical_experts=sizes.shape.num_logical_experts,
        activation=MoEActivation.SILU,
        device=device,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=sizes.shape.num_ranks * sizes.tokens,
    )


def _layer(sizes: Sizes, config: FusedMoEConfig, kind: str) -> Any:
    """What vLLM's functions read of a layer when they bring weights into order."""
    masters = sizes.shape.num_masters
    block = {"weight_block_size": [BLOCK, BLOCK]} if kind == "fp8-block" else {}
    return SimpleNamespace(
        moe_config=config,
        activation=MoEActivation.SILU,
        num_experts=masters,
        local_num_experts=masters,
        hidden_size=sizes.hidden,
        intermediate_size_per_partition=sizes.inner,
        orig_dtype=get_current_vllm_config().model_config.dtype
        if get_current_vllm_config().model_config
        else torch.bfloat16,
        **block,
    )
